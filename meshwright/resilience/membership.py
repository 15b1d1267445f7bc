"""The nodes of a run as its leader sees them: this one alone, or those that are connected to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from meshwright.resilience.claims import PRESENCE_S, Claim, Claims
from meshwright.resilience.generation_ranks import Fence as FenceCheck
from meshwright.resilience.generation_ranks import GenerationAborted
from meshwright.resilience.local_node import LocalNode
from meshwright.resilience.messages import ComputeTimes, Device, Fence, Message, NodeReport, Order, Ready
from meshwright.resilience.peers import Hub, PeerConnection, pump_until
from meshwright.train.stage_times import PublishedTimes, RankTime

_FENCE_S = 20.0


class LeadershipLost(GenerationAborted):
    """Another node leads now."""


class MinorityPartition(LeadershipLost):
    """This node reaches fewer of the live nodes than it misses, so a node of the majority should lead."""


class Membership:
    """A run on this node alone.

    Args:
        local: this node.
    """

    alone = True
    """Whether the run has this node only."""
    awaited = "devices to come back"
    """What the run waits for between generations."""

    def __init__(self, local: LocalNode) -> None:
        self.local = local
        self.generation = 0
        """The generation that this node leads."""
        self.reports: dict[int, NodeReport] = {}
        """The last report of each node."""
        self.lost_nodes: dict[int, str] = {}
        """Nodes lost since the generation began, with the reason."""
        self.lost_at: float | None = None
        """time.monotonic() at which the first of them was lost."""
        self._compute_times: dict[int, tuple[RankTime, ...]] = {}

    def report_local(self) -> None:
        """Prepares this node for another generation."""
        self.reports[self.local.node] = self.local.report()

    def connected_devices(self) -> list[Device]:
        """Returns node and number of every device of the connected nodes, ordered by node."""
        return [(node, slot) for node, report in sorted(self.reports.items()) for slot in report.slots]

    def begin_generation(self) -> None:
        """Forgets the nodes that were lost before a generation."""
        self.lost_nodes, self.lost_at, self._compute_times = {}, None, {}

    def gather_times(self, order: Order, published: PublishedTimes | None) -> list[RankTime] | None:
        """Returns the newest times of all ranks in rank order; None while some node's of the same steps are missing.

        Args:
            order: of the ranks' generation.
            published: those of this node's ranks; None where nobody asks.
        """
        if published is not None and (times := published.read_new()) is not None:
            self._compute_times[self.local.node] = times
        shares = sorted(order.shares, key=lambda share: share.first_rank)
        if any(len(self._compute_times.get(share.node, ())) != len(share.slots) for share in shares):
            return None
        gathered = [rank_time for share in shares for rank_time in self._compute_times[share.node]]
        return gathered if len({rank_time.step for rank_time in gathered}) == 1 else None

    def pump(self, seconds: float) -> None:
        """Waits, and processes what other nodes send."""
        time.sleep(seconds)

    def broadcast(self, message: Message) -> None:
        """Sends a message to all other nodes."""

    def joined_nodes(self) -> list[int]:
        """Returns the nodes that joined since the generation began, sorted."""
        return []

    def awaits_reconfiguration(self) -> bool:
        """Whether a node joined that may be used now."""
        return False

    def check_generation(self, order: Order) -> None:
        """Raises `GenerationAborted` when a node with ranks of this generation was lost, or reports a failure."""
        for node in order.nodes:
            report = self.reports.get(node)
            if node in self.lost_nodes or report is None:
                raise GenerationAborted(f"node {node} was lost")
            if report.end.generation == order.generation and report.end.failure is not None:
                raise GenerationAborted(f"node {node} reports a failure")

    def check_majority(self, order: Order | None) -> None:
        """Raises `MinorityPartition` when a network partition leaves most live nodes out of reach."""

    def fence_generation(self, order: Order) -> None:
        """Waits until all ranks of a generation are gone, and drops the nodes where they aren't."""

    def claim_next_generation(self) -> None:
        """Makes this node the leader of the next generation, or raises `LeadershipLost`."""
        self.generation += 1

    @property
    def wake(self) -> int:
        """A descriptor that is readable when a message has arrived; -1 without any."""
        return -1

    def fence(self) -> FenceCheck | None:
        """Returns the check by which ranks find that the next generation was claimed; None when nobody else can."""
        return None

    def describe_device(self, device: Device) -> Any:
        """Returns a device as events list it."""
        return device[1]

    def describe_devices(self, devices: Iterable[Device]) -> list[Any]:
        """Returns devices as events list them."""
        return [self.describe_device(device) for device in devices]

    def describe_node(self, node: int) -> dict[str, Any]:
        """Returns the event's field that names a node."""
        return {}

    def describe_order(self, order: Order) -> dict[str, Any]:
        """Returns the fields of an event that describe an order."""
        return {}


