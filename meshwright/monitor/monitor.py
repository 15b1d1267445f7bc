"""The run's monitor: builds the sinks that a config asks for and hands every record and event to each of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from meshwright.events import Event, StepRecord
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import PlainDisplay, RunHeader
from meshwright.monitor.drift import compare, measure
from meshwright.monitor.live import LiveDisplay
from meshwright.monitor.report import write_report
from meshwright.monitor.rundir import read_run
from meshwright.monitor.sinks import EVENTS, METRICS, EventTail, JsonlSink, Sink, truncate_metrics
from meshwright.monitor.tensorboard import TensorBoardSink


class Monitor:
    """A sink of sinks. The JSON lines must be written and may raise; what only shows is dropped when it fails."""

    def __init__(self, config: MonitorConfig, run_dir: Path, rank: int, lines: JsonlSink) -> None:
        """Starts with the JSON lines alone; use `Monitor.build`."""
        self._config, self._run_dir, self._rank, self._lines = config, run_dir, rank, lines
        self._shows: list[Sink] = []
        self._lock = threading.Lock()
        self._closed = False
        self.goes_on = False
        """Whether other ranks go on with the run: the one who ends it says how it was."""
        self._tail = EventTail(run_dir / EVENTS) if rank == 0 else None

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
            config: what to show and record.
            run_dir: the run directory, which exists.
            header: what the display says about the run.
            rank: global rank; other ranks than 0 write events alone.
            resumed_step: the step a resumed run goes on after; later metrics are dropped.
            stream: where to show; standard error by default.
        """
        if rank == 0 and resumed_step is not None:
            truncate_metrics(run_dir / METRICS, resumed_step)
        monitor = cls(config, run_dir, rank, JsonlSink(run_dir, metrics=rank == 0))
        if rank == 0:
            if config.tensorboard:
                folder = run_dir / "tensorboard"
                monitor._add("tensorboard", lambda: TensorBoardSink(folder, config.every, resumed_step))
            if config.display != "none":
                monitor._add("display", lambda: monitor._display(header, stream or sys.stderr))
        return monitor

    def step(self, record: StepRecord) -> None:
        """Records and shows one step, and shows what the supervisor has to say meanwhile."""
        with self._lock:
            self._lines.step(record)
            for sink in list(self._shows):
                self._guard(sink, partial(sink.step, record))
            for event in self._tail.read() if self._tail is not None and self._shows else ():
                for sink in list(self._shows):
                    self._guard(sink, partial(sink.event, event))

    def event(self, event: Event) -> None:
        """Records and shows one event; any thread may call it."""
        with self._lock:
            self._lines.event(event)
            for sink in list(self._shows):
                self._guard(sink, partial(sink.event, event))

    def __enter__(self) -> Self:
        """Returns the monitor, which the block's end closes however it ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the monitor."""
        self.close()

    def close(self) -> None:
        """Gives the terminal back, says which parts drifted from the plan, and writes the report where the run ends.

        Call it after the last event, on every rank, whatever way the run ended. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for sink in list(self._shows):
            self._guard(sink, sink.close)
        self._shows.clear()
        try:
            if self._rank == 0 and not self.goes_on:
                self._finish()
        finally:
            self._lines.close()

    def _finish(self) -> None:
        try:
            run = read_run(self._run_dir)
            drifts = compare(run.plan, measure(run.steps), self._config.drift_bound)
            beyond = [drift.to_json() for drift in drifts if drift.beyond]
            if beyond:
                self._lines.event(Event(kind="drifted", rank=0, data={"parts": beyond}))
            if self._config.report:
                write_report(self._run_dir, self._config.drift_bound)
        # The training is done and saved; a report that can't be written must not turn it into a failure.
        except Exception as error:
            self._lines.event(_failure("report", error))

    def _display(self, header: RunHeader, stream: TextIO) -> Sink:
        from rich.console import Console

        console = Console(file=stream)
        can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        if self._config.display == "live" or (self._config.display == "auto" and can_draw):
            return LiveDisplay(header, self._config.wait_s, console, self._drawing_failed)
        return PlainDisplay(header, self._config.every, self._config.wait_s, stream)

    def _drawing_failed(self, error: Exception) -> None:
        self._lines.event(_failure("display", error))

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._shows.append(make())
        except Exception as error:
            self._lines.event(_failure(name, error))

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if sink in self._shows:
                self._shows.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            self._lines.event(_failure(type(sink).__name__, error))


def _failure(name: str, error: Exception) -> Event:
    return Event(kind="monitor_failed", rank=0, data={"part": name, "error": f"{type(error).__name__}: {error}"})
