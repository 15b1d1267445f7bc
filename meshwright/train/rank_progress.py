"""Where a rank stands, stamped for whoever watches: phase, layer, what it waits for; and what goes wrong there."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.monitor.progress import NO_LAYER, ProgressWriter
from meshwright.train.faults import Faults

AFTERWARDS = ("restore", "record", "compare", "evaluate", "checkpoint", "snapshot", "sample", "export", "done")
"""Phases that follow a step, and are said to be of it; of none while it isn't known yet."""


class RankProgress:
    """Keeps where this rank stands.

    Args:
        progress: where that is stamped.
        faults: what is to go wrong on purpose.
        done: gives the steps done.
    """

    def __init__(self, progress: ProgressWriter, faults: Faults | None, done: Callable[[], int]) -> None:
        self._progress, self._faults, self._done = progress, faults, done
        self._phase, self._micro, self._layer, self._number = "start", 0, NO_LAYER, 0

    def begin(self) -> None:
        """Tells that a step begins."""
        self._number = 0
        if self._faults is not None:
            self._faults.begin(self._done() + 1)

    def phase(self, phase: str, micro: int) -> None:
        """Tells that a phase begins."""
        self._phase, self._micro, self._layer = phase, micro, NO_LAYER
        self._progress.stamp(phase, self._step, micro, "", self._number)

    def planned(self) -> None:
        """Does what is to go wrong at the beginning of the phase."""
        if self._faults is not None:
            self._faults.at(self._phase)

    def enter(self, layer: int) -> None:
        """Tells which layer begins, or that none does."""
        self._layer = layer
        self._progress.enter(layer)
        if self._faults is not None and self._faults.pending:
            self._faults.at(f"{self._phase}.{layer}")

    def waits(self, what: str, number: int = 0, size_bytes: int = 0) -> None:
        """Tells what the rank is about to wait for, as `TrafficLog.on_wait` takes it."""
        self._number = number
        self._progress.stamp(self._phase, self._step, self._micro, what, number, self._layer, size_bytes)
        if what and self._faults is not None:
            self._faults.at("collective")

    @property
    def _step(self) -> int:
        """The step under way; the one just done in what follows a step."""
        return self._done() + (self._phase not in AFTERWARDS)

    def __str__(self) -> str:
        """Returns ``backward of step 12``."""
        return f"{self._phase} of step {self._step}"
