"""What follows from the end of a generation, case by case, without processes; and orders that contradict themselves."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    MeshwrightError,
    PlanError,
    RankError,
)
from meshwright.launch.signals import InterruptCounter
from meshwright.records import RecordError
from meshwright.resilience import device_backoff as backoff_module
from meshwright.resilience.controller import Controller
from meshwright.resilience.departure import Departure
from meshwright.resilience.generation import (
    Ending,
    FailureDecision,
    NodeSnapshot,
    RestartBudget,
    decide_after_failure,
    find_root_failure,
    judge_generation,
    retain_snapshots,
)
from meshwright.resilience.membership import Membership
from meshwright.resilience.messages import (
    Address,
    CopyPlan,
    GenerationEnd,
    NodeFailure,
    NodeReport,
    Order,
    Ports,
    Ready,
    RewindState,
    SnapshotRecord,
    Start,
    StateLocation,
    decode,
    encode,
)
from meshwright.resilience.orders import assign_ranks
from meshwright.resilience.planning import Planning, Replan
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.damage import Damage, Element
from meshwright.train.memory import RESTORING
from meshwright.train.outcome import TrainOutcome
from meshwright.train.run_config import RunConfig
from meshwright.train.stage_times import RankTime

GENERATION = 3
ADDRESS = Address("h", 1)
STATE = StateLocation(step=8, generation=2, holders={0: 0, 1: 0}, tier="memory")
DAMAGE = Damage(
    kind="copies", step=9, keep=8, why="copies differ", ranks=(1,), base=8, rows=((1, 2), (1, 3)),
    element=Element((0, 1), 4, 5, ("1.0", "inf")),
)  # fmt: skip


def plan_of(ranks: int) -> Plan:
    return Plan(layout=Layout.parse(f"replicate={ranks}"), prediction=Prediction(memory={}), ranks=ranks, reason="")


def report(node: int, end: GenerationEnd | None = None, slots: int = 1, session: str = "a") -> NodeReport:
    return NodeReport(
        node=node, session=session, slots=tuple(range(slots)), host="h", snapshots=(), peak_flops=1e12,
        ports=Ports(store=1, snapshots=2, courier=3, disk=4), available_bytes=10**9, link_bytes_s=None,
        end=end or GenerationEnd(),
    )  # fmt: skip


def order_of(slots: Mapping[int, int], state: StateLocation | None = STATE, **fields: Any) -> Order:
    devices = [(node, slot) for node, count in sorted(slots.items()) for slot in range(count)]
    reports = {node: report(node, slots=count) for node, count in slots.items()}
    order = Order(
        generation=GENERATION, plan=plan_of(len(devices)), shares=assign_ranks(reports, devices),
        members=tuple(sorted(slots)), store=ADDRESS, snapshot_servers={0: ADDRESS}, state=state, peak_flops=None,
        lost_for_s=1.5, copies=CopyPlan(every=4, disk=True, peers=len(slots) - 1),
    )  # fmt: skip
    return dataclasses.replace(order, **fields)


def failure(node: int = 0, rank: int = 1, **fields: Any) -> NodeFailure:
    known = {
        "node": node, "rank": rank, "error": "LaunchError", "text": "killed\nmore", "coordinates": "replicate 1",
        "is_echo": False, "is_hang": False, "raised": False, "is_shortage": False, "phase": "forward", "step": 9,
        "time": 100.0,
    }  # fmt: skip
    return NodeFailure(**known | fields)  # type: ignore[arg-type]


def end(*, failed: NodeFailure | None = None, outcome: TrainOutcome | None = None, furthest: int = 9) -> GenerationEnd:
    return GenerationEnd(generation=GENERATION, failure=failed, outcome=outcome, furthest_step=furthest)


CONTINUES = TrainOutcome(step=9, continues=True)
OVER = TrainOutcome(step=24, finished=True)
ECHO = failure(1, 2, is_echo=True, time=50.0)
HANG = failure(1, 2, is_hang=True, time=50.0)


@pytest.mark.parametrize(
    ("ends", "lost", "ending", "root"),
    [
        pytest.param({0: end(outcome=OVER)}, (), Ending.COMPLETE, None, id="last step"),
        pytest.param({0: end(outcome=TrainOutcome(step=7))}, (), Ending.COMPLETE, None, id="interrupted"),
        pytest.param({0: end(outcome=CONTINUES)}, (), Ending.RECONFIGURED, None, id="growth"),
        pytest.param(
            {0: end(outcome=dataclasses.replace(CONTINUES, anomalous_step=9))}, (), Ending.ANOMALOUS, None, id="anomaly"
        ),
        pytest.param(
            {0: end(outcome=dataclasses.replace(CONTINUES, damage=DAMAGE))}, (), Ending.DAMAGED, None, id="damage"
        ),
        pytest.param({0: end(failed=failure())}, (), Ending.FAILED, failure(), id="lost rank"),
        pytest.param({0: end(), 1: end()}, (2,), Ending.FAILED, None, id="lost node"),
        pytest.param({0: end(outcome=OVER), 1: end()}, (2,), Ending.COMPLETE, None, id="node lost after the last step"),
        pytest.param({0: end(outcome=CONTINUES), 1: end()}, (2,), Ending.FAILED, None, id="node lost while growing"),
        pytest.param(
            {0: end(outcome=CONTINUES), 1: end(failed=failure(1, 2))}, (), Ending.FAILED, failure(1, 2),
            id="rank lost while growing",
        ),
        pytest.param({0: end(failed=failure()), 1: end(failed=ECHO)}, (), Ending.FAILED, failure(), id="echo"),
        pytest.param({0: end(failed=failure()), 1: end(failed=HANG)}, (), Ending.FAILED, failure(), id="others hang"),
        pytest.param({0: end(), 1: end(failed=ECHO)}, (2,), Ending.FAILED, None, id="echo of a lost node"),
        pytest.param({0: end(), 1: end(failed=HANG)}, (2,), Ending.FAILED, None, id="hang for a lost node"),
        pytest.param({0: end(), 1: end(failed=ECHO)}, (), Ending.FAILED, ECHO, id="echo alone"),
        pytest.param(
            {0: end(), 1: GenerationEnd(generation=2, failure=failure(1, 2))}, (2,), Ending.FAILED, None, id="old"
        ),
    ],
)  # fmt: skip
def test_an_end_is_judged(
    ends: dict[int, GenerationEnd], lost: tuple[int, ...], ending: Ending, root: NodeFailure | None
) -> None:
    order = order_of(dict.fromkeys((0, 1, 2), 2), None)
    verdict = judge_generation(order, {node: report(node, found) for node, found in ends.items()}, lost)
    assert (verdict.ending, verdict.failure) == (ending, root)
    assert (verdict.outcome is None) == (ending is Ending.FAILED)
    assert ending is not Ending.FAILED or verdict.furthest_step == 9


def test_the_earliest_of_equal_failures_is_the_root() -> None:
    later, first = failure(0, 1, time=20.0), failure(1, 2, time=10.0)
    assert find_root_failure([later, first], False) == first and find_root_failure([], True) is None


DAMAGED = f"{RESTORING}: 'w' in rank 1's snapshot of step 8 is damaged"
MISSING = f"{RESTORING}: lost contact with another rank's memory at h:1"


@pytest.mark.parametrize(
    ("failed", "slots", "interrupted", "expected"),
    [
        pytest.param(failure(), {0: 2}, False, {"blamed": (0, 1)}, id="lost rank"),
        pytest.param(failure(1, 3), {0: 2, 1: 2}, False, {"blamed": (1, 1)}, id="lost rank of another node"),
        pytest.param(failure(rank=-1), {0: 2}, False, {}, id="nobody stands out"),
        pytest.param(failure(rank=7), {0: 2}, False, {}, id="a rank that isn't there"),
        pytest.param(failure(is_echo=True), {0: 2}, False, {}, id="an echo blames nobody"),
        pytest.param(failure(), {0: 2}, True, {"blamed": (0, 1), "ends_run": True}, id="interrupted"),
        pytest.param(None, {0: 2}, False, {}, id="lost node"),
        pytest.param(None, {0: 2}, True, {"ends_run": True}, id="lost node, interrupted"),
        pytest.param(
            failure(error="CheckpointError", text=DAMAGED), {0: 2}, True,
            {"blamed": (0, 1), "refused_state": (8, 2)}, id="damaged snapshot, interrupted: an older state is tried",
        ),
        pytest.param(
            failure(error="CheckpointError", text=DAMAGED), {0: 1, 1: 1}, False,
            {"blamed": None, "refused_state": (8, 2)}, id="damaged snapshot on several nodes",
        ),
        pytest.param(
            failure(error="CheckpointError", text=MISSING), {0: 1, 1: 1}, False, {}, id="a holder out of reach"
        ),
        pytest.param(
            failure(error="CheckpointError", text=f"{RESTORING}: no w"), {0: 2}, False,
            {"blamed": (0, 1), "refused_state": (8, 2)}, id="whatever one node can't restore",
        ),
        pytest.param(
            failure(error="RankError", text="out of memory"), {0: 2}, False, {"blamed": (0, 1), "ends_run": True},
            id="a rank's own error",
        ),
    ],
)  # fmt: skip
def test_what_follows_from_a_failure(
    failed: NodeFailure | None, slots: dict[int, int], interrupted: bool, expected: dict[str, Any]
) -> None:
    order, lost = order_of(slots), {} if failed else {1: "it was silent"}
    ends = {failed.node: end(failed=failed)} if failed else {0: end()}
    verdict = judge_generation(order, {node: report(node, found) for node, found in ends.items()}, lost)
    decision = decide_after_failure(verdict, order, lost, RestartBudget(3), interrupted)
    defaults: dict[str, Any] = {"error": decision.error, "ends_run": False, "refused_state": None, "blamed": None}
    assert decision == FailureDecision(**defaults | expected)
    assert str(decision.error) == (failed.text if failed else "node 1: it was silent")
    assert type(decision.error).__name__ == (failed.error if failed else "LaunchError")


def test_without_a_state_in_memory_none_is_refused() -> None:
    order = order_of({0: 2}, None)
    verdict = judge_generation(order, {0: report(0, end(failed=failure(text=DAMAGED)))}, ())
    assert decide_after_failure(verdict, order, {}, RestartBudget(3), False).refused_state is None


GONE = LaunchError("gone")
REFUSED = CheckpointError(DAMAGED)


@pytest.mark.parametrize(
    ("attempts", "failures", "ends"),
    [
        pytest.param(2, [(GONE, 5, None)] * 3, [False, False, True], id="three times the same step"),
        pytest.param(2, [(GONE, 5, None), (GONE, 5, None), (GONE, 6, None)], [False] * 3, id="a new step is progress"),
        pytest.param(3, [(CheckpointError("disk full"), 5, 5)], [True], id="no failure of a rank"),
        pytest.param(3, [(GONE, 5, 5), (GONE, 7, 6)], [False, False], id="another step than before"),
        pytest.param(3, [(GONE, 7, 6), (GONE, 8, 6)], [False, True], id="the same, however far others had come"),
        pytest.param(3, [(GONE, 1, 1)], [True], id="an exception in the first step"),
        pytest.param(1, [(REFUSED, 8, 8), (REFUSED, 8, 8)], [False, True], id="older states are tried a while"),
    ],
)
def test_patience(attempts: int, failures: list[tuple[MeshwrightError, int, int | None]], ends: list[bool]) -> None:
    restart_budget = RestartBudget(attempts)
    assert [restart_budget.record_failure(error, reached, raised) for error, reached, raised in failures] == ends


def test_what_fails_all_ranks_at_their_start_isnt_tried_a_third_time() -> None:
    """Settings that can't work end the run with the reason; a lost rank, or a later failure, doesn't."""

    def decide(budget: RestartBudget, furthest: int = 0, **fields: Any) -> Any:
        known = {"phase": "start", "is_echo": True, "raised": True, "step": 0}
        verdict = judge_generation(
            order_of({0: 2}), {0: report(0, end(failed=failure(**known | fields), furthest=furthest))}, ()
        )
        return decide_after_failure(verdict, order_of({0: 2}), {}, budget, False)

    timed_out = "[rank {}: replicate 0] wait timeout after {} ms on 127.0.0.1:{}\ntrace"
    budget = RestartBudget(9)
    assert not decide(budget, text=timed_out.format(0, 301, 4001)).ends_run
    last = decide(budget, rank=1, text=timed_out.format(1, 302, 5002))
    assert last.ends_run and "wait timeout" in str(last.error) and "twice" in str(last.error)
    for fields in (
        {"phase": "forward"},
        {"is_echo": False, "raised": False},  # one rank died by itself: its device may be bad
        {"is_hang": True},
    ):
        budget = RestartBudget(9)
        assert not any(decide(budget, text="the same", **fields).ends_run for _ in range(3)), fields
    # No rank at all, since none could be started; and another reason between two of the same.
    budget, texts = RestartBudget(9), ("no room", "no fork", "no room", "no room")
    ends = [decide(budget, text=text, is_echo=False, raised=False, rank=-1).ends_run for text in texts]
    assert ends == [False, False, False, True]


def test_an_exception_that_comes_again_ends_the_run_and_says_so() -> None:
    """The same step, rank and exception; whatever else happens twice in a row keeps its own text."""

    def decide(budget: RestartBudget, text: str, step: int, furthest: int, raised: bool = True) -> Any:
        failed = failure(phase="forward", is_echo=False, raised=raised, step=step, text=text)
        verdict = judge_generation(order_of({0: 2}), {0: report(0, end(failed=failed, furthest=furthest))}, ())
        return decide_after_failure(verdict, order_of({0: 2}), {}, budget, False)

    text = "[rank 1: replicate 1] ValueError: a label of 70000\ntrace"
    budget = RestartBudget(9)
    assert not decide(budget, text, 6, 6).ends_run
    last = decide(budget, text, 6, 7)
    assert last.ends_run and str(last.error).startswith(text) and "twice in this way in step 6" in str(last.error)
    # Progress between them, another rank, or a rank that a signal ended.
    for other in ((text, 8, 8, True), (text.replace("rank 1", "rank 0"), 6, 6, True), (text, 6, 6, False)):
        budget = RestartBudget(9)
        decide(budget, text, 6, 6)
        assert "twice" not in str(decide(budget, *other).error)


def test_fruitless_failures_are_counted_after_the_first() -> None:
    restart_budget, counts = RestartBudget(9), []
    for reached in (5, 5, 5, 6):
        restart_budget.record_failure(GONE, reached, None)
        counts.append(restart_budget.failures_without_progress)
    assert counts == [0, 1, 2, 0]


def snapshot(step: int, generation: int, rank: int) -> Any:
    return SimpleNamespace(step=step, generation=generation, rank=rank)


def both(step: int, generation: int) -> list[Any]:
    return [snapshot(step, generation, rank) for rank in (0, 1)]


HELD = [NodeSnapshot(found, True) for found in (*both(8, 2), *both(6, 2))]


@pytest.mark.parametrize(
    ("slots", "local", "damage", "kept"),
    [
        pytest.param({0: 2}, both(10, 3), None, [(10, 3)] * 2, id="newer ones of all ranks"),
        pytest.param({0: 2}, [], None, [(8, 2)] * 2 + [(6, 2)] * 2, id="nothing new: all older ones"),
        pytest.param(
            {0: 2}, [snapshot(10, 3, 0)], None, [(8, 2)] * 2 + [(6, 2)] * 2, id="of one rank alone: never complete"
        ),
        pytest.param(
            {0: 2},
            [*both(9, 3), snapshot(10, 3, 0)],
            None,
            [(9, 3)] * 2,
            id="the last step of all ranks",
        ),
        pytest.param(
            {0: 2}, both(9, 3), DAMAGE, [(8, 2)] * 2 + [(6, 2)] * 2 + [(9, 3)] * 2, id="not yet past the damage"
        ),
        pytest.param({0: 2}, both(10, 3), DAMAGE, [(10, 3)] * 2, id="past the damage"),
        pytest.param(
            {0: 1, 1: 1},
            [snapshot(10, 3, 0)],
            None,
            [(8, 2)] * 2 + [(10, 3)],
            id="and what was restored",
        ),
    ],
)
def test_snapshots_that_a_node_keeps(slots: dict[int, int], local: list, damage: Damage | None, kept: list) -> None:
    order = order_of(slots, rewind=RewindState(damage=damage))
    found = retain_snapshots(order, HELD, local, ())
    assert [(entry.snapshot.step, entry.snapshot.generation) for entry in found] == kept
    received = retain_snapshots(order, [], [], [snapshot(10, 3, 1)])
    assert [entry.is_local for entry in received] == [False]


class Script:
    """A node whose generations end as a list says; no process runs."""

    node, failed_at = 0, None
    interrupts = InterruptCounter()

    def __init__(self, run_dir: Path, ends: list[GenerationEnd], remembers: bool, **recovery: Any) -> None:
        config = RunConfig()
        config = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, **recovery))
        self.job = SimpleNamespace(plan=plan_of(3), analysis=None, config=config, run_dir=run_dir)
        self.ends, self.orders, self.end, self._remembers = ends, [], GenerationEnd(), remembers
        self.storage = SimpleNamespace(settle=self.settle, clear_disk=self.clear_disk, finish=lambda: None)
        self.departure = Departure(run_dir, self.node, self.interrupts, 60.0)

    @staticmethod
    def clear_disk(limit_s: float) -> None:
        """Nothing is being written."""

    @staticmethod
    def settle(rewinds: bool = False) -> None:
        """Has nothing under way."""

    def report(self) -> NodeReport:
        generation, ranks = self.end.generation, (0,) if self._remembers and self.end.generation >= 0 else ()
        records = tuple(SnapshotRecord(generation, 4 + generation, rank, 1, True) for rank in ranks)
        return dataclasses.replace(report(0, self.end, slots=3), ports=None, snapshots=records)

    def run(self, order: Order, *more: Any) -> None:
        self.orders.append(order)
        self.end = dataclasses.replace(self.ends.pop(0), generation=order.generation)


def controller_of(node: Script, told: list[tuple[str, dict]]) -> Controller:
    def plans(ranks: int) -> tuple[Plan, Any]:
        if ranks == 2:
            raise PlanError("no layout of 2")
        return plan_of(ranks), None

    planning = Planning(plan_for_ranks=plans, make_job=lambda plan, analysis: node.job, announce_plan=lambda plan: None)  # type: ignore
    return Controller(Membership(node), planning, lambda kind, **data: told.append((kind, data)))  # type: ignore


def led(
    path: Path, ends: list[GenerationEnd], remembers: bool = True, **recovery: Any
) -> tuple[Script, list[tuple[str, dict]], TrainOutcome]:
    told: list[tuple[str, dict]] = []
    node = Script(path, ends, remembers, **recovery)
    return node, told, controller_of(node, told).run({0}, 0.0)


def test_a_run_of_one_node_is_led_through_losses_to_its_end(tmp_path: Path) -> None:
    """A device is left out, two ranks have no layout, it comes back: the state of each order is the newest there is."""
    grown = TrainOutcome(step=7, continues=True)
    ends = [end(failed=failure()), end(outcome=grown), end(outcome=OVER)]
    node, told, outcome = led(tmp_path, ends, on_death="shrink", back_s=1e-9)
    assert outcome == OVER
    assert [kind for kind, _ in told] == ["rank_lost", "fenced", "left_out", "planned", "growing", "planned"]
    assert told[2][1]["device"] == 1 and told[3][1]["ranks"] == 1 and told[4][1]["devices"] == [1]
    assert [order.world for order in node.orders] == [3, 1, 3]
    assert [order.generation for order in node.orders] == [0, 1, 2]
    assert [order.state and order.state.step for order in node.orders] == [None, 4, 5]
    assert node.orders[1].lost_for_s is not None and node.orders[0].lost_for_s is None


def test_a_snapshot_that_is_refused_is_not_chosen_again(tmp_path: Path) -> None:
    refused = failure(error="CheckpointError", text=DAMAGED, rank=-1)
    node, told, _ = led(tmp_path, [end(failed=failure(rank=-1)), end(failed=refused), end(outcome=OVER)])
    assert [kind for kind, _ in told if kind == "snapshot_refused"] == ["snapshot_refused"]
    assert node.orders[1].state is not None and node.orders[2].state != node.orders[1].state


def test_a_layout_chosen_on_the_way_that_fails_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run nor its newest state pays for a change that nobody had to make."""
    chosen = dataclasses.replace(plan_of(3), layout=Layout.parse("shard=3,zero=1"))
    refused = failure(error="CheckpointError", text=DAMAGED, rank=-1)
    whole = Script.run
    for failed in (failure(error="PlanError", text="the model has no such stage", rank=-1), refused):
        told: list[tuple[str, dict]] = []
        changed = end(outcome=TrainOutcome(step=5, continues=True))
        node = Script(tmp_path, [changed, end(failed=failed), end(outcome=OVER)], True)
        controller = controller_of(node, told)

        def run(
            self: Script, order: Order, *more: Any, controller: Controller = controller, whole: Any = whole
        ) -> None:
            if not self.orders:
                controller._replanner._times = [RankTime(5, 0.5, 1.0, 100)] * 3
                controller._replanner._accepted = Replan(plan=chosen, step_ratio=0.5)
            whole(self, order)

        with monkeypatch.context() as patched:
            patched.setattr(Script, "run", run)
            assert controller.run({0}, 0.0) == OVER
        assert [str(order.plan.layout) for order in node.orders] == ["replicate=3", str(chosen.layout), "replicate=3"]
        assert [kind for kind, _ in told if kind in ("replan_withdrawn", "snapshot_refused")] == ["replan_withdrawn"]
        assert node.orders[2].state == node.orders[1].state or node.orders[2].state.generation == 1


