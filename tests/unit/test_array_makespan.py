"""A schedule as arrays takes what its actions take one by one; sends queue, gathers and sums are where they belong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.errors import PlanError
from meshwright.schedules.action import Schedule, backward, forward
from meshwright.schedules.array_makespan import ArraySchedule, StageSeconds
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import known_schedules

SIZES = ((2, 1, 3), (4, 1, 8), (4, 2, 8), (3, 2, 6), (4, 3, 8), (8, 2, 16), (4, 2, 2))
LAYOUTS = 3


def drawn(ranks: int, stages: int, seed: int) -> StageSeconds:
    """Stages that all differ, in three layouts; nothing is sent, gathered or summed."""
    draw = np.random.default_rng(seed)
    backward_s = draw.uniform(2.0, 3.0, (stages, LAYOUTS))
    nothing = np.zeros((stages, LAYOUTS))
    return StageSeconds(
        forward=draw.uniform(1.0, 2.0, (stages, LAYOUTS)),
        backward=backward_s,
        weight=backward_s * draw.uniform(0.2, 0.5, (stages, LAYOUTS)),
        split_action=draw.uniform(0.0, 0.1, LAYOUTS),
        send_forward=nothing,
        send_backward=nothing,
        gather=nothing,
        reduce=nothing,
        late_reduce=np.zeros((ranks, LAYOUTS)),
    )


def costs_of(seconds: StageSeconds, layout: int) -> ActionCosts:
    def stage_by_stage(values: np.ndarray) -> tuple[float, ...]:
        return tuple(values[:, layout].tolist())

    return ActionCosts(
        forward_s=stage_by_stage(seconds.forward),
        backward_s=stage_by_stage(seconds.backward),
        input_s=stage_by_stage(seconds.backward - seconds.weight),
        weight_s=stage_by_stage(seconds.weight + seconds.split_action),
    )


@pytest.mark.parametrize("name", known_schedules())
def test_many_layouts_take_what_the_simulator_says_of_each(name: str) -> None:
    compared = 0
    for ranks, stages_per_rank, microbatches in SIZES:
        try:
            schedule = known_schedules()[name].build(ranks, stages_per_rank, microbatches)
        except PlanError:
            continue
        seconds = drawn(ranks, schedule.stages, seed=ranks * microbatches)
        found = ArraySchedule(schedule).makespan_s(seconds)
        expected = [simulate(schedule, costs_of(seconds, layout)).makespan_s for layout in range(LAYOUTS)]
        assert found == pytest.approx(expected, rel=1e-12), (ranks, stages_per_rank, microbatches)
        compared += 1
    assert compared >= 2


def test_results_leave_a_rank_one_after_the_other() -> None:
    """Four forwards of no time, each of whose results takes a second: the fourth arrives after four."""
    rows = [[forward(0, 0), forward(0, 1), forward(0, 2), forward(0, 3)], [forward(1, number) for number in range(4)]]
    rows[1] += [backward(1, number) for number in range(4)]
    rows[0] += [backward(0, number) for number in range(4)]
    schedule = Schedule(name="mine", stages=2, microbatches=4, actions=tuple(map(tuple, rows)))
    seconds = drawn(2, 2, seed=1)
    nothing = np.zeros_like(seconds.forward)
    ones = nothing + np.array([[1.0], [0.0]])
    seconds = dataclasses.replace(seconds, forward=nothing, backward=nothing, weight=nothing, send_forward=ones)
    assert ArraySchedule(schedule).makespan_s(seconds) == pytest.approx([4.0] * LAYOUTS)
    assert ArraySchedule(schedule).makespan_s(seconds.without_sends()) == pytest.approx([0.0] * LAYOUTS)


def test_sums_of_one_rank_go_on_beside_the_work_of_others() -> None:
    """1F1B on two ranks: the last rank ends a backward before the first, so that much of its sum costs nothing."""
    schedule = known_schedules()["1f1b"].build(2, 1, 4)
    seconds = drawn(2, 2, seed=2)
    ones = np.ones_like(seconds.forward)
    seconds = dataclasses.replace(seconds, forward=ones, backward=2 * ones)
    plain_s = ArraySchedule(schedule).makespan_s(seconds)
    assert plain_s == pytest.approx([15.0] * LAYOUTS)  # (m + p - 1)(F + B)
    for rank_sums, longer_s in (((0.0, 1.5), 0.0), ((0.0, 5.0), 3.0), ((0.5, 1.5), 0.5)):
        sums = np.array(rank_sums)[:, None] * ones
        for late in (False, True):
            with_sums = dataclasses.replace(seconds, **{"late_reduce" if late else "reduce": sums})
            assert ArraySchedule(schedule).makespan_s(with_sums) - plain_s == pytest.approx([longer_s] * LAYOUTS)


def test_weights_of_a_rank_are_gathered_before_its_first_forward_alone() -> None:
    """The second rank waits a forward anyway: a gather of that length costs nothing there, and all on the first."""
    schedule = known_schedules()["1f1b"].build(2, 1, 4)
    seconds = drawn(2, 2, seed=3)
    ones = np.ones_like(seconds.forward)
    seconds = dataclasses.replace(seconds, forward=ones, backward=2 * ones)
    for gathers, longer_s in (((0.0, 1.0), 0.0), ((1.0, 1.0), 1.0), ((0.0, 1.75), 0.75)):
        gathered = dataclasses.replace(seconds, gather=np.array(gathers)[:, None] * ones)
        assert ArraySchedule(schedule).makespan_s(gathered) == pytest.approx([15.0 + longer_s] * LAYOUTS)


def test_a_schedule_that_stands_still_is_refused() -> None:
    rows = ((backward(0, 0), forward(0, 0)), (forward(1, 0), backward(1, 0)))
    with pytest.raises(PlanError, match="deadlocks"):
        ArraySchedule(Schedule(name="stuck", stages=2, microbatches=1, actions=rows))
