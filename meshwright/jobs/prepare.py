"""Text becomes token files once: the job prepares it, or opens what was prepared before."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from meshwright.config import check_config
from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare as prepare_folder
from meshwright.data.prepare import prepared_path
from meshwright.data.stages import Progress, Report
from meshwright.data.tokenizer import has_tokenizer, same_tokenizer
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError
from meshwright.jobs.prepare_engines import PrepareConfig, engine_of
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.signals import interrupted_by_signals
from meshwright.models.config import ModelConfig
from meshwright.units import format_bytes, format_count, format_seconds

CACHE = Path("prepared")
"""Where prepared text is kept unless ``data.cache`` says otherwise."""


def prepare(config: DataConfig, out: str | Path | None = None, *, say: Say | None = to_stderr) -> TokenSet:
    """Turns text into token files, or opens those that an earlier call made of the same inputs.

    Args:
        config: what to read, and how; an empty ``paths`` takes the Python source that comes with the interpreter. A
            `PrepareConfig` says with which engine too.
        out: directory to make; one under ``prepared/``, named by what the inputs contain, when None.
        say: takes a line now and then; None for none.

    Returns:
        The token files, opened: ``train`` and ``validation`` splits, vocabulary, fingerprint.

    Raises:
        ConfigError, DataError: for text that isn't there or can't be read.
        LaunchError: when the engine can't start its tasks.
    """
    check_config(config, DataConfig, "config")
    config.check_all()
    began, progress = time.monotonic(), _progress_report(say) if say is not None else None
    folder = Path(out) if out is not None else prepared_path(config, CACHE, progress)
    engine = engine_of(config) if isinstance(config, PrepareConfig) else None
    # So that an engine's jobs are cancelled with the command.
    with interrupted_by_signals() if engine is not None else contextlib.nullcontext():
        token_set = prepare_folder(config, folder, progress=progress, engine=engine)
    if say is not None:
        training, held_out = (format_count(len(split.tokens)) for split in (token_set.train, token_set.validation))
        size, spent = token_set.vocab_size, format_seconds(time.monotonic() - began)
        split = token_set.train
        learned = (
            f", {split.targets() / max(1, len(split.tokens)):.0%} of them answers" if split.answers is not None else ""
        )
        say(f"text: {folder}: {training} + {held_out} held out tokens{learned}, vocabulary {size} ({spent})")
    return token_set


def text_config(model: ModelConfig, data: DataConfig) -> DataConfig:
    """Returns the data config with the tokenizer resolved for a model; trained weights need their own tokenizer.

    Raises:
        ConfigError: for another tokenizer than the weights' without ``foreign_tokenizer``, or weights without one.
    """
    folder = Path(model.name).expanduser().absolute()
    has_own_tokenizer = model.kind == "directory" and has_tokenizer(folder)
    has_weights = model.kind == "directory" and not model.fresh
    if data.foreign_tokenizer and (not has_own_tokenizer or not has_weights or data.tokenizer == "auto"):
        raise ConfigError(
            "data.foreign_tokenizer has no effect: it allows another data.tokenizer than that of a model directory "
            "whose weights are loaded; leave it out"
        )
    if data.tokenizer != "auto":
        if (
            has_own_tokenizer
            and has_weights
            and not data.foreign_tokenizer
            and not same_tokenizer(data.tokenizer, str(folder))
        ):
            raise ConfigError(
                f"data.tokenizer = {data.tokenizer!r} is another tokenizer than that of {model.name}, to whose weights "
                "its ids mean other text; leave it out, or set data.foreign_tokenizer = true to train on them anyway"
            )
        return data
    if not has_own_tokenizer and has_weights:
        raise ConfigError(
            f"model.name = '{model.name}' has weights and no tokenizer beside them, without which ids mean nothing to "
            "it; add its tokenizer.json, or give data.tokenizer the one it was trained with"
        )
    resolved = data.resolved(str(folder) if has_own_tokenizer else "")
    resolved.check()
    return resolved


def _progress_report(say: Say, every_s: float = 2.0) -> Report:
    """Returns a report that prints each stage as it begins, and its progress every ``every_s`` seconds."""
    stage, reported_at = "", time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal stage, reported_at
        now = time.monotonic()
        if progress.stage != stage or now - reported_at >= every_s:
            stage, reported_at = progress.stage, now
            say(f"text: {progress.stage} {format_bytes(progress.done_bytes)} of {format_bytes(progress.total_bytes)}")

    return report
