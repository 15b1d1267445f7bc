"""Where a step's time goes: laps between marks, by host clock on the CPU and by events on CUDA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_MARKS = 1 << 14
"""Marks that are kept until they are drained; a custom loop may never drain them."""


@dataclass(frozen=True, slots=True)
class Laps:
    """Marks that `StepTimer.take` has taken."""

    start: Any
    """Where the first lap begins: seconds of the host, or an event of CUDA."""
    marks: Sequence[tuple[str, Any]]
    """(phase, its end), in order."""

    def have_ended(self) -> bool:
        """Returns whether `read` needn't wait."""
        return isinstance(self.start, float) or not self.marks or self.marks[-1][1].query()

    def read(self) -> dict[str, float]:
        """Returns seconds by phase; on CUDA it waits for the last mark, not for what was queued behind it."""
        seconds_by_phase: dict[str, float] = {}
        last_mark = self.start
        on_host = isinstance(last_mark, float)
        if self.marks and not on_host:
            self.marks[-1][1].synchronize()
        for phase, mark in self.marks:
            spent = mark - last_mark if on_host else last_mark.elapsed_time(mark) / 1e3
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + spent
            last_mark = mark
        return seconds_by_phase


class StepTimer:
    """Splits a step into named parts; on CUDA it never makes the host wait.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._marks: deque[tuple[str, Any]] = deque(maxlen=MOST_MARKS)
        self._last_mark: Any = self._now()

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, phase: str) -> None:
        """Books the time since the last mark under ``phase``."""
        self._marks.append((phase, self._now()))

    def wait(self) -> None:
        """Waits for the last mark on CUDA, so that a host's clock read now lies behind all marks."""
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()

    def take(self) -> Laps:
        """Returns the laps since the last call, to be read when it suits."""
        laps = Laps(self._last_mark, tuple(self._marks))
        self._marks.clear()
        self._last_mark = self._now()
        return laps

    def put_back(self, laps: Laps) -> None:
        """Goes on after laps that were taken; the next one begins at their end. Those since are dropped."""
        self._marks = deque(laps.marks, maxlen=MOST_MARKS)
        self._last_mark = laps.start

    def drain(self) -> dict[str, float]:
        """Returns seconds by part since the last drain; what comes after the last mark is in no part.

        On CUDA it waits for the last mark.
        """
        seconds_by_phase = self.take().read()
        self._last_mark = self._now()
        return seconds_by_phase
