"""Prepared text: token files mapped into memory, their document ends, and the manifest that vouches for them."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import sha256
from meshwright.errors import DataError
from meshwright.names import plain_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST = "manifest.json"
VERSION = 1
"""Version of the files' format."""
_BASELINE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One of the two token streams of a set."""

    name: str
    """``train`` or ``validation``."""
    tokens: NDArray[np.unsignedinteger]
    """(tokens,) little-endian uint16 or uint32, mapped into memory."""
    ends: NDArray[np.int64]
    """(documents,) for each document the place after its last token, mapped into memory."""
    text_bytes: int
    """UTF-8 bytes of the text behind the tokens."""
    fingerprint: str
    """Hash of the whole set's contents."""

    def bits_per_byte(self, loss: float) -> float:
        """Converts a mean loss over this split's targets to bits per byte of its text.

        All tokens but the first are targets. Source: Gao et al. 2020 (The Pile), section 3.1: L_T / L_B * loss / ln 2.

        Args:
            loss: mean cross-entropy, nats per target token.
        """
        return loss / math.log(2.0) * max(0, len(self.tokens) - 1) / max(1, self.text_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSet:
    """A directory that `prepare` made."""

    path: Path
    """The directory."""
    manifest: Mapping[str, Any]
    """Contents of ``manifest.json``."""
    train: Split
    """What is trained on."""
    validation: Split
    """What is held out; empty when the share was 0."""

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> Self:
        """Opens a prepared directory and checks that its files are as long as the manifest says.

        Args:
            path: the directory.
            verify: also compare the files' SHA-256 with the manifest's (reads every byte).

        Raises:
            DataError: when the directory isn't a prepared set, or a file is missing, truncated or changed.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, facts in manifest["files"].items():
            _check_file(path, plain_name(name, path / MANIFEST, DataError), facts, verify)
        splits = {name: _split(path, name, manifest) for name in ("train", "validation")}
        return cls(path=path, manifest=manifest, **splits)

    @property
    def fingerprint(self) -> str:
        """Hash of the token files, the index and the tokenizer: equal sets give equal rows anywhere."""
        return str(self.manifest["fingerprint"])

    @property
    def vocab_size(self) -> int:
        """Largest token id that the tokenizer can give, plus one."""
        return int(self.manifest["vocab_size"])

    @property
    def eos_id(self) -> int | None:
        """Token that ends each document, or None where the tokenizer has none."""
        value = self.manifest["eos_id"]
        return None if value is None else int(value)

    @property
    def validation_text(self) -> Path:
        """File of the held-out documents, one after the other, as UTF-8."""
        return self.path / "validation.txt"

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / "tokenizer.json"))


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a prepared directory.

    Raises:
        DataError: when there is none, or it isn't one of this format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is not a prepared set: it has no {MANIFEST}; run meshwright prepare") from None
    except ValueError as error:
        raise DataError(f"{path / MANIFEST} is damaged ({error}); delete {path} and prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        found = manifest.get("version") if isinstance(manifest, dict) else None
        raise DataError(f"{path} has format version {found}, this program reads {VERSION}; prepare it again")
    return manifest


def _check_file(path: Path, name: str, facts: Mapping[str, Any], verify: bool) -> None:
    file = path / name
    size = file.stat().st_size if file.is_file() else None
    cure = f"delete {path} and prepare again"
    if size is None:
        raise DataError(f"{file} is missing, the manifest says {facts['bytes']} bytes; {cure}")
    if size != facts["bytes"]:
        word = "truncated" if size < facts["bytes"] else "too long"
        raise DataError(f"{file} is {word}: {size} bytes, the manifest says {facts['bytes']}; {cure}")
    if verify and sha256(file) != facts["sha256"]:
        raise DataError(f"{file} was changed: its SHA-256 is not the manifest's; {cure}")


def _split(path: Path, name: str, manifest: Mapping[str, Any]) -> Split:
    facts = manifest["splits"][name]
    # Ends are stored unsigned and mapped signed: numpy compares unsigned with signed as float64, copying the index.
    ends = _map(path / f"{name}.idx", "<i8", facts["documents"])
    tokens = _map(path / f"{name}.bin", manifest["dtype"], facts["tokens"])
    return Split(
        name=name, tokens=tokens, ends=ends, text_bytes=facts["text_bytes"], fingerprint=manifest["fingerprint"]
    )


def _map(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise DataError(f"{path} does not hold the {count} entries that the manifest counts; prepare it again")
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file can't be mapped
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def check_vocabulary(token_set: TokenSet, model_vocab: int) -> None:
    """Refuses tokens that a model's embedding has no row for.

    Args:
        token_set: the prepared text.
        model_vocab: rows of the model's embedding (V).

    Raises:
        DataError: when the set's vocabulary is the larger one.
    """
    if token_set.vocab_size > model_vocab:
        raise DataError(
            f"the text's vocabulary has {token_set.vocab_size} tokens, the model's {model_vocab}: token ids must be "
            f"below the model's; set data.vocab_size to {model_vocab} or less, take the model's own tokenizer "
            f"(data.tokenizer), or give the model a vocabulary of {token_set.vocab_size}"
        )


def compression_baselines(token_set: TokenSet, limit_bytes: int = _BASELINE_BYTES) -> dict[str, float]:
    """Compresses the held-out text with gzip -9 and xz -9e.

    Args:
        token_set: the prepared text.
        limit_bytes: compress no more than the first so many bytes.

    Returns:
        ``gzip`` and ``xz`` in bits per byte, and ``bytes``, what was compressed; empty without held-out text.
    """
    with open(token_set.validation_text, "rb") as file:
        data = file.read(limit_bytes)
    if not data:
        return {}
    packed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8.0 * len(result) / len(data) for name, result in packed.items()} | {"bytes": float(len(data))}
