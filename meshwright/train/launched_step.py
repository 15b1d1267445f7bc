"""A step that is queued on the device, and whose outcome the host hasn't read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from meshwright.parallel.axis_group import StepTraffic
from meshwright.parallel.program import Program
from meshwright.parallel.step_timer import Laps
from meshwright.train.health import Limits
from meshwright.train.step import StepOutcome


class Clocks(NamedTuple):
    """A moment by three clocks of the host, in seconds."""

    wall: float
    thread: float
    """Processor time of the thread that computes."""
    process: float
    """Processor time of all threads."""

    @classmethod
    def now(cls) -> Self:
        """Reads the clocks."""
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def since(self, *earlier: Clocks) -> Clocks:
        """Returns the seconds from the latest of some earlier moments to this one."""
        return Clocks(*(now - max(moments) for now, moments in zip(self, zip(*earlier))))


@dataclass(kw_only=True, slots=True)
class LaunchedStep:
    """A step up to the reading of its outcome."""

    step: int
    """Steps done before it."""
    targets: int
    """Target tokens of its global batch by the data index."""
    started: Clocks
    """When the host began it."""
    part: tuple[float, float] | None
    """Gradient norm and targets of the noise scale's small batch; None where it isn't measured."""
    outcome: StepOutcome
    """Its numbers, on their way to the host."""
    run: Callable[[Callable[[], Limits | None]], StepOutcome]
    """Computes it again, on the same rows, within the limits that its argument returns."""
    laps: Laps | None = None
    """Its times on the device, where another step follows before they are read."""
    traffic: StepTraffic | None = None
    """Its traffic, taken with ``laps``."""

    def take_measurements(self, program: Program) -> tuple[Laps, StepTraffic]:
        """Returns the step's times and traffic; the first call takes them, before those of another step are added."""
        if self.laps is None or self.traffic is None:
            self.laps = program.step_timer.take()
            self.traffic = program.mesh.log.take() if program.mesh is not None else StepTraffic()
        return self.laps, self.traffic

    def put_measurements_back(self, program: Program) -> None:
        """Has the step's times and traffic go on, and drops those of the one that was abandoned behind it."""
        assert self.laps is not None and self.traffic is not None
        # Of the abandoned step counts its time alone, as that of nothing.
        program.step_timer.put_back(self.laps)
        program.step_timer.lap("other")
        if program.mesh is not None:
            program.mesh.log.put_back(self.traffic)
        self.laps = self.traffic = None

    def run_within(self, limits: Limits | None) -> StepOutcome:
        """Computes it again within limits."""
        return self.run(lambda: limits)
