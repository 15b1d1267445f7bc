"""Changing a layout at measured speeds: the decision against what a start costs, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import pytest

from meshwright.errors import ConfigError, PlanError
from meshwright.events import StepRecord
from meshwright.parallel.axis_group import TrafficLog
from meshwright.resilience.planning import Replan
from meshwright.resilience.replanner import MARGIN, Replanner, read_answer
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import RecoveryConfig, TrainConfig
from meshwright.train.hooks import StepInfo
from meshwright.train.run_config import RunConfig
from meshwright.train.share_balance import WARM_UP_STEPS
from meshwright.train.stage_times import (
    PublishedTimes,
    RankTime,
    TimePublisher,
    check_replan,
    may_change_degrees,
    names_choice,
)

MOVED = "pp=2,microbatches=4,split=8-4"
DEVICES = [(0, 0), (1, 0)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(layout: str) -> Plan:
    prediction = Prediction(memory={}, formula={})
    return Plan(layout=Layout.parse(layout), prediction=prediction, ranks=2, reason="")


class Run:
    """A replanner on a simulated clock: a step takes a second, a start as long as given."""

    def __init__(self, ratio: float, steps: int, start_s: float) -> None:
        self.clock, self.told, self.start_s, self.last_step = Clock(), [], start_s, steps
        self.answer = Replan(plan=plan(MOVED), step_ratio=ratio, speeds=(1.0, 0.5), priced_s=(1.0, ratio))
        self.replanner = Replanner(
            lambda request: self.answer,
            lambda kind, **data: self.told.append((kind, data)), self.clock,
        )  # fmt: skip

    def begin(self, layout: str) -> None:
        """Starts ranks: under the chosen layout where it is this one, as the controller does."""
        chosen = self.replanner.choice_for(DEVICES)
        is_chosen = chosen is not None and str(chosen[0].layout) == layout
        self.replanner.begin_generation(chosen[0] if chosen is not None and is_chosen else plan(layout))
        self.clock.now += self.start_s
        self.replanner.poll([1, 1], None)

    def window(self, step: int, step_s: float = 1.0) -> bool:
        times = [RankTime(step, step_s / 2, step_s, self.last_step)] * 2
        end = time.monotonic() + 30.0
        while not self.replanner.poll([step, step], times) and self.replanner._helper is not None:
            assert time.monotonic() < end
            time.sleep(0.005)
        return self.replanner.poll([step, step], times)

    def windows(self, *steps: int) -> bool:
        return [self.window(step) for step in steps][-1]

    def close(self) -> None:
        self.replanner.close()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.mark.parametrize(
    ("ratio", "steps", "start_s", "moves"),
    [
        (0.7, 100, 5.0, True),
        # 0.3 s of 30 steps are 9 s: less than twice five; and a tenth less is no difference that is known.
        (0.7, 40, 5.0, False),
        (0.95, 10_000, 5.0, False),
        (0.7, 100, 20.0, False),
    ],
)
def test_layers_move_where_it_pays(ratio: float, steps: int, start_s: float, moves: bool) -> None:
    run = Run(ratio, steps, start_s)
    try:
        run.begin("pp=2,microbatches=4")
        assert not run.window(5) and run.window(10) is moves
        assert run.kinds() == (["replanned"] if moves else [])
        if moves:
            fields = run.told[0][1]
            assert fields["gain_s"] == pytest.approx(0.3 * 90) and fields["cost_s"] == pytest.approx(start_s)
            assert fields["gain_s"] > MARGIN * fields["cost_s"]
    finally:
        run.close()


def test_a_run_that_will_end_earlier_has_fewer_steps_in_which_a_change_pays() -> None:
    """Steps that count by their gain: the ranks say with their times where the run ends."""
    run = Run(0.7, 100, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert not run.window(5)
        run.last_step = 40
        assert not run.window(10) and not run.kinds()
    finally:
        run.close()


def test_ranks_publish_where_the_run_ends() -> None:
    times = PublishedTimes(1)
    publish = TimePublisher(times, 0, 2, TrafficLog())
    for step in range(1, WARM_UP_STEPS + 3):
        record = StepRecord(
            step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, tokens_total=1, tokens_per_s=1.0, step_s=2.0,
            parts={}, memory={}, layout="replicate=2",
        )  # fmt: skip
        publish(StepInfo(step=step, steps=100 - step, record=record, validation_loss=None, scalars={}))
    assert [(time.step, time.last_step) for time in times.read_new()] == [(step, 100 - step)]
    times.close()


def test_a_move_that_disappoints_makes_the_next_one_dearer() -> None:
    run = Run(0.7, 100, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.windows(5, 10) and run.replanner.take(DEVICES)
        run.clock.now += 2.0
        run.begin(MOVED)
        # No faster than before: 0.3 s of 80 steps are 24 s, under four times the 7 s from the request to the step.
        assert not run.window(20, step_s=1.0)
        kind, fields = run.told[-1]
        assert kind == "replan_measured" and fields["measured_s"] == 1.0 and fields["cost_s"] == pytest.approx(7.0)
        assert fields["expected_s"] == pytest.approx(0.7)
    finally:
        run.close()


def test_a_change_that_made_steps_slower_is_taken_back() -> None:
    run = Run(0.7, 1000, 5.0)
    try:
        run.begin("replicate=2")
        assert run.windows(5, 10) and run.replanner.take(DEVICES)
        run.begin(MOVED)
        # A step was a second, 0.7 s were promised, and 1.5 s came.
        assert run.window(20, step_s=1.5)
        assert run.replanner.take(DEVICES)
        back = run.replanner.choice_for(DEVICES)
        assert back is not None and str(back[0].layout) == "replicate=2"
        assert run.kinds() == ["replanned", "replan_measured", "replanned"] and "priced_s" not in run.told[-1][1]
        assert run.told[-1][1]["expected_s"] == pytest.approx(1.0)
        # The layout that disappointed is known to the planner from now on.
        run.begin("replicate=2")
        assert run.replanner._disappointing == {MOVED}
    finally:
        run.close()


def test_a_failure_after_the_request_forgets_it() -> None:
    run = Run(0.7, 100, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.windows(5, 10)
        # A rank was lost meanwhile: its successors run as the controller says, and nothing is promised.
        assert not run.replanner.withdraw()
        run.begin("pp=2,microbatches=4")
        assert not run.replanner.take(DEVICES) and run.kinds() == ["replanned"]
        assert run.replanner.choice_for(DEVICES) is None
    finally:
        run.close()


def test_a_layout_whose_ranks_fail_before_they_were_measured_is_withdrawn() -> None:
    run = Run(0.7, 1000, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.windows(5, 10) and run.replanner.take(DEVICES)
        assert run.replanner.choice_for(DEVICES) is not None
        run.begin(MOVED)
        assert run.replanner.withdraw() and not run.replanner.withdraw()
        assert run.replanner.choice_for(DEVICES) is None and run.kinds() == ["replanned", "replan_withdrawn"]
        assert run.replanner._disappointing == {MOVED}
        # A layout that was measured is kept through failures, by the same devices in the same order alone.
        run.begin("pp=2,microbatches=4")
        assert run.windows(600, 610) and run.replanner.take(DEVICES)
        run.begin(MOVED)
        assert not run.window(620, step_s=0.7)
        assert not run.replanner.withdraw() and run.replanner.choice_for(DEVICES) is not None
        assert run.replanner.choice_for(DEVICES[::-1]) is None and run.replanner.choice_for([*DEVICES, (1, 1)]) is None
    finally:
        run.close()


def test_a_passing_load_changes_nothing() -> None:
    run = Run(0.7, 1000, 5.0)
    nothing = Replan(plan=plan(MOVED), step_ratio=1.0)
    try:
        run.begin("pp=2,microbatches=4")
        first, second = run.answer, dataclasses.replace(run.answer, speeds=(0.5, 1.0))
        for step, answer in enumerate((first, nothing, first, second, first, nothing), start=1):
            run.answer = answer
            # At other times each, or the planner wouldn't be asked again.
            assert not run.window(step, step_s=1.0 + step / 10)
        assert not run.kinds()
        run.answer = first
        assert not run.window(7, step_s=1.65)  # near those of an answer without a change
        assert not run.window(8) and run.window(9)
    finally:
        run.close()


def test_a_second_change_waits_until_speeds_have_lasted() -> None:
    run = Run(0.7, 100_000, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.windows(5, 10) and run.replanner.take(DEVICES)
        run.begin(MOVED)
        run.answer = dataclasses.replace(run.answer, plan=plan("pp=2,microbatches=4,split=6-6"))
        assert not run.window(20, step_s=0.7)
        # 0.3 s of each step since the first change are twice the 5 s of a start after 34 steps, whatever is left.
        assert not run.windows(30, 40, 43) and run.window(45)
    finally:
        run.close()


def test_times_are_read_once_all_ranks_have_published() -> None:
    times = PublishedTimes(2)
    assert times.read_new() is None
    times.publish(0, RankTime(5, 1.0, 2.0, 40))
    assert times.read_new() is None
    times.publish(1, RankTime(5, 1.5, 2.0, 40))
    assert times.read_new() == (RankTime(5, 1.0, 2.0, 40), RankTime(5, 1.5, 2.0, 40))
    assert times.read_new() is None  # each window counts once
    times.publish(0, RankTime(10, 1.0, 2.0, 30))
    assert times.read_new() is None
    times.close()
    assert read_answer(b"") is None and read_answer(b"torn") is None


@pytest.mark.parametrize(
    ("named", "layout", "watched", "kind", "more", "why"),
    [
        ("auto", "replicate=2", False, "cpu", {}, "nobody starts"),
        ("auto", "islands=2", True, "cpu", {}, "islands"),
        ("auto", "pp=2,replicate=2", True, "cpu", {"rebalance": 5}, "use one of them"),
        ("auto", "replicate=1", True, "cpu", {}, "there is one"),
        ("auto", "pp=2", True, "cuda", {}, "measured on cuda"),
        ("auto", "tp=2,replicate=2,compress=int8", True, "cpu", {}, ""),
        ("auto", "shard=2,zero=1,tp=2", True, "cuda", {}, ""),
        ("auto", "pp=2,schedule=interleaved,stages=2,microbatches=2", True, "cpu", {}, ""),
        ("tp=2", "tp=2", True, "cpu", {}, "neither stages nor readers"),
        ("pp=2,split=4-2", "pp=2,split=4-2", True, "cpu", {}, "leave split out"),
        ("replicate=2,rows=2-1", "replicate=2,rows=2-1", True, "cpu", {}, "leave rows out"),
        ("replicate=2", "replicate=2", True, "cpu", {}, ""),
        ("pp=2", "pp=2,split=4-2", True, "cpu", {}, ""),
    ],
)
def test_what_cannot_change_is_refused(
    named: str, layout: str, watched: bool, kind: str, more: dict[str, int], why: str
) -> None:
    config = RunConfig(layout=named, train=TrainConfig(replan=5, **more), recovery=RecoveryConfig())
    with pytest.raises(PlanError, match=why) if why else contextlib.nullcontext():
        check_replan(config, Layout.parse(layout), watched, kind)
    # Who doesn't ask for it is refused nothing.
    check_replan(RunConfig(layout=named), Layout.parse(layout), watched, kind)


def test_a_layout_changes_as_a_whole_only_where_the_planner_chose_it() -> None:
    auto, named = RunConfig(), RunConfig(layout="pp=2,microbatches=4")
    assert may_change_degrees(auto, Layout.parse("tp=2,replicate=2"))
    assert not may_change_degrees(auto, Layout.parse("replicate=2,compress=int8"))
    assert not may_change_degrees(named, Layout.parse("pp=2,microbatches=4"))
    # Layouts for fewer ranks that the user names stay as well, where no others do.
    fallback = dataclasses.replace(auto, recovery=RecoveryConfig(layouts="replicate=3,rows=2-1-1; pp=2"))
    assert not may_change_degrees(fallback, Layout.parse("replicate=3,rows=2-1-1"))
    assert names_choice(fallback, Layout.parse("replicate=3,rows=2-1-1"), "rows")
    assert may_change_degrees(fallback, Layout.parse("replicate=4"))
    with pytest.raises(ConfigError, match=r"train\.replan"):
        TrainConfig(replan=-1).check()
