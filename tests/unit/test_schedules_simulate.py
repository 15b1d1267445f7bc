"""The simulator against a second way to find the times, hand-made schedules, and what it refuses."""

from __future__ import annotations

import random

import pytest

from meshwright.errors import PlanError
from meshwright.schedules.action import ActionKind, Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.makespan import makespan_s
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import known_schedules

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""1F1B of two ranks and two micro-batches."""


def ends_by_relaxation(schedule: Schedule, costs: ActionCosts) -> dict[str, float]:
    """Raises every end time until nothing rises: slow, plain, and without any order of events."""
    actions = [(rank, place, action) for rank, row in enumerate(schedule.actions) for place, action in enumerate(row)]
    maker = {}
    for _, _, action in actions:
        for part in action.parts:
            if part.kind is not ActionKind.WEIGHT:
                maker[part.kind is ActionKind.FORWARD, part.stage, part.microbatch] = str(action)
    ends = {str(action): 0.0 for _, _, action in actions}
    rose = True
    while rose:
        rose = False
        for rank, place, action in actions:
            start = ends[str(schedule.actions[rank][place - 1])] if place else 0.0
            for part in action.parts:
                ahead = part.kind is ActionKind.FORWARD
                need = maker.get((ahead, part.stage + (-1 if ahead else 1), part.microbatch))
                if part.kind is not ActionKind.WEIGHT and need is not None:
                    sender = schedule.stage_rank(part.stage + (-1 if ahead else 1))
                    start = max(start, ends[need] + costs.between(sender, rank))
            if start + costs.of(action) > ends[str(action)] + 1e-12:
                ends[str(action)] = start + costs.of(action)
                rose = True
    return ends


@pytest.mark.parametrize("name", known_schedules())
def test_times_are_those_of_the_longest_path(name: str) -> None:
    draw = random.Random(name)
    spec = known_schedules()[name]
    schedule = spec.build(3, spec.least_stages, 6)
    times = [tuple(draw.uniform(0.5, 2.0) for _ in range(schedule.stages)) for _ in range(4)]
    costs = ActionCosts(
        forward_s=times[0],
        backward_s=times[1],
        input_s=times[2],
        weight_s=times[3],
        send_s=0.3,
        links_s={(0, 1): 0.9, (1, 0): 0.0},
        overlap_share=0.5,
    )
    seen = simulate(schedule, costs)
    expected = ends_by_relaxation(schedule, costs)
    assert {str(span.action): span.end_s for span in seen.timeline} == pytest.approx(expected, rel=1e-12)
    assert seen.makespan_s == pytest.approx(max(expected.values()), rel=1e-12)
    assert makespan_s(schedule, costs) == seen.makespan_s
    for rank, busy_s in enumerate(seen.busy_s):
        own = [span for span in seen.timeline if span.rank == rank]
        assert busy_s == pytest.approx(sum(span.end_s - span.start_s for span in own))


def test_a_schedule_counted_by_hand() -> None:
    seen = simulate(Schedule.from_csv(TWO), ActionCosts.uniform(2, send_s=0.5))
    # 1F0 starts at 1.5, 1B0 ends at 4.5, 0B0 runs 5 to 7; 1F1 4.5, 1B1 5.5 to 7.5, 0B1 8 to 10.
    assert seen.makespan_s == pytest.approx(10.0)
    assert seen.busy_s == (6.0, 6.0)
    assert seen.bubble == pytest.approx(0.4)
    assert seen.peak_live_rank == (2, 1)
    assert seen.peak_live_stage == (2, 1)


def test_weights_that_wait_are_still_held() -> None:
    seen = simulate(Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1"), ActionCosts.uniform(1))
    assert seen.peak_live_rank == (2,)
    seen = simulate(Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1"), ActionCosts.uniform(1))
    assert seen.peak_live_rank == (1,)


def test_a_pair_hides_a_share_of_its_shorter_part() -> None:
    schedule = known_schedules()["dualpipev"].build(4, 2, 12)
    unit = {"forward_s": (1.0,) * 8, "backward_s": (2.0,) * 8, "input_s": (1.0,) * 8, "weight_s": (1.0,) * 8}
    apart = simulate(schedule, ActionCosts(**unit))
    hidden = simulate(schedule, ActionCosts(**unit, overlap_share=1.0))
    pairs = sum(action.pair is not None for action in schedule.actions[0])
    assert apart.busy_s[0] - hidden.busy_s[0] == pytest.approx(pairs * 1.0)
    assert hidden.makespan_s < apart.makespan_s


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "1F1 where 1F0 is due"),
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1\n", "1B1 is on no rank, and 0B1 waits for it"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1\n", "1B1 waits for 1F1, which the rank doesn't run before it"),
        ("0F0,0F1,0B0\n1F0,1B0\n", "0B1 is on no rank, and the optimizer step waits"),
        ("0F0,0F0,0B0\n", "0F0: this was computed before"),
        ("0F0,0B0,0I0\n", "0I0: this was computed before"),
        ("0F0,0W0,0I0\n", "0W0 waits for 0I0"),
        ("0F0,0B0,0W0\n", "0W0 waits for 0I0"),
        ("0F0,0I0\n", "0W0 is on no rank, and the optimizer step waits"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 runs on rank 0 already"),
        ("0F0,0B0\n2F0,2B0\n", "1F0 is on no rank, and 2F0 waits for it"),
        ("1F0,1B0\n", "0F0 is on no rank, and 1F0 waits for it"),
    ],
)
def test_what_is_not_whole_is_refused(rows: str, says: str) -> None:
    schedule = Schedule.from_csv(rows)
    with pytest.raises(PlanError, match=says):
        simulate(schedule, ActionCosts.uniform(schedule.stages))


def test_a_deadlock_names_who_waits_for_what() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(PlanError) as caught:
        simulate(schedule, ActionCosts.uniform(2))
    assert "rank 0 stops at 0B0, which waits for 1B0 of rank 1" in str(caught.value)
    assert "rank 1 stops at 1F1, which waits for 0F1 of rank 0" in str(caught.value)
    with pytest.raises(PlanError, match="rank 0 stops at 0B0, which waits for 1B0"):
        makespan_s(schedule, ActionCosts.uniform(2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward_s": (1.0,)}, "forward_s has 1 stages, schedule file has 2"),
        ({"weight_s": (1.0, -1.0)}, "weight_s has the time -1.0"),
        ({"links_s": {(0, 1): -1.0}}, "negative"),
        ({"overlap_share": 1.5}, "overlap_share = 1.5"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change: dict, says: str) -> None:
    unit = dict.fromkeys(("forward_s", "backward_s", "input_s", "weight_s"), (1.0, 1.0))
    with pytest.raises(PlanError, match=says):
        simulate(Schedule.from_csv(TWO), ActionCosts(**{**unit, **change}))
