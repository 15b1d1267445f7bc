"""What is measured of a step that is read late, where the step behind it is abandoned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshwright.parallel.axis_group import StepTraffic, TrafficLog
from meshwright.parallel.step_timer import StepTimer
from meshwright.train.launched_step import Clocks, LaunchedStep


def sums(traffic: StepTraffic) -> dict[str, tuple[int, int]]:
    """Returns calls and bytes by operation."""
    return {total.op: (total.calls, total.bytes) for total in traffic.read()}


def test_a_step_goes_on_with_its_own_measurements_when_the_next_one_is_abandoned() -> None:
    """What it sends for an update that its limits allow after all is added to what it had sent before."""
    log, timer = TrafficLog(), StepTimer("cpu")
    program: Any = SimpleNamespace(mesh=SimpleNamespace(log=log), step_timer=timer)
    outcome: Any = None
    step = LaunchedStep(step=3, targets=8, started=Clocks.now(), part=None, outcome=outcome, run=lambda limits: outcome)
    log.add("shard", "reduce_scatter", 100, 0.0, 0.0)
    timer.lap("backward")
    laps, traffic = step.take_measurements(program)
    assert step.take_measurements(program) == (laps, traffic), "taken once"
    log.add("shard", "reduce_scatter", 7, 0.0, 0.0)
    timer.lap("forward")
    step.put_measurements_back(program)
    log.add("shard", "all_gather", 50, 0.0, 0.0)
    timer.lap("optimizer")
    laps, traffic = step.take_measurements(program)
    assert sums(traffic) == {"reduce_scatter": (1, 100), "all_gather": (1, 50)}
    assert [phase for phase, _ in laps.marks] == ["backward", "other", "optimizer"], "of the other its time alone"
    assert sums(log.take()) == {}
