"""A run that begins on a machine without its checkpoints, or with damaged ones, takes the newest from elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.checkpoint.mirror import BEFORE_ALL, Mirror
from meshwright.checkpoint.store import CheckpointStore
from meshwright.events import Event
from meshwright.jobs.progress import Say, to_stderr
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes


def fetch_checkpoint(config: RunConfig, run_dir: Path, say: Say = to_stderr) -> None:
    """Brings the newest checkpoint back from its other place where that has a newer one than the run directory.

    One here that is cut short, or has no manifest, doesn't count and is replaced. Contents are read when the ranks load
    one, which ask the other place again where they are damaged.

    Raises:
        CheckpointError: when there is one that can't be had: to begin anew instead would be a surprise.
    """
    if not config.checkpoint.mirror:
        return
    root, mirror, began = run_dir / "checkpoints", Mirror(config.checkpoint.mirror, run_dir.name), time.monotonic()
    latest = CheckpointStore(root, config.checkpoint).latest()
    found = mirror.fetch(root, latest[:2] if latest is not None else BEFORE_ALL)
    if found is None:
        return
    say(f"checkpoint of step {found.step}, {format_bytes(found.size_bytes)}, copied back from {mirror}")
    sink = JsonlSink(run_dir, metrics=False)
    try:
        told = found.told(mirror, time.monotonic() - began)
        sink.event(Event(kind="checkpoint_fetched", rank=SUPERVISOR, data=told))
    finally:
        sink.close()
