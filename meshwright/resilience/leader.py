"""The leader of a run over several nodes: membership, the plan and state of each generation, its start and its fence.

A generation is the life of one set of ranks: the leader broadcasts `Start` with its order, and after a failure `Fence`.
It claims the next generation only when all ranks are gone, so that two never run at once.
"""

from __future__ import annotations

import dataclasses
import time
from typing import cast

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import ClusterError, LaunchError, MeshwrightError, PlanError, RankError, error_of
from meshwright.resilience.claims import PRESENCE_S, Claim
from meshwright.resilience.devices import Roster
from meshwright.resilience.generation_ranks import HOPELESS, GenerationRanks, Patience, job_origin, keep_on_disk
from meshwright.resilience.leader_context import LeaderContext, LeadershipLost, Member, MinorityPartition
from meshwright.resilience.local_node import GenerationAborted
from meshwright.resilience.messages import Busy, Fence, Order, Ready, Reconfigure, Start
from meshwright.resilience.orders import choose, compose, copies, held_after, root_failure, shelves, shortage
from meshwright.resilience.peers import Message, PeerConnection, until
from meshwright.resilience.plan_prefetch import PlanPrefetcher
from meshwright.resilience.rewinds import Rewinds
from meshwright.spec.plan import Plan
from meshwright.train.integrity import Damage
from meshwright.train.memory import RESTORING

_FENCE_S = 20.0
_BUSY_S = 60.0
_RETURN_S = 10.0
"""How long to wait for missing nodes when the nodes present hold no complete state in memory."""
_DAMAGED = "is damaged"


