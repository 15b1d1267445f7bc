"""The run's monitor: builds the config's sinks and passes every record and event to each of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console

from meshwright.events import Event, StepRecord
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import PlainDisplay, RunHeader
from meshwright.monitor.drift import compare, measure
from meshwright.monitor.live import LiveDisplay
from meshwright.monitor.report import write_report
from meshwright.monitor.rundir import read_run
from meshwright.monitor.sinks import EVENTS, METRICS, EventTail, JsonlSink, Sink, truncate_metrics
from meshwright.monitor.tensorboard import TensorBoardSink
from meshwright.monitor.tracker_sink import TrackerSink
from meshwright.monitor.trackers.registry import TENSORBOARD


class Monitor:
    """A sink of sinks. Writing the JSON lines may raise; a display that fails is dropped."""

    def __init__(self, config: MonitorConfig, run_dir: Path, rank: int, lines: JsonlSink) -> None:
        """Starts with the JSON lines alone; callers use `Monitor.build`."""
        self._config, self._run_dir, self._rank, self._jsonl = config, run_dir, rank, lines
        self._displays: list[Sink] = []
        self._trackers: list[TrackerSink] = []
        self._lock = threading.Lock()
        self._closed = False
        self.continues = False
        """Whether other ranks continue the run: only the rank that ends it writes the report."""
        self._supervisor_events = EventTail(run_dir / EVENTS) if rank == 0 else None
        self.on_shown: Callable[[float], None] | None = None
        """Takes the time of the supervisor's newest event that was shown here: it shows later ones itself."""

    @classmethod
    def build(
        cls,
        config: MonitorConfig,
        run_dir: Path,
        header: RunHeader,
        rank: int = 0,
        resumed_step: int | None = None,
        stream: TextIO | None = None,
    ) -> Self:
        """Opens the run's files and, on rank 0, its display.

        Args:
            config: display, TensorBoard, trackers, report and their bounds.
            run_dir: the run directory, which exists.
            header: the run before its first step, for the display.
            rank: global rank; other ranks than 0 write events alone.
            resumed_step: the step after which a resumed run continues; later metrics are dropped.
            stream: of the display; standard error by default.
        """
        if rank == 0 and resumed_step is not None:
            truncate_metrics(run_dir / METRICS, resumed_step)
        monitor = cls(config, run_dir, rank, JsonlSink(run_dir, metrics=rank == 0))
        if rank == 0:
            if config.tensorboard or TENSORBOARD in config.trackers:
                folder = run_dir / "tensorboard"
                monitor._add_display("tensorboard", lambda: TensorBoardSink(folder, config.every, resumed_step))
            for name in config.trackers:
                if name != TENSORBOARD:
                    monitor._trackers.append(monitor._build_tracker(name))
            monitor._displays += monitor._trackers
            if config.display != "none":
                monitor._add_display("display", lambda: monitor._build_display(header, stream or sys.stderr))
        return monitor

    def step(self, record: StepRecord) -> None:
        """Records and shows one step, and shows new events of the supervisor."""
        with self._lock:
            self._jsonl.step(record)
            for sink in list(self._displays):
                self._call_or_drop(sink, partial(sink.step, record))
            self._show_supervisor_events()

    def event(self, event: Event) -> None:
        """Records and shows one event, after new ones of the supervisor; any thread may call it."""
        with self._lock:
            self._show_supervisor_events()
            self._jsonl.event(event)
            self._show(event)

    def _show_supervisor_events(self) -> None:
        """Shows what the supervisor has recorded since the last call; under the lock."""
        events = self._supervisor_events.read() if self._supervisor_events is not None else []
        for event in events:
            self._show(event)
        if events and self.on_shown is not None:
            self.on_shown(events[-1].time)

    def _show(self, event: Event) -> None:
        """Passes an event to every display; under the lock."""
        for sink in list(self._displays):
            self._call_or_drop(sink, partial(sink.event, event))

    def __enter__(self) -> Self:
        """Returns the monitor; the end of the block closes it in any case."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the monitor."""
        self.close()

    def close(self) -> None:
        """Restores the terminal, records parts that drifted from the plan, and writes the report where the run ends.

        Call it after the last event, on every rank, however the run ended. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._show_supervisor_events()
        for tracker in self._trackers:
            tracker.continues = self.continues
        for sink in list(self._displays):
            self._call_or_drop(sink, sink.close)
        self._displays.clear()
        try:
            if self._rank == 0 and not self.continues:
                self._compare_and_report()
        finally:
            self._jsonl.close()

    def _compare_and_report(self) -> None:
        """Records parts that drifted from the plan, and writes the report."""
        try:
            run = read_run(self._run_dir)
            drifts = compare(run.plan, measure(run.steps), self._config.drift_bound)
            drifted = [drift.to_json() for drift in drifts if drift.beyond]
            if drifted:
                self._jsonl.event(Event(kind="drifted", rank=0, data={"parts": drifted}))
            if self._config.report:
                write_report(self._run_dir, self._config.drift_bound)
        # Training has finished and is saved; a report that can't be written must not turn it into a failure.
        except Exception as error:
            self._jsonl.event(_failure("report", error))

    def _build_display(self, header: RunHeader, stream: TextIO) -> Sink:
        """Builds the panel on a capable terminal, else the plain display."""
        console = Console(file=stream)
        can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        if self._config.display == "live" or (self._config.display == "auto" and can_draw):
            return LiveDisplay(header, self._config.wait_s, console, self._record_display_failure)
        return PlainDisplay(header, self._config.every, self._config.wait_s, stream)

    def _build_tracker(self, name: str) -> TrackerSink:
        def report_failure(tracker: str, error: str) -> None:
            self._jsonl.event(Event(kind="tracker_failed", rank=0, data={"tracker": tracker, "error": error}))

        return TrackerSink(name, self._run_dir, self._config.project, self._config.every, report_failure)

    def _record_display_failure(self, error: Exception) -> None:
        self._jsonl.event(_failure("display", error))

    def _add_display(self, name: str, build_sink: Callable[[], Sink]) -> None:
        try:
            self._displays.append(build_sink())
        except Exception as error:
            self._jsonl.event(_failure(name, error))

    def _call_or_drop(self, sink: Sink, action: Callable[[], None]) -> None:
        """Calls a display; one that raises is closed and dropped."""
        try:
            action()
        except Exception as error:
            # A display that raised once is closed and never called again; training continues.
            if sink in self._displays:
                self._displays.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            self._jsonl.event(_failure(type(sink).__name__, error))


def _failure(name: str, error: Exception) -> Event:
    return Event(kind="monitor_failed", rank=0, data={"part": name, "error": f"{type(error).__name__}: {error}"})