def test_an_anomalous_step_goes_back_behind_all_states_in_memory(tmp_path: Path) -> None:
    anomalous = TrainOutcome(step=8, continues=True, anomalous_step=8)
    node, told, _ = led(tmp_path, [end(outcome=anomalous), end(outcome=OVER)])
    assert told[0] == ("rewinding", {"sick": 8, "step": 0})
    assert node.orders[1].rewind == RewindState(anomalous_step=8, floor=0) and node.orders[1].state is None


def test_a_rank_found_wrong_twice_is_left_out(tmp_path: Path) -> None:
    damages = [dataclasses.replace(DAMAGE, step=step, keep=step) for step in (9, 10)]
    wrong = [end(outcome=TrainOutcome(step=9, continues=True, damage=damage)) for damage in damages]
    node, told, _ = led(tmp_path, [*wrong, end(outcome=OVER)])
    assert [kind for kind, _ in told] == ["damaged", "planned", "damaged", "left_out", "planned"]
    assert node.orders[1].rewind.damage is not None and node.orders[1].state is not None


def test_a_minimum_is_waited_for_and_one_beyond_all_devices_is_not(tmp_path: Path) -> None:
    lost, over = end(failed=failure()), end(outcome=OVER)
    node, told, _ = led(tmp_path, [lost, over], on_death="shrink", back_s=0.05, minimum=3)
    assert [kind for kind, _ in told] == ["rank_lost", "fenced", "left_out", "waiting", "planned"]
    assert told[3][1]["present"] == 2 and told[3][1]["seconds"] > 0 and node.orders[1].world == 3
    with pytest.raises(LaunchError, match="no layout for the 2 ranks that are left"):
        led(tmp_path, [lost, over], False, on_death="shrink", minimum=2, back_s=60.0)
    _, told, _ = led(tmp_path, [lost, over], on_death="shrink", back_s=0.05, minimum=9)
    assert told[3][0] == "waiting" and told[3][1]["minimum"] == 3, "what is waited for, not what is configured"


