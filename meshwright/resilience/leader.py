"""The leader of a run over several nodes: who is there, which plan, which state to go on from; starts and fences."""

from __future__ import annotations

import dataclasses
import time
from typing import cast

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.tokens import TokenSet
from meshwright.errors import ClusterError, LaunchError, MeshwrightError, PlanError, RankError, error_of
from meshwright.resilience.claims import PRESENCE_S, Claim
from meshwright.resilience.devices import Roster
from meshwright.resilience.generation_ranks import HOPELESS, GenerationRanks, Patience, keep_on_disk
from meshwright.resilience.leader_context import LeaderContext, LeadershipLost, Member, MinorityPartition
from meshwright.resilience.local_node import GenerationAborted
from meshwright.resilience.messages import Busy, Fence, Order, Ready, Reconfigure, Start
from meshwright.resilience.orders import choose, compose, copies, held_after, shelves, shortage
from meshwright.resilience.peers import Message, PeerConnection, until
from meshwright.resilience.plan_prefetch import PlanPrefetcher
from meshwright.resilience.rewinds import Rewinds
from meshwright.spec.plan import Plan
from meshwright.train.integrity import Damage
from meshwright.train.memory import RESTORING

_FENCE_S = 20.0
_BUSY_S = 60.0
_RETURN_S = 10.0
"""How long nodes that are missed are waited for, when without them no state in memory is whole."""
_DAMAGED = "is damaged"


