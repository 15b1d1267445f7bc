"""The tokenizer, model config and text facts inside a run directory, so that it can be used without its inputs.

``tokenizer/`` has the tokenizer's files as transformers reads them, ``model/config.json`` the architecture of a
transformers model, ``text.json`` the facts of the prepared text: its vocabulary, the token that ends a text, tokens and
bytes of both splits (from which bits per byte follow) and its fingerprint. ``text.json`` is written last.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.data.tokenizer import COMPANIONS, SETTINGS, TOKENIZER, load_tokenizer
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError, DataError
from meshwright.models.build import BuiltModel
from meshwright.records import parse_json

TOKENIZER_FOLDER = "tokenizer"
MODEL_FOLDER = "model"
TEXT = "text.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunText:
    """The tokenizer of a run and the facts of its text."""

    folder: Path
    """Directory of the tokenizer's files."""
    facts: Mapping[str, Any]
    """The manifest of the prepared set, but for its list of files."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return int(self.facts["vocab_size"])

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text, or None."""
        value = self.facts["eos_id"]
        return None if value is None else int(value)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        return load_tokenizer(self.folder / "tokenizer.json")


def write_contents(run_dir: Path, built: BuiltModel, token_set: TokenSet) -> None:
    """Puts the tokenizer, the model's config and the facts of the text into a run directory, once for each text.

    A run that died before its first checkpoint may begin anew on a text that changed meanwhile.

    Args:
        run_dir: the run's directory, which exists.
        built: the model on meta.
        token_set: the prepared text.
    """
    facts = _read_facts(run_dir)
    if facts is not None and facts.get("fingerprint") == token_set.fingerprint:
        return
    for name in (SETTINGS, *COMPANIONS, TOKENIZER):
        if (token_set.path / name).is_file():
            _write_atomically(run_dir / TOKENIZER_FOLDER / name, (token_set.path / name).read_bytes())
    if built.hf_config is not None:
        with tempfile.TemporaryDirectory() as config_folder:
            built.save_config(Path(config_folder))
            for file in sorted(Path(config_folder).iterdir()):
                _write_atomically(run_dir / MODEL_FOLDER / file.name, file.read_bytes())
    facts = {name: value for name, value in token_set.manifest.items() if name != "files"}
    _write_atomically(run_dir / TEXT, json.dumps(facts, indent=2, sort_keys=True).encode("utf-8"))


def changed_parts(run_dir: Path, token_set: TokenSet) -> str:
    """Returns what of a run's text is another now, in words; it is known that something is.

    Args:
        run_dir: the run's directory, with the facts of its text where it has them.
        token_set: the text as it is now.
    """
    facts = _read_facts(run_dir) or {}
    now = token_set.manifest
    parts = [] if facts.get("tokenizer_sha256") in (None, now["tokenizer_sha256"]) else ["the tokenizer"]
    splits = facts.get("splits")
    for split, name in (("train", "the training text"), ("validation", "the held-out text")):
        if isinstance(splits, dict) and splits.get(split) != now["splits"][split]:
            parts.append(name)
    return " and ".join(parts) or "words of the text"


def _read_facts(run_dir: Path) -> dict[str, Any] | None:
    """Returns the facts of a run's text; None where there are none that can be read."""
    try:
        facts = parse_json((run_dir / TEXT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a temporary file and renames it: nodes that share the directory may write the same file at once."""
    path.parent.mkdir(exist_ok=True)
    handle, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        # mkstemp makes files that nobody else can read.
        os.fchmod(file.fileno(), 0o644)
        file.write(content)
    os.replace(temporary_path, path)


def read_text(run_dir: Path) -> RunText:
    """Reads the facts of a run's text.

    Raises:
        ConfigError: when the run was begun without them.
        DataError: when they are damaged.
    """
    try:
        facts = parse_json((run_dir / TEXT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{run_dir} has no {TEXT}, which a run writes before its first step; the same train command adds it"
        ) from None
    except ValueError as error:
        cure = "delete it, and the same train command adds it"
        raise DataError(f"{run_dir / TEXT} is damaged ({error}); {cure}") from None
    sizes = (facts.get("vocab_size"), facts.get("eos_id") or 0) if isinstance(facts, dict) else (None,)
    if not all(type(size) is int and 0 <= size < 1 << 31 for size in sizes):
        raise DataError(f"{run_dir / TEXT} doesn't give the vocabulary; delete it, and the same train command adds it")
    return RunText(folder=run_dir / TOKENIZER_FOLDER, facts=facts)


def model_folder(run_dir: Path) -> Path | None:
    """Returns the folder of a run's transformers config, or None for a function's module."""
    folder = run_dir / MODEL_FOLDER
    return folder if (folder / "config.json").is_file() else None
