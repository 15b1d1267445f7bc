"""A run that begins on a machine without its checkpoints takes the newest from their other place."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.mirror import Mirror
from meshwright.cli.words import say
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes


def fetch(config: RunConfig, run_dir: Path) -> None:
    """Brings the newest checkpoint back from its other place where that has a newer one than the run directory.

    Raises:
        CheckpointError: when there is one that can't be had: to begin anew instead would be a surprise.
    """
    if not config.checkpoint.mirror:
        return
    from meshwright.checkpoint.store import CheckpointStore

    root, mirror = run_dir / "checkpoints", Mirror(config.checkpoint.mirror, run_dir.name)
    latest = CheckpointStore(root, config.checkpoint).latest()
    found = mirror.fetch(root, latest.step if latest is not None else -1)
    if found is not None:
        say(f"checkpoint of step {found.step}, {format_bytes(found.size_bytes)}, copied back from {mirror}")
