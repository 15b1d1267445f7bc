"""Fetches the newest checkpoint from a run's mirror when the run directory has none, an older one or a damaged one."""

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


def fetch_checkpoint(config: RunConfig, run_dir: Path, say: Say = to_stderr) -> bool:
    """Copies the mirror's newest checkpoint back when it is newer than the run directory's; returns whether it asked.

    A local one that is truncated, or has no manifest, doesn't count and is replaced. Contents are checked when the
    ranks load the checkpoint; they ask the mirror again for damaged files.

    Raises:
        CheckpointError: when the mirror has one that can't be copied: to begin anew instead would be a surprise.
    """
    if not config.checkpoint.mirror:
        return False
    root, mirror, began = run_dir / "checkpoints", Mirror(config.checkpoint.mirror, run_dir.name), time.monotonic()
    latest = CheckpointStore(root, config.checkpoint).latest()
    fetched = mirror.fetch(root, latest[:2] if latest is not None else BEFORE_ALL)
    if fetched is None:
        return True
    say(f"checkpoint of step {fetched.step}, {format_bytes(fetched.size_bytes)}, copied back from {mirror}")
    sink = JsonlSink(run_dir, metrics=False)
    try:
        event_fields = fetched.event_fields(mirror, time.monotonic() - began)
        sink.event(Event(kind="checkpoint_fetched", rank=SUPERVISOR, data=event_fields))
    finally:
        sink.close()
    return True
