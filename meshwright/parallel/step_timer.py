"""Where a step's time goes: laps between marks, by host clock on the CPU and by events on CUDA."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

MOST_MARKS = 1 << 14
"""Marks that are kept until they are drained; a custom loop may never drain them."""


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

    def drain(self) -> dict[str, float]:
        """Returns seconds by part since the last drain; what comes after the last mark is in no part.

        On CUDA it waits for the last mark.
        """
        self.wait()
        seconds_by_phase: dict[str, float] = {}
        for phase, mark in self._marks:
            spent = self._last_mark.elapsed_time(mark) / 1e3 if self._cuda else mark - self._last_mark
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + spent
            self._last_mark = mark
        self._marks.clear()
        self._last_mark = self._now()
        return seconds_by_phase
