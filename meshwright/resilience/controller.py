# long: a run, generation after generation, is one noun
"""The life of a run: generation after generation of ranks, on any number of nodes; one node leads itself.

For each generation the controller plans for the devices that are usable, chooses the state to restore, starts the ranks
on all nodes, watches them, and decides what follows from their end (`generation`). It never uses a device, a thread or
a process group, so that ranks can be forked from its process. Its words are in the docstring of the package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import TERMINATED, ClusterError, LaunchError, MeshwrightError, PlanError, RankError
from meshwright.resilience.device_backoff import DeviceBackoff
from meshwright.resilience.disk import save_newest_state
from meshwright.resilience.drain_requests import DrainWatch
from meshwright.resilience.generation import (
    UNRECOVERABLE,
    Ending,
    GenerationVerdict,
    RestartBudget,
    decide_after_failure,
    has_ended,
    judge_generation,
)
from meshwright.resilience.generation_ranks import GenerationAborted, GenerationRanks, LeftRun, job_origin
from meshwright.resilience.membership import LeadershipLost, Membership
from meshwright.resilience.messages import (
    Busy,
    Device,
    NodeFailure,
    Order,
    Reconfigure,
    RewindState,
    Start,
    StateLocation,
)
from meshwright.resilience.orders import (
    StateKey,
    assign_ranks,
    choose_state,
    complete_states,
    counts_after_loss,
    describe_shortage,
    plan_copies,
    plan_local_copies,
    states_after,
)
from meshwright.resilience.peers import pump_until
from meshwright.resilience.planning import Planning, PlanPrefetcher
from meshwright.resilience.replanner import Replanner
from meshwright.resilience.rewinds import RewindPolicy
from meshwright.spec.plan import Plan
from meshwright.train.damage import Damage
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.outcome import TrainOutcome
from meshwright.train.stage_times import RankTime

_BUSY_S = 60.0
FIRST_STEPS = 10
"""Steps of a plan in which a lack of memory is the plan's: all that a step allocates, a step has allocated by then."""
_RETURN_S = 10.0
"""How long to wait for missing nodes when the nodes present hold no complete state in memory."""


