"""The sink of a tracker: a queue with a bound, and a thread that alone waits for the tracker."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.config import read_toml
from meshwright.errors import MeshwrightError
from meshwright.events import Event, StepRecord
from meshwright.monitor.scalars import due_scalars, event_scalars, event_text
from meshwright.monitor.trackers.contract import TrackedRun, Tracker
from meshwright.monitor.trackers.registry import find_factory
from meshwright.records import parse_json

FOLDER = "trackers"
"""Of a run directory: a file for each tracker, with what the tracker calls the run."""
MOST_QUEUED = 1000
"""Points that wait for a tracker; of one that hangs for longer the later ones are lost."""
CLOSE_S = 30.0
"""Seconds that a tracker has at the end of a run to send what is left."""
HANDOVER_S = 5.0
"""The same where other ranks go on with the run and wait for it."""
_MOST_ID = 256

_Call = Callable[[Tracker], None]


class TrackerSink:
    """Passes a run's scalars to a tracker, which can neither stop nor delay the run.

    Args:
        name: of the tracker.
        run_dir: the run directory, which has the run's config.
        project: what the run belongs to.
        every: steps between two points.
        report_failure: called once, in the thread that uses the sink, with the first failure.
    """

    def __init__(
        self, name: str, run_dir: Path, project: str, every: int, report_failure: Callable[[str, str], None]
    ) -> None:
        self._name, self._run_dir, self._project, self._every = name, run_dir, project, every
        self._report_failure = report_failure
        self._calls: queue.Queue[_Call | None] = queue.Queue(MOST_QUEUED)
        self._failure, self._reported, self._gave_up = "", False, False
        self.continues = False
        """Whether other ranks go on with the run."""
        # A daemon: a tracker that hangs doesn't keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Queues the scalars of the first and of every k-th step."""
        self._queue_scalars(record.step, due_scalars(record, self._every))

    def event(self, event: Event) -> None:
        """Queues the numbers of an evaluation, and the text of a sample."""
        step = event.data.get("step")
        step = step if isinstance(step, int) else 0
        self._queue_scalars(step, event_scalars(event))
        if text := event_text(event):
            tag, contents = text
            self._queue(lambda tracker: tracker.log_text(step, tag, contents))

    def close(self) -> None:
        """Waits a limited time until the tracker has sent everything."""
        limit_s = HANDOVER_S if self.continues or self._failure else CLOSE_S
        deadline = time.monotonic() + limit_s
        # A full queue of a tracker that hangs has no room for the end.
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=0.0 if self._gave_up else limit_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._failure:
            self._failure = f"it didn't end within {limit_s:g} s; what it hasn't sent is lost"
        self._report_once()

    def _queue_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        if finite:
            self._queue(lambda tracker: tracker.log(step, finite))
        self._report_once()

    def _queue(self, call: _Call) -> None:
        if self._gave_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = self._failure or f"it is {MOST_QUEUED} points behind; later ones are lost until it goes on"

    def _report_once(self) -> None:
        """Reports the first failure; called by the run's own threads alone, since files aren't for several."""
        if self._failure and not self._reported:
            self._reported = True
            self._report_failure(self._name, self._failure)

    def _run(self) -> None:
        """Makes the tracker and passes it what is queued; runs in the thread."""
        try:
            tracker = self._make_tracker()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close(not self.continues)
        except BaseException as error:  # also a SystemExit of the package
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            self._gave_up = True

    def _make_tracker(self) -> Tracker:
        path = self._run_dir / FOLDER / f"{self._name}.json"
        try:
            config = read_toml(self._run_dir / "config.toml")
        except MeshwrightError:
            config = {}
        name = self._run_dir.resolve().name
        run = TrackedRun(
            project=self._project, name=name, run_dir=self._run_dir, config=config, id=_read_id(path)
        )  # fmt: skip
        tracker = find_factory(self._name)(run)
        if tracker.id != run.id:
            _write_id(path, str(tracker.id))
        return tracker


def _read_id(path: Path) -> str | None:
    """Returns what a tracker calls the run; None without a file, or for one that is damaged."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    run_id = values.get("id") if isinstance(values, dict) else None
    plain = isinstance(run_id, str) and 0 < len(run_id) <= _MOST_ID and run_id.isprintable()
    return run_id if plain else None


def _write_id(path: Path, run_id: str) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.write_text(json.dumps({"id": run_id}), encoding="utf-8")
    temporary.replace(path)
