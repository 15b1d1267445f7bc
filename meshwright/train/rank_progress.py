"""A rank's position in its step (phase, layer, awaited collective), stamped for watchers; injects faults there."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.monitor.progress import NO_LAYER, ProgressWriter
from meshwright.monitor.timeline import TimelineWriter
from meshwright.parallel.program import Program
from meshwright.parallel.turns import Held
from meshwright.train.faults import Faults

AFTERWARDS = ("restore", "record", "compare", "evaluate", "checkpoint", "snapshot", "sample", "export", "done")
"""Phases after a step, which are stamped with that step's number."""


class RankProgress:
    """Stamps this rank's position.

    Args:
        progress: writes the stamps.
        faults: the injected faults, if any.
        steps_done: returns the number of steps done.
        timeline: records the phases and waits of some steps, if they are wanted.
    """

    OF_FORWARD = ("place",)
    """What belongs to a forward, or backward, that runs."""

    def __init__(
        self,
        progress: ProgressWriter,
        faults: Faults | None,
        steps_done: Callable[[], int],
        timeline: TimelineWriter | None = None,
    ) -> None:
        self._progress, self._faults, self._steps_done = progress, faults, steps_done
        self._timeline = timeline
        self._phase, self._micro, self._layer, self._number = "start", 0, NO_LAYER, 0

    def attach(self, program: Program) -> None:
        """Has a program report its layers and waits; of two functions that run in turns each has its own place."""
        program.progress_hooks.listener = self.enter
        program.hold(Held(self, self.OF_FORWARD))
        if program.mesh is not None:
            program.mesh.log.on_wait = self.waits

    def begin_step(self) -> None:
        """Starts a step."""
        # Collectives are numbered within a step, so that ranks can be compared.
        self._number = 0
        if self._timeline is not None:
            self._timeline.begin(self._steps_done() + 1)
        if self._faults is not None:
            self._faults.begin_step(self._steps_done() + 1)

    def phase(self, phase: str, micro: int) -> None:
        """Starts a phase, and stamps it."""
        self._phase, self._micro, self._layer = phase, micro, NO_LAYER
        self._progress.stamp(phase, self._step, micro, "", self._number)
        if self._timeline is not None:
            self._timeline.phase(phase, micro)

    @property
    def place(self) -> tuple[str, int, int]:
        """Phase, micro-batch and layer."""
        return self._phase, self._micro, self._layer

    @place.setter
    def place(self, place: tuple[str, int, int]) -> None:
        """Goes on at a place, and stamps it."""
        self._phase, self._micro, self._layer = place
        self._progress.stamp(self._phase, self._step, self._micro, "", self._number, self._layer)

    def inject(self) -> None:
        """Injects the faults at the beginning of the phase."""
        if self._faults is not None:
            self._faults.reach(self._phase)

    def enter(self, layer: int) -> None:
        """Starts a layer, `NO_LAYER` for none, and stamps it."""
        self._layer = layer
        # A write to shared memory without a system call: cheap enough for every layer.
        self._progress.enter(layer)
        if self._faults is not None and self._faults.pending:
            self._faults.reach(f"{self._phase}.{layer}")

    def waits(self, operation: str, number: int = 0, size_bytes: int = 0) -> None:
        """Stamps the operation that the rank is about to wait for (`TrafficLog.on_wait`); empty after the wait."""
        self._number = number
        self._progress.stamp(self._phase, self._step, self._micro, operation, number, self._layer, size_bytes)
        if self._timeline is not None:
            self._timeline.wait(operation, size_bytes)
        if operation and self._faults is not None:
            self._faults.reach("collective")

    @property
    def _step(self) -> int:
        """The current step; in phases after a step, the step just done."""
        return self._steps_done() + (self._phase not in AFTERWARDS)

    def __str__(self) -> str:
        """Returns ``backward of step 12``."""
        return f"{self._phase} of step {self._step}"