class Controller:
    """Runs generations of ranks until the run ends, or until another node leads.

    Args:
        members: the nodes of the run.
        planning: gives plans for other numbers of ranks.
        event: records an event: its kind, and its fields by keyword.
        order: the last order of another leader, if any.
        lost_at: time.monotonic() at which that leader was lost.
    """

    def __init__(
        self,
        members: Membership,
        planning: Planning,
        event: Callable[..., None],
        order: Order | None = None,
        lost_at: float | None = None,
    ) -> None:
        self._members, self._local, self._event = members, members.local, event
        job = self._local.job
        self._config, self._planning = job.config.recovery, planning
        self._planner = PlanPrefetcher(planning.plan_for_ranks)
        self._planner.learn(job.plan.ranks, (job.plan, job.analysis))
        self._replanner = Replanner(planning.replan, event)
        # A minimum that not even all devices reach would be waited for in vain.
        self._minimum = min(self._config.minimum, job.plan.ranks)
        self._backoff = DeviceBackoff(self._config)
        self._drains = DrainWatch(job.run_dir, self._planner, self._minimum, event)
        self._restart_budget = RestartBudget(self._config.attempts)
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.checkpoint)
        rewind = order.rewind if order is not None else RewindState()
        self._rewinds = RewindPolicy(job.config, self._store, event, rewind)
        self._refused_states: set[StateKey] = set()
        self.order = order
        """The last order."""
        self._lost_at = lost_at
        self._first_generation = order is None

    def run(self, expected: set[int], limit_s: float) -> TrainOutcome:
        """Runs generations until the run ends, and returns its outcome.

        Args:
            expected: nodes that should be connected at the start.
            limit_s: how long to wait for them.

        Raises:
            LeadershipLost: when another node leads.
            MeshwrightError: when the run can't go on; its newest state has been written to disk then.
        """
        members = self._members
        try:
            members.report_local()
            all_present = pump_until(lambda: expected <= members.reports.keys(), limit_s, self._pump_idle)
            if not all_present and self._first_generation and members.generation == 0:
                missing = sorted(expected - members.reports.keys())
                raise LaunchError(f"nodes {missing} didn't come within launch.group_s = {limit_s:g} s; start them too")
            self._drains.accept_at_start(members.connected_devices(), self._backoff.left_out)
            while True:
                members.check_majority(self.order)
                outcome = self._run_generation(*self._next_order())
                if outcome is not None:
                    self._local.storage.finish()
                    return outcome
                members.claim_next_generation()
        finally:
            self._planner.close()
            self._replanner.close()

    def _pump_idle(self, seconds: float) -> None:
        """Processes messages while no ranks run, and stops the run when the user interrupts."""
        self._members.pump(seconds)
        if self._local.interrupts.count:
            ended = LaunchError(f"ended while waiting for {self._members.awaited}")
            if self._local.interrupts.terminated:
                ended.exit_status = TERMINATED
            raise self._save_newest_state(ended)

    def _pump_waiting(self, seconds: float) -> None:
        """As `_pump_idle`, where the run can't go on: then a SIGTERM that asks this node alone to leave ends it too."""
        self._local.departure.end_run_instead()
        self._pump_idle(seconds)

    def _usable_devices(self) -> list[Device]:
        """Returns the connected devices that are neither left out nor asked to leave, ordered by node."""
        connected = self._members.connected_devices()
        without_rank = {*self._backoff.left_out, *self._drains.drained(connected)}
        return [device for device in connected if device not in without_rank]

    def _readmissible_devices(self) -> list[Device]:
        """Returns the connected devices whose back-off time is over: those of nodes that are gone add no rank."""
        return self._backoff.expired(self._members.connected_devices())

    def _next_order(self) -> tuple[Order, ModelAnalysis | None]:
        """Plans for the devices present; returns the next generation's order, and the plan's model analysis."""
        started = time.monotonic()
        self._await_devices()
        self._await_newer_state()
        devices, reason = self._usable_devices(), ""
        for count in range(len(devices), self._minimum - 1, -1):
            try:
                chosen = self._replanner.choice_for(devices[:count])
                (plan, analysis), prefetched = (chosen, True) if chosen is not None else self._get_plan(count)
            except (PlanError, ClusterError) as error:
                reason = reason or str(error)
                continue
            # Planning took time: devices that joined or left meanwhile invalidate the plan.
            if set(devices) != set(self._usable_devices()):
                return self._next_order()
            # A run that starts without drained devices has another plan than its command's.
            is_planned_again = not self._first_generation or count < self._local.job.plan.ranks
            if is_planned_again:
                self._planning.announce_plan(plan)
            order, shortage = self._compose_order(plan, devices[:count])
            if is_planned_again:
                self._event(
                    "planned", seconds=time.monotonic() - started, layout=str(plan.layout), ranks=count,
                    left_out=self._members.describe_devices(self._backoff.left_out), ahead=prefetched,
                    **self._members.describe_order(order),
                )  # fmt: skip
            if shortage is not None:
                self._event(**shortage)
            self._first_generation = False
            return order, analysis
        raise self._save_newest_state(LaunchError(f"no layout for the {len(devices)} ranks that are left: {reason}"))

    def _await_devices(self) -> None:
        """Waits until `recovery.minimum` devices are usable, readmitting those whose time out is over."""
        while len(self._usable_devices()) < self._minimum:
            back_off_s = self._backoff.remaining_s(self._members.connected_devices())
            present = len(self._usable_devices())
            known = {"seconds": back_off_s} if back_off_s else {}
            self._event("waiting", **known, present=present, minimum=self._minimum)
            pump_until(
                lambda present=present: bool(self._readmissible_devices()) or len(self._usable_devices()) > present,  # type: ignore[misc]
                math.inf,
                self._pump_waiting,
            )
            self._backoff.readmit(self._readmissible_devices())

    def _await_newer_state(self) -> None:
        """Gives missing nodes a moment to return, where those present hold parts of a state newer than the disk."""
        if self.order is None or self._members.alone:
            return
        nodes = set(self.order.nodes)

        def may_wait() -> bool:
            reports = self._members.reports
            steps = [record.step for report in reports.values() for record in report.snapshots]
            newer = max(steps, default=-1) > self._checkpoint_step()
            return newer and bool(nodes - reports.keys()) and self._newest_state() is None

        pump_until(lambda: not may_wait(), _RETURN_S, self._pump_idle)

    def _get_plan(self, count: int) -> tuple[tuple[Plan, ModelAnalysis], bool]:
        """Returns the planner's answer for a number of ranks, and whether it was prefetched."""
        if not self._members.alone:
            # In another process, since other nodes must hear of this one meanwhile.
            self._planner.start([count])
            pump_until(lambda: not self._planner.pending(count), _BUSY_S, self._members.pump)
            self._members.broadcast(Busy(_BUSY_S))
        return self._planner.answer(count)

    def _compose_order(self, plan: Plan, devices: Sequence[Device]) -> tuple[Order, dict[str, Any] | None]:
        """Returns the order of a plan, and the event that reports a shortage of memory for copies, if any."""
        members, reports = self._members, self._members.reports
        shares, shortage = assign_ranks(reports, devices), None
        if members.alone:
            copies, shortage = plan_local_copies(plan, reports[self._local.node], self._config)
        else:
            copies = plan_copies(plan, shares, reports, self._config)
        peaks = (report.peak_flops for _, report in sorted(reports.items()))
        order = Order(
            generation=members.generation,
            plan=plan,
            shares=shares,
            members=tuple(sorted(reports)),
            store=reports[devices[0][0]].address("store"),
            snapshot_servers={node: report.address("snapshots") for node, report in reports.items()},
            state=self._newest_state(),
            peak_flops=next((peak for peak in peaks if peak), None),
            lost_for_s=None if self._lost_at is None else time.monotonic() - self._lost_at,
            rewind=self._rewinds.state,
            copies=copies,
            failures_without_progress=self._restart_budget.failures_without_progress,
        )
        return order, shortage if members.alone else describe_shortage(order, self._config)

    def _checkpoint_step(self) -> int:
        latest = self._store.latest()
        return latest.step if latest is not None else -1

    def _newest_state(self) -> StateLocation | None:
        """Returns where the newest complete state in memory lies; None when a checkpoint on disk is newer."""
        floor = self._rewinds.state.floor
        return choose_state(self._members.reports, self._refused_states, self._checkpoint_step(), floor)

    def _run_generation(self, order: Order, analysis: ModelAnalysis | None) -> TrainOutcome | None:
        """Runs one generation on all nodes; returns the run's outcome, None when another generation must follow."""
        members, local = self._members, self._local
        self.order = order
        members.begin_generation()
        self._replanner.begin_generation(order.plan)
        self._drains.begin_generation(members.connected_devices())
        # Forking the ranks blocks this thread: without Busy the followers would take the silence for a loss.
        members.broadcast(Busy(_BUSY_S))
        members.broadcast(Start(order))
        try:
            if local.node in order.nodes:
                local.run(order, self._watch_generation, analysis, members.wake, members.fence())
            else:
                local.skip(order.generation)
            members.report_local()
            pump_until(self._follow_others, math.inf, members.pump)
        except LeadershipLost:
            raise
        except GenerationAborted:
            members.report_local()
        self._lost_at = members.lost_at or local.failed_at or time.monotonic()
        members.fence_generation(order)
        verdict = judge_generation(order, members.reports, members.lost_nodes)
        fenced_s = time.monotonic() - self._lost_at
        if verdict.ending is Ending.COMPLETE:
            return verdict.outcome
        if verdict.outcome is None:
            self._handle_failure(verdict, order, fenced_s)
        elif verdict.ending is Ending.ANOMALOUS:
            local.storage.settle(rewinds=True)
            self._rewinds.rewind_to_checkpoint(verdict.outcome, order.generation)
        elif verdict.outcome.damage is not None:
            self._rewind_damage(verdict.outcome.damage, order)
        elif not self._replanner.take(order.devices):
            drained = self._drains.take_change(members.connected_devices(), verdict.outcome.step)
            readmitted, joined = self._readmissible_devices(), members.joined_nodes()
            self._backoff.readmit(readmitted)
            if readmitted or joined or not drained:
                nodes = {} if members.alone else {"nodes": joined}
                self._event("growing", step=verdict.outcome.step, devices=members.describe_devices(readmitted), **nodes)
        return None

    def _follow_others(self) -> bool:
        """Whether all nodes' ranks ended; where this node has none, it asks theirs to end for a change all the same.

        Raises:
            LeftRun: when this node has no rank, and the user interrupts it alone.
        """
        order, members = self.order, self._members
        assert order is not None
        if self._local.node not in order.nodes:
            self._local.departure.end_without_ranks(order)
            if self._local.interrupts.count:
                raise LeftRun(f"node {self._local.node} left the run, in which it had no rank; the others go on")
            members.check_generation(order)
            if self._needs_change(order, (), None):
                members.broadcast(Reconfigure(order.generation))
        return has_ended(order, members.reports)

    def _watch_generation(self, ranks: GenerationRanks) -> None:
        """Checks ranks and nodes while a generation runs; raises `GenerationAborted` for a node's loss or failure."""
        order, members = self.order, self._members
        assert order is not None
        stamps = self._local.poll(ranks)
        if not members.alone:
            members.pump(0.0)  # the launcher waits between two calls: this must not
        members.check_generation(order)
        times, steps = members.gather_times(order, ranks.times), [stamp.step for stamp in stamps]
        # All ranks agree on a step to end after, so that its state is whole.
        if not ranks.control.reconfiguration_requested and self._needs_change(order, steps, times):
            ranks.control.request_reconfiguration()
            members.broadcast(Reconfigure(order.generation))
        if stamps and all(stamp.step > 2 for stamp in stamps):
            self._planner.start(counts_after_loss(order, self._minimum))

    def _needs_change(self, order: Order, steps: Sequence[int], times: Sequence[RankTime] | None) -> bool:
        """Returns whether ranks should end: devices or nodes came back or leave, or another layout is faster."""
        members = self._members
        leaves = self._drains.asks_for_change(members.connected_devices(), self._backoff.left_out, order.devices)
        grows = bool(self._readmissible_devices()) or members.awaits_reconfiguration()
        # Ranks that end for other devices don't change their layout at once: it would be one for these.
        return leaves or grows or self._replanner.poll(steps, times)

    def _handle_failure(self, verdict: GenerationVerdict, order: Order, fenced_s: float) -> None:
        """Records a failure, refuses the state that caused it, and leaves out the device that did.

        Raises:
            MeshwrightError: when the run can't go on.
        """
        members, failure = self._members, verdict.failure
        if failure is not None:
            self._event(
                "rank_lost", lost=failure.rank, **members.describe_node(failure.node), place=failure.coordinates,
                why=failure.text.splitlines()[0], generation=order.generation, phase=failure.phase, step=failure.step,
            )  # fmt: skip
        self._event("fenced", generation=order.generation, seconds=fenced_s)
        interrupted = self._local.interrupts.count > 0
        decision = decide_after_failure(verdict, order, members.lost_nodes, self._restart_budget, interrupted)
        # What failed under a layout that was just chosen may run under the one before, from the same state.
        withdrawn = self._replanner.withdraw() and not interrupted
        if failure is not None and not withdrawn and not interrupted and self._drop_plan(failure, order):
            return
        if decision.refused_state is not None and not withdrawn:
            self._refused_states.add(decision.refused_state)
            self._event("snapshot_refused", reason=str(decision.error))
        if decision.ends_run and not withdrawn:
            if self._local.interrupts.terminated:
                decision.error.exit_status = TERMINATED
            raise self._save_newest_state(decision.error)
        if decision.blamed is not None:
            self._record_device_failure(decision.blamed)

    def _drop_plan(self, failure: NodeFailure, order: Order) -> bool:
        """Takes the next plan of the list if ranks ran out of memory in their first steps; returns whether it did."""
        began = max(0, order.state.step if order.state is not None else self._checkpoint_step())
        if not failure.is_shortage or failure.step - began > FIRST_STEPS:
            return False
        # Planning takes seconds, in which the other nodes must hear of this one.
        self._members.broadcast(Busy(_BUSY_S))
        reason = failure.text.splitlines()[0]
        offer = self._planning.leaner_plan(order.plan, reason)
        if offer is None:
            return False
        self._planner.learn(order.plan.ranks, offer)
        self._event(
            "plan_dropped", step=failure.step, layout=str(order.plan.layout), next=str(offer[0].layout), reason=reason
        )
        return True

    def _rewind_damage(self, damage: Damage, order: Order) -> None:
        """Restarts from the newest state that is older than a damage.

        Raises:
            RankError: when damages recurred too often without a step beyond the furthest one.
        """
        # What the keeper would write may be damaged; a checkpoint under way may have to be withdrawn.
        self._local.storage.settle(rewinds=True)
        reports = self._members.reports
        states = complete_states(reports, self._refused_states, self._rewinds.state.floor)
        try:
            keep = self._rewinds.rewind_before(damage, any(step <= damage.keep for step, _ in states))
        except RankError as error:
            self._refused_states |= states_after(reports, damage.keep)
            raise self._save_newest_state(error) from None
        self._refused_states |= states_after(reports, keep)
        if len(damage.ranks) == 1:
            self._record_device_failure(order.devices[damage.ranks[0]])

    def _record_device_failure(self, device: Device) -> None:
        """Records that a device's rank failed, and reports when the device is left out."""
        back_off_s = self._backoff.record_failure(device)
        if back_off_s is not None:
            node, number = device
            self._event("left_out", **self._members.describe_node(node), device=number, seconds=back_off_s)

    def _checkpoint_limit_s(self) -> float:
        """Returns how long a checkpoint under way may go on; after a signal to end, what is left of launch.stop_s."""
        config, first_at = self._local.job.config, self._local.interrupts.first_at
        if first_at is None:
            return config.checkpoint.wait_s
        return max(0.0, first_at + config.launch.stop_s - time.monotonic())

    def _save_newest_state(self, error: MeshwrightError) -> MeshwrightError:
        """Writes the newest state in memory to disk before the run ends; returns ``error``, to be raised."""
        location = self._newest_state()
        # A configuration error at the start trained nothing: there is no new state to save.
        if location is None or self.order is None or isinstance(error, UNRECOVERABLE):
            return error
        self._members.broadcast(Busy(_BUSY_S))
        servers = {node: report.address("snapshots") for node, report in self._members.reports.items()}
        try:
            self._local.storage.clear_disk(self._checkpoint_limit_s())
            state = self._local.open_state(location, servers)
            event_fields = save_newest_state(self._store, state, job_origin(self._local.job, self.order.plan.layout))
        # What prevents the checkpoint must not hide why the run ends.
        except MeshwrightError as failed:
            event_fields = {"kind": "checkpoint_failed", "step": location.step, "reason": str(failed)}
        if event_fields is not None:
            self._event(**event_fields)
        return error