def test_sigterm_of_one_node_ends_a_run_that_waits_for_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked the node alone to leave, but nobody trains that could go on."""
    interrupts = InterruptCounter()
    interrupts.leaves_at_sigterm = True
    interrupts.record(signal.SIGTERM)
    monkeypatch.setattr(Script, "interrupts", interrupts)
    with pytest.raises(LaunchError, match="ended while waiting for"):
        led(tmp_path, [end(failed=failure())], False, on_death="shrink", back_s=60.0, minimum=3)
    assert interrupts.leaving_since is None


def test_failures_without_progress_end_the_run_with_the_last_one(tmp_path: Path) -> None:
    lost = end(failed=failure(rank=-1, text="gone"))
    with pytest.raises(LaunchError, match="gone"):
        led(tmp_path, [lost] * 5, False, attempts=2)


def test_each_device_that_is_left_out_has_seconds_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(backoff_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    whole = Script.run

    def run(self: Script, order: Order, *more: Any) -> None:
        clock.now += 40.0
        whole(self, order)

    monkeypatch.setattr(Script, "run", run)
    ends = [end(failed=failure(rank=1)), end(failed=failure(rank=0)), end(outcome=OVER)]
    _, told, _ = led(tmp_path, ends, on_death="shrink", back_s=60.0)
    left_out = [fields for kind, fields in told if kind == "left_out"]
    assert [(fields["device"], fields["seconds"]) for fields in left_out] == [(1, 60.0), (0, 60.0)]


def test_a_device_of_a_node_that_is_gone_ends_no_generation(tmp_path: Path) -> None:
    """Its time out may be over, but nothing would grow."""
    node = Script(tmp_path, [], True, on_death="shrink", back_s=1e-9)
    node.poll = lambda ranks: []  # type: ignore[attr-defined]
    told: list[tuple[str, dict]] = []
    controller = controller_of(node, told)
    controller._members.report_local()
    controller.order, asked = order_of({0: 3}), []
    requests = SimpleNamespace(reconfiguration_requested=False, request_reconfiguration=lambda: asked.append(1))
    controller._record_device_failure((7, 0))
    controller._watch_generation(SimpleNamespace(control=requests, times=None))  # type: ignore[arg-type]
    assert not asked
    controller._record_device_failure((0, 0))
    controller._watch_generation(SimpleNamespace(control=requests, times=None))  # type: ignore[arg-type]
    assert asked == [1]


def test_a_checkpoint_that_hangs_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clear_disk(limit_s: float) -> None:
        raise CheckpointError("not written within checkpoint.wait_s")

    monkeypatch.setattr(Script, "clear_disk", staticmethod(clear_disk))
    told: list[tuple[str, dict]] = []
    lost = end(failed=failure(rank=-1, text="gone"))
    controller = controller_of(Script(tmp_path, [lost] * 5, True, attempts=2), told)
    with pytest.raises(LaunchError, match="gone"):
        controller.run({0}, 0.0)
    assert told[-1] == ("checkpoint_failed", {"step": 6, "reason": "not written within checkpoint.wait_s"})


def spoiled(values: Any, path: tuple[Any, ...], value: Any) -> bytes:
    """Returns an encoded order with one value exchanged; ``path`` counts into the fields of each record."""
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(values).encode()


def test_orders_come_back_as_they_were_and_none_that_contradicts_itself() -> None:
    order = order_of({0: 2, 2: 1}, rewind=RewindState(anomalous_step=3, damage=DAMAGE, floor=1))
    reported = Ready(
        dataclasses.replace(report(1, end(failed=failure(1))), snapshots=(SnapshotRecord(1, 2, 3, 4, True),))
    )
    assert decode(encode(Start(order))) == Start(order) and decode(encode(reported)) == reported
    names = [field.name for field in dataclasses.fields(Order)]
    fields = ("fields", 1, "fields", 0, "fields")
    for name, wrong in (
        ("generation", "3"),
        ("members", {"!": "tuple", "items": [0]}),
        ("shares", {"!": "tuple", "items": []}),
        ("snapshot_servers", {"!": "dict", "items": []}),
        ("plan", {"!": "Plan", "custom": plan_of(2).to_json()}),
        ("plan", {"!": "Plan", "custom": {"layout": {"replicate": "two"}}}),
        ("plan", {"!": "Plan", "custom": 7}),
        ("copies", {"!": "CopyPlan", "fields": [4, True, 2]}),
    ):
        with pytest.raises(RecordError):
            decode(spoiled(json.loads(encode(Start(order))), (*fields, names.index(name)), wrong))
    with pytest.raises(ValueError, match="node 1 reports a failure of node 0"):
        report(1, end(failed=failure(0)))


def test_only_known_errors_are_made_of_what_nodes_report() -> None:
    for name, kind in (("RankError", RankError), ("ConfigError", ConfigError), ("SystemExit", LaunchError)):
        verdict = judge_generation(order_of({0: 2}), {0: report(0, end(failed=failure(error=name)))}, ())
        decision = decide_after_failure(verdict, order_of({0: 2}), {}, RestartBudget(3), False)
        assert type(decision.error) is kind