class PeerMembership(Membership):
    """The nodes that are connected to this one, which leads.

    Args:
        local: this node.
        hub: its connections.
        claims: the files of the run's generations.
        claim: this node's, of the generation that it leads.
        event: records an event: its kind, and its fields by keyword.
        yields: whether this node gives way to a majority that it can't reach.
    """

    alone = False
    awaited = "other nodes"

    def __init__(
        self,
        local: LocalNode,
        hub: Hub,
        claims: Claims,
        claim: Claim,
        event: Callable[..., None],
        yields: bool = True,
    ) -> None:
        super().__init__(local)
        self._hub, self._claims, self._claim, self._event, self._yields = hub, claims, claim, event, yields
        self.generation = claim.generation
        self._connections: dict[int, PeerConnection] = {}
        self._sessions_at_start: set[tuple[int, str]] = set()
        self._loss_times: dict[int, list[float]] = {}

    def begin_generation(self) -> None:
        """Forgets the nodes that were lost or joined before a generation."""
        super().begin_generation()
        self._sessions_at_start = self._sessions()

    def _sessions(self) -> set[tuple[int, str]]:
        return {(node, report.session) for node, report in self.reports.items()}

    def pump(self, seconds: float) -> None:
        """Processes messages and disconnects of other nodes, and renews the lease.

        Raises:
            LeadershipLost: when another node leads.
        """
        messages, lost_connections = self._hub.pump(seconds)
        if self._claims.superseded(self.generation):
            raise LeadershipLost("another node leads")
        for connection, message in messages:
            if isinstance(message, Ready):
                self._handle_ready(connection, message.report)
            elif isinstance(message, ComputeTimes) and message.generation == self.generation:
                # Whose ranks they are is what the connection says, not the message.
                nodes = [node for node, known in self._connections.items() if known is connection]
                self._compute_times |= dict.fromkeys(nodes, message.times)
        for connection in lost_connections:
            for node, member_connection in list(self._connections.items()):
                if member_connection is connection:
                    reason = "its connection ended" if not connection.silent else "it was silent"
                    self._remove(node, reason)
        self._claims.renew(self.generation)
        self._claims.renew_presence(self.local.node)

    def _handle_ready(self, connection: PeerConnection, report: NodeReport) -> None:
        node = report.node
        if node == self.local.node:
            # Another command with this node's number: its messages must not replace this node's own report.
            self._hub.drop(connection)
            return
        earlier, earlier_connection = self.reports.get(node), self._connections.get(node)
        # A new session under a known number is a restarted supervisor: its memory, and the state in it, is gone.
        if earlier is not None and earlier.session != report.session:
            self._remove(node, "it was started again")
            if earlier_connection is connection:
                # A process has one session: one that changes it is not to be trusted, and its connection is closed.
                return
        if earlier_connection is not connection:
            self._event("node_ready", node=node, ranks=len(report.slots), address=report.host)
        self.reports[node], self._connections[node] = report, connection

    def _remove(self, node: int, reason: str) -> None:
        """Records the loss of a node, and ends its connection."""
        del self.reports[node]
        self._hub.drop(self._connections.pop(node))
        self.lost_nodes[node] = reason
        self._loss_times.setdefault(node, []).append(time.monotonic())
        self.lost_at = self.lost_at or time.monotonic()
        self._event("node_lost", node=node, why=reason, generation=self.generation)

    def broadcast(self, message: Message) -> None:
        """Sends a message to all other nodes."""
        self._hub.broadcast(message)

    def joined_nodes(self) -> list[int]:
        """Returns the nodes that joined since the generation began, sorted."""
        return sorted(node for node, _ in self._sessions() - self._sessions_at_start)

    def awaits_reconfiguration(self) -> bool:
        """Whether a node joined that may be used now; one that was lost twice or more waits for its back-off time."""
        back_s, now = self.local.job.config.recovery.back_s, time.monotonic()
        losses = [self._loss_times.get(node, []) for node in self.joined_nodes()]
        return any(len(times) < 2 or now - times[-1] >= back_s * 2.0 ** (len(times) - 2) for times in losses)

    def check_majority(self, order: Order | None) -> None:
        """Yields the lead when a network partition leaves most live nodes out of reach.

        Raises:
            MinorityPartition: when it yielded.
        """
        # Stamps lie on the shared file system: a node whose stamp moves lives, though no connection reaches it.
        known_nodes = set(order.members if order is not None else ()) | self._loss_times.keys()
        earlier_stamps = self._claims.read_presence(known_nodes - self.reports.keys())
        if not self._yields or len(earlier_stamps) <= len(self.reports):
            return

        def majority_is_elsewhere() -> bool:
            later_stamps = self._claims.read_presence(earlier_stamps.keys() - self.reports.keys())
            return sum(stamp != earlier_stamps[node] for node, stamp in later_stamps.items()) > len(self.reports)

        if pump_until(majority_is_elsewhere, PRESENCE_S, self.pump):
            reached = sorted(self.reports)
            self._event("gave_way", node=self.local.node, reached=reached, generation=self.generation)
            self._claims.yield_lead(self.generation)
            raise MinorityPartition("more nodes are on the other side of the network")

    def fence_generation(self, order: Order) -> None:
        """Makes all nodes kill their ranks, and waits until each reports it; drops the nodes that don't."""
        self._hub.broadcast(Fence(self.generation))

        def unfenced_nodes() -> list[int]:
            reports = {node: self.reports[node] for node in order.nodes if node in self.reports}
            return [node for node, report in reports.items() if report.end.generation != self.generation]

        pump_until(lambda: not unfenced_nodes(), _FENCE_S, self.pump)
        for node in unfenced_nodes():
            self._remove(node, f"its ranks didn't end within {_FENCE_S:g} s")

    def claim_next_generation(self) -> None:
        """Makes this node the leader of the next generation.

        Raises:
            LeadershipLost: when another node was faster.
        """
        claim = dataclasses.replace(self._claim, generation=self.generation + 1)
        if not self._claims.try_claim(claim):
            raise LeadershipLost("another node leads")
        self._claim, self.generation = claim, claim.generation

    @property
    def wake(self) -> int:
        """A descriptor that is readable when a message has arrived."""
        return self._hub.fileno()

    def fence(self) -> FenceCheck | None:
        """Returns the check by which ranks find that the next generation was claimed."""
        return self._claims.make_fence(self.generation)

    def describe_device(self, device: Device) -> Any:
        """Returns a device as events list it."""
        return list(device)

    def describe_node(self, node: int) -> dict[str, Any]:
        """Returns the event's field that names a node."""
        return {"node": node}

    def describe_order(self, order: Order) -> dict[str, Any]:
        """Returns the fields of an event that describe an order."""
        restores = order.state.step if order.state is not None else None
        return {"nodes": order.nodes, "generation": order.generation, "restores": restores}