class Leader:
    """Leads from the claim of a generation until the run ends, or another node leads.

    Args:
        means: what it works with.
        claim: of its first generation.
        order: the last order that this node was given by another leader, if any.
        lost_at: time.monotonic() at which that leader was lost.
        yields: whether it gives way to more nodes than it can reach.
    """

    def __init__(
        self, means: LeaderContext, claim: Claim, order: Message | None, lost_at: float | None, yields: bool = True
    ) -> None:
        self._yields = yields
        self._means, self._claim, self._lost_at = means, claim, lost_at
        self._local, self._hub, self._claims = means.local, means.hub, means.claims
        job = self._local.job
        self._config = job.config.recovery
        self._roster: Roster[tuple[int, int]] = Roster([], self._config)
        self._ahead = PlanPrefetcher(means.plans)
        self._ahead.learn(job.plan.ranks, (job.plan, job.analysis))
        self._patience = Patience(self._config.attempts)
        self._members: dict[int, Member] = {}
        self.order = order
        """Its last order."""
        self._there: set[tuple[int, str]] = set()
        self._lost: dict[int, str] = {}
        self._losses: dict[int, list[float]] = {}
        self._refused: set[tuple[int, int]] = set()
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.checkpoint)
        self._first = order is None
        self._rewinds = Rewinds(job.config, self._store, means.event)
        self._rewinds.adopt(order)
        self._floor: int = order["floor"] if order is not None else -1

    @property
    def generation(self) -> int:
        """The generation that it leads."""
        return self._claim.generation

    def lead(self, expected: set[int], limit_s: float) -> Message:
        """Runs generation after generation to the end of the run, and returns what rank 0 returned.

        Args:
            expected: nodes that should be there at the start.
            limit_s: how long to wait for them.

        Raises:
            Deposed: when another node leads.
            MeshwrightError: when the run can't go on.
        """
        try:
            self._own(self._local.report())
            came = until(lambda: expected <= self._members.keys(), limit_s, self._idle)
            missing = sorted(expected - self._members.keys())
            if not came and self._first and self._claim.generation == 0:
                raise LaunchError(f"nodes {missing} didn't come within launch.group_s = {limit_s:g} s; start them too")
            while True:
                self._give_way()
                result = self._one_generation(self._next_order())
                if result is not None:
                    return result
                claim = dataclasses.replace(self._claim, generation=self.generation + 1)
                if not self._claims.take(claim):
                    raise LeadershipLost("another node leads")
                self._claim = claim
        finally:
            self._ahead.close()

    def _give_way(self) -> None:
        """Leaves the run to others where the network has parted, and most of its nodes are on the other side.

        Raises:
            Outnumbered: when they are.
        """
        known = set(self.order["members"] if self.order is not None else ()) | self._losses.keys()
        before = self._claims.stamps(known - self._members.keys())
        if not self._yields or len(before) <= len(self._members):
            return

        def most_live() -> bool:
            now = self._claims.stamps(before.keys() - self._members.keys())
            return sum(at != before[node] for node, at in now.items()) > len(self._members)

        if until(most_live, PRESENCE_S, self._pump):
            there = sorted(self._members)
            self._means.event("gave_way", node=self._local.node, reached=there, generation=self.generation)
            self._claims.give_way(self.generation)
            raise MinorityPartition("more nodes are on the other side of the network")

    def _pump(self, seconds: float) -> None:
        """Takes in what other nodes say, and that they are lost."""
        heard, lost = self._hub.pump(seconds)
        if self._claims.over(self.generation):
            raise LeadershipLost("another node leads")
        for line, message in heard:
            if isinstance(message, Ready):
                self._ready(line, message)
        for line in lost:
            for node, member in list(self._members.items()):
                if member.line is line:
                    del self._members[node]
                    self._node_lost(node, "its connection ended" if not line.silent else "it was silent")
        self._claims.renew(self.generation)
        self._claims.be_present(self._local.node)

    def _idle(self, seconds: float) -> None:
        """Pumps while nothing runs, which the user may end."""
        self._pump(seconds)
        if self._local.interrupts:
            raise self._over(LaunchError("ended while waiting for other nodes"))

    def _ready(self, line: PeerConnection, message: Ready) -> None:
        report: Message = {**message.report, "session": message.session}
        node = report["node"]
        before = self._members.get(node)
        if before is not None and before.report["session"] != message.session:
            self._node_lost(node, "it was started again")
            if before.line is not None:
                self._hub.drop(before.line)
        if before is None or before.line is not line:
            self._means.event("node_ready", node=node, ranks=len(report["slots"]), address=report["host"])
        self._members[node] = Member(line, report)

    def _node_lost(self, node: int, why: str) -> None:
        self._lost[node] = why
        self._losses.setdefault(node, []).append(time.monotonic())
        self._lost_at = self._lost_at or time.monotonic()
        self._means.event("node_lost", node=node, why=why, generation=self.generation)

    def _own(self, report: Message) -> None:
        self._members[self._local.node] = Member(None, report | {"session": self._claim.session})

    def _places(self) -> list[tuple[int, int]]:
        """Returns node and device of all that may be used."""
        out = set(self._roster.absent)
        found = [(node, slot) for node in sorted(self._members) for slot in self._members[node].report["slots"]]
        return [place for place in found if place not in out]

    def _next_order(self) -> Message:
        """Plans for who is there, and says who does what, from which state on."""
        began = time.monotonic()
        self._await_places()
        if self.order is not None and self._choose()[0] is None and self._misses():
            until(lambda: self._choose()[0] is not None or not self._misses(), _RETURN_S, self._idle)
        places, why = self._places(), ""
        for ranks in range(len(places), self._config.minimum - 1, -1):
            self._ahead.begin([ranks])
            until(lambda ranks=ranks: not self._ahead.pending(ranks), _BUSY_S, self._pump)  # type: ignore[misc]
            self._hub.tell(Busy(_BUSY_S))
            try:
                (plan, _), cached = self._ahead.answer(ranks)
            except (PlanError, ClusterError) as error:
                why = why or str(error)
                continue
            # Nodes may have gone while this one planned.
            if set(places) != set(self._places()):
                return self._next_order()
            if not self._first:
                self._means.announce(plan)
            since = None if self._lost_at is None else time.monotonic() - self._lost_at
            state, peak = self._choose()
            told = {"generation": self.generation, "plan": plan.to_json(), "since": since, "state": state, "peak": peak}
            order = compose(self._reports(), places[:ranks]) | told | self._rewinds.order() | {"floor": self._floor}
            order |= copies(plan, order["nodes"], self._reports(), self._config)
            if short := shortage(order, self._config):
                self._means.event(**short)
            if not self._first:
                self._means.event(
                    "planned", seconds=time.monotonic() - began, layout=str(plan.layout), ranks=ranks, ahead=cached,
                    left_out=[list(place) for place in self._roster.absent], nodes=sorted(map(int, order["nodes"])),
                    generation=self.generation, restores=order["state"] and order["state"]["step"],
                )  # fmt: skip
            self._first = False
            return order
        raise self._over(LaunchError(f"no layout for the {len(places)} ranks that are left: {why}"))

    def _misses(self) -> bool:
        """Whether nodes that had ranks are missed, and what is held without them is newer than the disk."""
        assert self.order is not None
        latest = self._store.latest()
        steps = [row[1] for one in self._members.values() for row in one.report["held"]]
        gone = {int(node) for node in self.order["nodes"]} - self._members.keys()
        return bool(gone) and max(steps, default=-1) > (latest.step if latest is not None else -1)

    def _await_places(self) -> None:
        """Waits until enough devices are there, or may be tried again."""
        if len(self._places()) < self._config.minimum:
            self._means.event("waiting", present=len(self._places()), minimum=self._config.minimum)
        while len(self._places()) < self._config.minimum:
            self._idle(0.1)
            self._roster.readmit(self._roster.due())

    def _reports(self) -> dict[int, Message]:
        return {node: member.report for node, member in self._members.items()}

    def _choose(self) -> tuple[Message | None, float | None]:
        latest = self._store.latest()
        return choose(self._reports(), self._refused, latest.step if latest is not None else -1, self._floor)

    def _one_generation(self, order: Message) -> Message | None:
        """Starts ranks everywhere and waits for them; returns the run's result, or None when others must follow."""
        self.order, self._lost, self._lost_at = order, {}, None
        self._there = {(node, one.report["session"]) for node, one in self._members.items()}
        self._hub.tell(Busy(_BUSY_S))
        self._hub.tell(Start(cast(Order, order)))
        try:
            if str(self._local.node) in order["nodes"]:
                self._local.run(order, self._watch, self._hub.fileno(), self._claims.fence(self.generation))
            else:
                self._local.last |= {"generation": self.generation, "outcome": "fenced", "failure": None}
            self._own(self._local.report())
            until(self._all_ended, float("inf"), self._pump)
        except LeadershipLost:
            raise
        except GenerationAborted:
            self._own(self._local.report())
        self._lost_at = self._lost_at or time.monotonic()
        self._fence()
        reports = [self._members[int(node)].report for node in order["nodes"] if int(node) in self._members]
        results = [one["result"] for one in reports if one["result"] and one["generation"] == self.generation]
        if any(not result.get("cut") for result in results):
            return next(result for result in results if not result.get("cut"))
        self._after(results, reports)
        return None

    def _all_ended(self) -> bool:
        """Whether all nodes have told that their ranks ended; one that failed or was lost ends the wait too."""
        assert self.order is not None
        for node in self.order["nodes"]:
            member = self._members.get(int(node))
            if member is None or member.report["failure"]:
                return True
            if member.report["generation"] != self.generation:
                return False
        return True

    def _watch(self, ranks: GenerationRanks) -> None:
        """Looks at ranks and nodes while they work."""
        assert self.order is not None
        found = self._local.look(ranks)
        self._pump(0.0)
        for node in self.order["nodes"]:
            member = self._members.get(int(node))
            if int(node) in self._lost or member is None:
                raise GenerationAborted(f"node {node} was lost")
            if member.report["generation"] == self.generation and member.report["failure"]:
                raise GenerationAborted(f"node {node} reports a failure")
        if not ranks.control.cut and (self._roster.due() or self._back()):
            ranks.control.ask_cut()
            self._hub.tell(Reconfigure(self.generation))
        if found and all(one.step > 2 for one in found):
            world = self.order["world"]
            fewer = {world - 1, *(world - len(one["slots"]) for one in self.order["nodes"].values())}
            self._ahead.begin([count for count in sorted(fewer, reverse=True) if count >= self._config.minimum])

    def _back(self) -> list[int]:
        """Returns the nodes that have come since the start and may be used: one lost twice or more waits a while."""
        found = []
        for node, member in self._members.items():
            losses = self._losses.get(node, [])
            pause = 0.0 if len(losses) < 2 else self._config.back_s * 2.0 ** (len(losses) - 2)
            is_new = (node, member.report["session"]) not in self._there
            if is_new and (not losses or time.monotonic() - losses[-1] >= pause):
                found.append(node)
        return sorted(found)

    def _fence(self) -> None:
        """Has the ranks of all nodes ended, and waits until they are."""
        assert self.order is not None
        began, nodes = time.monotonic(), {int(node) for node in self.order["nodes"]}
        self._hub.tell(Fence(self.generation))

        def ended() -> bool:
            there = [one for node, one in self._members.items() if node in nodes]
            return all(one.report["generation"] == self.generation for one in there)

        until(ended, _FENCE_S, self._pump)
        for node in nodes & self._members.keys():
            if self._members[node].report["generation"] != self.generation:
                line = self._members.pop(node).line
                self._node_lost(node, f"its ranks didn't end within {_FENCE_S:g} s")
                if line is not None:
                    self._hub.drop(line)
        self._fenced_s = time.monotonic() - began

    def _after(self, results: list[Message], reports: list[Message]) -> None:
        """Decides whether to go on after a failure or a cut, and without whom.

        Raises:
            MeshwrightError: when the run can't go on.
        """
        failures = [one["failure"] | {"node": one["node"]} for one in reports if one["failure"]]
        if results and not self._lost and not failures:
            if results[0]["sick"]:
                return self._turn_back(results[0])
            if "damage" in results[0]:
                return self._go_back(Damage.from_json(results[0]["damage"]))
            back = self._roster.due()
            self._roster.readmit(back)
            there = {(node, one.report["session"]) for node, one in self._members.items()}
            nodes = sorted(node for node, _ in there - self._there)
            told = {"devices": [list(one) for one in back], "nodes": nodes}
            self._means.event("growing", step=results[0]["step"], **told)
            return
        failures.sort(key=lambda one: (one["echo"], one["hang"], one["at"]))
        cause = failures[0] if failures and not (self._lost and (failures[0]["echo"] or failures[0]["hang"])) else None
        error: MeshwrightError = LaunchError("; ".join(f"node {node}: {why}" for node, why in self._lost.items()))
        if cause is not None:
            error = error_of(cause["error"], cause["text"], LaunchError)
            told = {name: cause[name] for name in ("node", "place", "phase", "step")}
            why = cause["text"].splitlines()[0]
            self._means.event("rank_lost", lost=cause["rank"], why=why, generation=self.generation, **told)
        self._means.event("fenced", generation=self.generation, seconds=self._fenced_s)
        reached = max((one.get("reached", 0) for one in reports), default=0)
        state = self.order["state"] if self.order else None
        if cause is not None and RESTORING in cause["text"] and _DAMAGED in cause["text"] and state:
            self._refused.add((state["step"], state["generation"]))
            self._means.event("snapshot_refused", reason=cause["text"])
        raised = cause["step"] if cause and cause["raised"] and not cause["echo"] else None
        if self._patience.ends(error, reached, raised) or self._local.interrupts:
            raise self._over(error)
        if cause is not None and not cause["echo"] and cause["rank"] >= 0:
            self._blame(cause)

    def _turn_back(self, result: Message) -> None:
        """Makes the next ranks go on from the last checkpoint, with the rows after the sick ones."""
        self._floor = self.generation
        self._rewinds.turn_back(result)

    def _go_back(self, damage: Damage) -> None:
        """Makes the next ranks go on from the newest state that is older than a damage."""
        try:
            keep = self._rewinds.go_back(damage, held_after(self._reports(), damage.keep)[1])
        except RankError as error:
            self._refused |= held_after(self._reports(), damage.keep)[0]
            raise self._over(error) from None
        self._refused |= held_after(self._reports(), keep)[0]

    def _blame(self, cause: Message) -> None:
        assert self.order is not None
        one = self.order["nodes"][str(cause["node"])]
        slot = (cause["node"], one["slots"][cause["rank"] - one["first"]])
        if self._roster.blame(slot):
            self._means.event("left_out", node=slot[0], device=slot[1], seconds=self._roster.next_s())

    def _over(self, error: MeshwrightError) -> MeshwrightError:
        """Writes the newest state to disk; returns the error to raise."""
        self._hub.tell(Busy(_BUSY_S))
        places, _ = self._choose()
        state = None
        if places is not None and self.order is not None:
            state = self._local.state({"state": places, "shelves": shelves(self._reports())})
        if state is not None and not isinstance(error, HOPELESS):
            job, layout = self._local.job, Plan.from_json(self.order["plan"]).layout if self.order else None
            data = TokenSet.open(job.data_dir).fingerprint
            origin = Origin(model=job.fingerprint, data=data, layout=layout, config=job.config.to_dict())
            told = keep_on_disk(self._store, state, origin)
            if told is not None:
                self._means.event(**told)
        return error