class Leader:
    """Leads a run from the claim of a generation until the run ends, or another node leads.

    Args:
        order: the last order that this node received from another leader, if any.
        lost_at: time.monotonic() at which that leader was lost.
        yields: whether it gives way to a majority of nodes that it can't reach.
    """

    def __init__(
        self, means: LeaderContext, claim: Claim, order: Message | None, lost_at: float | None, yields: bool = True
    ) -> None:
        self._yields = yields
        self._context, self._claim, self._lost_at = means, claim, lost_at
        self._local, self._hub, self._claims = means.local, means.hub, means.claims
        job = self._local.job
        self._config = job.config.recovery
        self._roster: Roster[tuple[int, int]] = Roster([], self._config)
        self._planner = PlanPrefetcher(means.plans)
        self._planner.learn(job.plan.ranks, (job.plan, job.analysis))
        self._patience = Patience(self._config.attempts)
        self._members: dict[int, Member] = {}
        self.order = order
        """Its last order."""
        self._sessions_at_start: set[tuple[int, str]] = set()
        self._lost_nodes: dict[int, str] = {}
        self._loss_times: dict[int, list[float]] = {}
        self._refused_states: set[tuple[int, int]] = set()
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.checkpoint)
        self._is_first_generation = order is None
        self._rewinds = Rewinds(job.config, self._store, means.event)
        self._rewinds.adopt(order)
        self._floor: int = order["floor"] if order is not None else -1

    @property
    def generation(self) -> int:
        """The generation that it leads."""
        return self._claim.generation

    def lead(self, expected: set[int], limit_s: float) -> Message:
        """Runs generations until the run ends, and returns rank 0's result.

        Args:
            expected: nodes that should be connected at the start.
            limit_s: how long to wait for them.

        Raises:
            LeadershipLost: when another node leads.
            MeshwrightError: when the run can't go on.
        """
        try:
            self._record_own_report(self._local.report())
            all_present = until(lambda: expected <= self._members.keys(), limit_s, self._pump_idle)
            missing = sorted(expected - self._members.keys())
            if not all_present and self._is_first_generation and self._claim.generation == 0:
                raise LaunchError(f"nodes {missing} didn't come within launch.group_s = {limit_s:g} s; start them too")
            while True:
                self._give_way()
                result = self._run_generation(self._next_order())
                if result is not None:
                    return result
                claim = dataclasses.replace(self._claim, generation=self.generation + 1)
                if not self._claims.try_claim(claim):
                    raise LeadershipLost("another node leads")
                self._claim = claim
        finally:
            self._planner.close()

    def _give_way(self) -> None:
        """Yields the lead when a network partition leaves most live nodes out of reach.

        Raises:
            MinorityPartition: when it yielded.
        """
        # Stamps lie on the shared file system: a node whose stamp moves lives, though no connection reaches it.
        known_nodes = set(self.order["members"] if self.order is not None else ()) | self._loss_times.keys()
        earlier_stamps = self._claims.stamps(known_nodes - self._members.keys())
        if not self._yields or len(earlier_stamps) <= len(self._members):
            return

        def majority_is_elsewhere() -> bool:
            later_stamps = self._claims.stamps(earlier_stamps.keys() - self._members.keys())
            return sum(stamp != earlier_stamps[node] for node, stamp in later_stamps.items()) > len(self._members)

        if until(majority_is_elsewhere, PRESENCE_S, self._pump):
            self._context.event(
                "gave_way", node=self._local.node, reached=sorted(self._members), generation=self.generation
            )
            self._claims.give_way(self.generation)
            raise MinorityPartition("more nodes are on the other side of the network")

    def _pump(self, seconds: float) -> None:
        """Processes messages and disconnects of other nodes, and renews the lease; raises `LeadershipLost`."""
        messages, lost_connections = self._hub.pump(seconds)
        if self._claims.superseded(self.generation):
            raise LeadershipLost("another node leads")
        for connection, message in messages:
            if isinstance(message, Ready):
                self._handle_ready(connection, message)
        for connection in lost_connections:
            for node, member in list(self._members.items()):
                if member.connection is connection:
                    del self._members[node]
                    self._handle_node_loss(node, "its connection ended" if not connection.silent else "it was silent")
        self._claims.renew(self.generation)
        self._claims.be_present(self._local.node)

    def _pump_idle(self, seconds: float) -> None:
        """Processes messages while no ranks run, and stops the run when the user interrupts."""
        self._pump(seconds)
        if self._local.interrupts:
            raise self._save_newest_state(LaunchError("ended while waiting for other nodes"))

    def _handle_ready(self, connection: PeerConnection, message: Ready) -> None:
        # A new session under a known number is a restarted supervisor: its memory, and the state in it, is gone.
        report: Message = {**message.report, "session": message.session}
        node = report["node"]
        earlier = self._members.get(node)
        if earlier is not None and earlier.report["session"] != message.session:
            self._handle_node_loss(node, "it was started again")
            if earlier.connection is not None:
                self._hub.drop(earlier.connection)
        if earlier is None or earlier.connection is not connection:
            self._context.event("node_ready", node=node, ranks=len(report["slots"]), address=report["host"])
        self._members[node] = Member(connection, report)

    def _handle_node_loss(self, node: int, reason: str) -> None:
        self._lost_nodes[node] = reason
        self._loss_times.setdefault(node, []).append(time.monotonic())
        self._lost_at = self._lost_at or time.monotonic()
        self._context.event("node_lost", node=node, why=reason, generation=self.generation)

    def _record_own_report(self, report: Message) -> None:
        self._members[self._local.node] = Member(None, report | {"session": self._claim.session})

    def _usable_devices(self) -> list[tuple[int, int]]:
        """Returns (node, device) of every device that isn't left out, ordered by node."""
        left_out = set(self._roster.absent)
        devices = [(node, slot) for node in sorted(self._members) for slot in self._members[node].report["slots"]]
        return [device for device in devices if device not in left_out]

    def _next_order(self) -> Message:
        """Plans for the devices present and composes the next generation's order: ranks, plan, state and copies."""
        started = time.monotonic()
        self._await_devices()
        if self.order is not None and self._newest_state()[0] is None and self._misses_newer_state():
            until(
                lambda: self._newest_state()[0] is not None or not self._misses_newer_state(),
                _RETURN_S,
                self._pump_idle,
            )
        devices, reason = self._usable_devices(), ""
        for ranks in range(len(devices), self._config.minimum - 1, -1):
            self._planner.start([ranks])
            until(lambda ranks=ranks: not self._planner.pending(ranks), _BUSY_S, self._pump)  # type: ignore[misc]
            self._hub.broadcast(Busy(_BUSY_S))
            try:
                (plan, _), cached = self._planner.answer(ranks)
            except (PlanError, ClusterError) as error:
                reason = reason or str(error)
                continue
            # Planning took time: devices that joined or left meanwhile invalidate the plan.
            if set(devices) != set(self._usable_devices()):
                return self._next_order()
            if not self._is_first_generation:
                self._context.announce(plan)
            since = None if self._lost_at is None else time.monotonic() - self._lost_at
            state, peak = self._newest_state()
            head = {"generation": self.generation, "plan": plan.to_json(), "since": since, "state": state, "peak": peak}
            order = compose(self._reports(), devices[:ranks]) | head | self._rewinds.order() | {"floor": self._floor}
            order |= copies(plan, order["nodes"], self._reports(), self._config)
            if short := shortage(order, self._config):
                self._context.event(**short)
            if not self._is_first_generation:
                self._context.event(
                    "planned", seconds=time.monotonic() - started, layout=str(plan.layout), ranks=ranks, ahead=cached,
                    left_out=[list(device) for device in self._roster.absent], nodes=sorted(map(int, order["nodes"])),
                    generation=self.generation, restores=order["state"] and order["state"]["step"],
                )  # fmt: skip
            self._is_first_generation = False
            return order
        raise self._save_newest_state(LaunchError(f"no layout for the {len(devices)} ranks that are left: {reason}"))

    def _misses_newer_state(self) -> bool:
        """Whether nodes of the last generation are missing while the others hold state newer than the disk."""
        assert self.order is not None
        latest = self._store.latest()
        held_steps = [row[1] for member in self._members.values() for row in member.report["held"]]
        missing = {int(node) for node in self.order["nodes"]} - self._members.keys()
        return bool(missing) and max(held_steps, default=-1) > (latest.step if latest is not None else -1)

    def _await_devices(self) -> None:
        """Waits until `recovery.minimum` devices are usable, readmitting those whose time out is over."""
        if len(self._usable_devices()) < self._config.minimum:
            self._context.event("waiting", present=len(self._usable_devices()), minimum=self._config.minimum)
        while len(self._usable_devices()) < self._config.minimum:
            self._pump_idle(0.1)
            self._roster.readmit(self._roster.due())

    def _reports(self) -> dict[int, Message]:
        return {node: member.report for node, member in self._members.items()}

    def _newest_state(self) -> tuple[Message | None, float | None]:
        latest = self._store.latest()
        return choose(self._reports(), self._refused_states, latest.step if latest is not None else -1, self._floor)

    def _run_generation(self, order: Message) -> Message | None:
        """Runs one generation on all nodes; returns the run's result, or None when another generation must follow."""
        self.order, self._lost_nodes, self._lost_at = order, {}, None
        self._sessions_at_start = {(node, entry.report["session"]) for node, entry in self._members.items()}
        # Forking the ranks blocks this thread: without Busy the followers would take the silence for a loss.
        self._hub.broadcast(Busy(_BUSY_S))
        self._hub.broadcast(Start(cast(Order, order)))
        try:
            if str(self._local.node) in order["nodes"]:
                self._local.run(order, self._watch_generation, self._hub.fileno(), self._claims.fence(self.generation))
            else:
                self._local.outcome |= {"generation": self.generation, "outcome": "fenced", "failure": None}
            self._record_own_report(self._local.report())
            until(self._all_ended, float("inf"), self._pump)
        except LeadershipLost:
            raise
        except GenerationAborted:
            self._record_own_report(self._local.report())
        self._lost_at = self._lost_at or time.monotonic()
        self._fence_generation()
        reports = [self._members[int(node)].report for node in order["nodes"] if int(node) in self._members]
        results = [entry["result"] for entry in reports if entry["result"] and entry["generation"] == self.generation]
        if any(not result.get("cut") for result in results):
            return next(result for result in results if not result.get("cut"))
        self._handle_generation_end(results, reports)
        return None

    def _all_ended(self) -> bool:
        """Whether every node reported that its ranks ended, or one failed or was lost."""
        assert self.order is not None
        for node in self.order["nodes"]:
            member = self._members.get(int(node))
            if member is None or member.report["failure"]:
                return True
            if member.report["generation"] != self.generation:
                return False
        return True

    def _watch_generation(self, ranks: GenerationRanks) -> None:
        """Checks ranks and nodes while a generation runs; raises `GenerationAborted` for a node's loss or failure."""
        assert self.order is not None
        stamps = self._local.poll(ranks)
        self._pump(0.0)
        for node in self.order["nodes"]:
            member = self._members.get(int(node))
            if int(node) in self._lost_nodes or member is None:
                raise GenerationAborted(f"node {node} was lost")
            if member.report["generation"] == self.generation and member.report["failure"]:
                raise GenerationAborted(f"node {node} reports a failure")
        # Devices or nodes came back: all ranks agree on a step to end after, so that its state is whole.
        if not ranks.control.reconfiguration_requested and (self._roster.due() or self._returned_nodes()):
            ranks.control.request_reconfiguration()
            self._hub.broadcast(Reconfigure(self.generation))
        if stamps and all(entry.step > 2 for entry in stamps):
            # Past the first steps: plan in advance for the loss of one rank, and of any one node.
            world = self.order["world"]
            rank_counts = {world - 1, *(world - len(entry["slots"]) for entry in self.order["nodes"].values())}
            self._planner.start([count for count in sorted(rank_counts, reverse=True) if count >= self._config.minimum])

    def _returned_nodes(self) -> list[int]:
        """Returns the nodes that joined since the start, sorted; one lost twice or more waits for its back-off time."""
        returned = []
        for node, member in self._members.items():
            losses = self._loss_times.get(node, [])
            pause = 0.0 if len(losses) < 2 else self._config.back_s * 2.0 ** (len(losses) - 2)
            is_new = (node, member.report["session"]) not in self._sessions_at_start
            if is_new and (not losses or time.monotonic() - losses[-1] >= pause):
                returned.append(node)
        return sorted(returned)

    def _fence_generation(self) -> None:
        """Makes all nodes kill their ranks, and waits until each reports it; drops the nodes that don't."""
        assert self.order is not None
        started, nodes = time.monotonic(), {int(node) for node in self.order["nodes"]}
        self._hub.broadcast(Fence(self.generation))

        def all_fenced() -> bool:
            members = [member for node, member in self._members.items() if node in nodes]
            return all(member.report["generation"] == self.generation for member in members)

        until(all_fenced, _FENCE_S, self._pump)
        for node in nodes & self._members.keys():
            if self._members[node].report["generation"] != self.generation:
                connection = self._members.pop(node).connection
                self._handle_node_loss(node, f"its ranks didn't end within {_FENCE_S:g} s")
                if connection is not None:
                    self._hub.drop(connection)
        self._fence_duration_s = time.monotonic() - started

    def _handle_generation_end(self, results: list[Message], reports: list[Message]) -> None:
        """Handles a failure or a reconfiguration; raises the run's error when it can't go on."""
        failures = [entry["failure"] | {"node": entry["node"]} for entry in reports if entry["failure"]]
        if results and not self._lost_nodes and not failures:
            if results[0]["sick"]:
                return self._rewind_anomalous_steps(results[0])
            if "damage" in results[0]:
                return self._rewind_damage(Damage.from_json(results[0]["damage"]))
            readmitted = self._roster.due()
            self._roster.readmit(readmitted)
            sessions = {(node, entry.report["session"]) for node, entry in self._members.items()}
            nodes = sorted(node for node, _ in sessions - self._sessions_at_start)
            event_fields = {"devices": [list(entry) for entry in readmitted], "nodes": nodes}
            self._context.event("growing", step=results[0]["step"], **event_fields)
            return
        cause = root_failure(failures, bool(self._lost_nodes))
        error: MeshwrightError = LaunchError(
            "; ".join(f"node {node}: {text}" for node, text in self._lost_nodes.items())
        )
        if cause is not None:
            error = error_of(cause["error"], cause["text"], LaunchError)
            event_fields = {name: cause[name] for name in ("node", "place", "phase", "step")}
            reason = cause["text"].splitlines()[0]
            self._context.event("rank_lost", lost=cause["rank"], why=reason, generation=self.generation, **event_fields)
        self._context.event("fenced", generation=self.generation, seconds=self._fence_duration_s)
        reached = max((entry.get("reached", 0) for entry in reports), default=0)
        state = self.order["state"] if self.order else None
        if cause is not None and RESTORING in cause["text"] and _DAMAGED in cause["text"] and state:
            self._refused_states.add((state["step"], state["generation"]))
            self._context.event("snapshot_refused", reason=cause["text"])
        raised = cause["step"] if cause and cause["raised"] and not cause["echo"] else None
        if self._patience.ends(error, reached, raised) or self._local.interrupts:
            raise self._save_newest_state(error)
        if cause is not None and not cause["echo"] and cause["rank"] >= 0:
            self._blame_device(cause)

    def _rewind_anomalous_steps(self, result: Message) -> None:
        """Restarts from the last checkpoint, with the batches after the anomalous ones."""
        self._floor = self.generation
        self._rewinds.turn_back(result)

    def _rewind_damage(self, damage: Damage) -> None:
        """Restarts from the newest state that is older than a damage."""
        try:
            keep = self._rewinds.go_back(damage, held_after(self._reports(), damage.keep)[1])
        except RankError as error:
            self._refused_states |= held_after(self._reports(), damage.keep)[0]
            raise self._save_newest_state(error) from None
        self._refused_states |= held_after(self._reports(), keep)[0]

    def _blame_device(self, cause: Message) -> None:
        assert self.order is not None
        share = self.order["nodes"][str(cause["node"])]
        slot = (cause["node"], share["slots"][cause["rank"] - share["first"]])
        if self._roster.blame(slot):
            self._context.event("left_out", node=slot[0], device=slot[1], seconds=self._roster.next_s())

    def _save_newest_state(self, error: MeshwrightError) -> MeshwrightError:
        """Writes the newest state in memory to disk before the run ends; returns ``error``, to be raised."""
        self._hub.broadcast(Busy(_BUSY_S))
        location, _ = self._newest_state()
        state = None
        if location is not None and self.order is not None:
            state = self._local.state({"state": location, "shelves": shelves(self._reports())})
        if state is not None and not isinstance(error, HOPELESS):
            job, layout = self._local.job, Plan.from_json(self.order["plan"]).layout if self.order else None
            event_fields = keep_on_disk(self._store, state, job_origin(job, layout))
            if event_fields is not None:
                self._context.event(**event_fields)
        return error
