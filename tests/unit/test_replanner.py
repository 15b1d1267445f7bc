"""Changing a layout at measured speeds: the decision against what a start costs, and what is refused."""

from __future__ import annotations

import contextlib
import time

import pytest

from meshwright.errors import ConfigError, PlanError
from meshwright.resilience.planning import Replan
from meshwright.resilience.replanner import MARGIN, Replanner, read_answer
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import RecoveryConfig, TrainConfig
from meshwright.train.run_config import RunConfig
from meshwright.train.stage_times import PublishedTimes, RankTime, check_replan, may_change_degrees

MOVED = "pp=2,microbatches=4,split=8-4"


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
        self.clock, self.told, self.start_s = Clock(), [], start_s
        self.replanner = Replanner(
            lambda request: Replan(plan=plan(MOVED), step_ratio=ratio, speeds=(1.0, 0.5), priced_s=(1.0, ratio)),
            lambda kind, **data: self.told.append((kind, data)), steps, self.clock,
        )  # fmt: skip

    def begin(self, layout: str) -> None:
        self.replanner.begin_generation(plan(layout))
        self.clock.now += self.start_s
        self.replanner.poll([1, 1], None)

    def window(self, step: int, step_s: float = 1.0) -> bool:
        times = [RankTime(step, step_s / 2, step_s)] * 2
        end = time.monotonic() + 30.0
        while not self.replanner.poll([step, step], times) and self.replanner._helper is not None:
            assert time.monotonic() < end
            time.sleep(0.005)
        return self.replanner.poll([step, step], times)

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
        assert run.window(10) is moves
        assert run.kinds() == (["replanned"] if moves else [])
        if moves:
            fields = run.told[0][1]
            assert fields["gain_s"] == pytest.approx(0.3 * 90) and fields["cost_s"] == pytest.approx(start_s)
            assert fields["gain_s"] > MARGIN * fields["cost_s"]
    finally:
        run.close()


def test_a_move_that_disappoints_makes_the_next_one_dearer() -> None:
    run = Run(0.7, 100, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.window(10) and run.replanner.take() is not None
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
        assert run.window(10) and run.replanner.take() is not None
        run.begin(MOVED)
        # A step was a second, 0.7 s were promised, and 1.5 s came.
        assert run.window(20, step_s=1.5)
        back = run.replanner.take()
        assert back is not None and str(back.plan.layout) == "replicate=2" and back.step_ratio == pytest.approx(1 / 1.5)
        assert run.kinds() == ["replanned", "replan_measured", "replanned"] and "priced_s" not in run.told[-1][1]
        # The layout that disappointed is known to the planner from now on.
        run.begin("replicate=2")
        assert run.replanner._disappointing == {MOVED}
    finally:
        run.close()


def test_a_failure_after_the_request_forgets_it() -> None:
    run = Run(0.7, 100, 5.0)
    try:
        run.begin("pp=2,microbatches=4")
        assert run.window(10)
        # A rank was lost meanwhile: its successors run as the controller says, and nothing is promised.
        run.begin("pp=2,microbatches=4")
        assert run.replanner.take() is None and run.kinds() == ["replanned"]
    finally:
        run.close()


def test_times_are_read_once_all_ranks_have_published() -> None:
    times = PublishedTimes(2)
    assert times.read_new() is None
    times.publish(0, RankTime(5, 1.0, 2.0))
    assert times.read_new() is None
    times.publish(1, RankTime(5, 1.5, 2.0))
    assert times.read_new() == (RankTime(5, 1.0, 2.0), RankTime(5, 1.5, 2.0))
    assert times.read_new() is None  # each window counts once
    times.publish(0, RankTime(10, 1.0, 2.0))
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
    with pytest.raises(ConfigError, match=r"train\.replan"):
        TrainConfig(replan=-1).check()
