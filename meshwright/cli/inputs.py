"""What several verbs do first: prepared text with progress, a run's config, a model with its shape."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.words import say
from meshwright.config import read_toml
from meshwright.errors import ConfigError
from meshwright.planner.memory import StateSizes
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from meshwright.data.config import DataConfig
    from meshwright.data.tokens import TokenSet
    from meshwright.models.build import BuiltModel

CACHE = Path("prepared")
"""Where prepared text is kept unless ``data.cache`` says otherwise."""
CONFIG = "config.toml"
PLAN = "plan.json"


def prepared(config: DataConfig, out: Path | None = None, quiet: bool = False) -> TokenSet:
    """Prepares text, or opens what was prepared before, and says how it goes."""
    from meshwright.data.prepare import prepare, prepared_path

    folder = out or prepared_path(config, CACHE)
    began = time.monotonic()
    token_set = prepare(config, folder, progress=None if quiet else _teller())
    if not quiet:
        trained, held = (format_count(len(split.tokens)) for split in (token_set.train, token_set.validation))
        size, spent = token_set.vocab_size, format_seconds(time.monotonic() - began)
        say(f"text: {folder}: {trained} + {held} held out tokens, vocabulary {size} ({spent})")
    return token_set


def _teller(every_s: float = 2.0) -> Callable[[Any], None]:
    stage, at = "", time.monotonic()

    def tell(progress: Any) -> None:
        nonlocal stage, at
        now = time.monotonic()
        if progress.stage != stage or now - at >= every_s:
            stage, at = progress.stage, now
            done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
            say(f"text: {progress.stage} {done} of {total}")

    return tell


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """A model on meta with what planning needs of it."""

    built: BuiltModel
    sizes: StateSizes
    fingerprint: str
    """Hash of names, shapes and types of its parameters."""


def read_model(config: RunConfig, vocab: int | None, context: int | None) -> ReadModel:
    """Builds the config's model on the meta device."""
    from meshwright.models.build import build_meta

    built = build_meta(config.model, vocab=vocab, context=context)
    named = [(name, item) for name, item in built.module.named_parameters() if item.requires_grad]
    layers = [
        sum(item.numel() for name, item in named if name.startswith(layer + ".")) for layer in built.anatomy.layers
    ]
    rows = [(name, list(item.shape), str(item.dtype)) for name, item in built.module.named_parameters()]
    return ReadModel(
        built=built,
        sizes=StateSizes(total=sum(item.numel() for _, item in named), layers=tuple(layers)),
        fingerprint=hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
    )


def run_config(run_dir: Path) -> RunConfig:
    """Reads the config of a run directory.

    Raises:
        ConfigError: when the directory holds no run.
    """
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}; give the directory of a run")
    return RunConfig.from_dict(read_toml(run_dir / CONFIG))
