"""What a tracker is: it gets a run's settings once, then scalars and texts by step, from one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.json_types import JsonObject

GROUP = "meshwright.trackers"
"""Entry-point group by which other packages give trackers; an entry is a `TrackerFactory`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run that a tracker gets when it is made."""

    project: str
    """Name of what the run belongs to, as ``monitor.project`` says."""
    name: str
    """Name of the run: its directory's."""
    run_dir: Path
    """The run directory, where a tracker may write files of its own."""
    config: JsonObject
    """Settings of the run; log them where ``id`` is None, since a resumed run has them."""
    id: str | None
    """What `Tracker.id` was when the run was tracked before; None for the first time."""


class Tracker(Protocol):
    """Takes a run's scalars. One thread uses it; it may raise, wait or hang, which training doesn't notice."""

    id: str
    """What the tracker calls the run; the next process of the run gets it as `TrackedRun.id`, to go on with it."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes finite scalars of a step by tag; after a recovery steps come again."""

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Takes a text."""

    def close(self, finished: bool) -> None:
        """Sends what is left; ``finished`` is false when the run goes on in other processes."""


TrackerFactory = Callable[[TrackedRun], Tracker]
"""Makes a tracker; called in a thread of rank 0."""


def flatten_config(config: JsonObject, prefix: str = "") -> dict[str, str]:
    """Returns settings as text by dotted key, for trackers that take flat parameters."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: str(value)}
    return flat
