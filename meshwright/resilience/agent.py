"""The supervisor of one node of several: it follows the leader of the newest generation, or becomes it.

One thread waits for all connections at once, so that ranks can be forked from it at any time. The leader is elected by
a file in the run directory (`claims`); all other messages go over TCP (`peers`).
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.launch.addresses import listen_at
from meshwright.launch.devices import Devices
from meshwright.resilience.claims import FRESH_S, LEASE_S, Claim, Claims
from meshwright.resilience.controller import Controller
from meshwright.resilience.generation_ranks import GenerationAborted, GenerationRanks, LeftRun
from meshwright.resilience.local_node import LocalNode
from meshwright.resilience.membership import LeadershipLost, MinorityPartition, PeerMembership
from meshwright.resilience.messages import Busy, ComputeTimes, End, Fence, Message, Order, Ready, Reconfigure, Start
from meshwright.resilience.peer_storage import PeerStorage
from meshwright.resilience.peers import SILENCE_S, Hub, PeerConnection
from meshwright.resilience.planning import Planning
from meshwright.resilience.reconnect_backoff import STEADY_S, ReconnectBackoff
from meshwright.resilience.supervisor import Supervisor
from meshwright.train.outcome import TrainOutcome
from meshwright.train.session import TrainJob
from meshwright.transport.key import RunKey

_STAGGER_S = 0.3
"""Delay between the claims of one node and the next, so that the lowest live node leads."""
_YIELD_AGAIN_S = 60.0
"""A node that yielded to a majority doesn't yield again within this time: the majority had its chance."""
_CLAIM_DELAY_S = 3.0
"""Delay before a node that led may claim the next generation, so that others can."""
_BUSY_S = 60.0
_FIND_LEADER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class NodeEndpoint:
    """A node's number and address in a run over several nodes."""

    node: int
    """Its number, from 0."""
    nodes: int
    """How many nodes the run begins with."""
    address: str
    """Address by which other nodes reach it."""
    key: RunKey
    """The run's secret, by which nodes authenticate each other."""
    port: int = 0
    """Port of its listener; any free port for 0."""


class LeaderLost(GenerationAborted):
    """The leader was lost."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._noticed_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the loss was noticed."""
        return time.monotonic() - self._noticed_at


class Agent(Supervisor):
    """Runs a node's share of a job to its end, through failures of ranks and nodes.

    Args:
        job: of the run; its directory exists and is shared by all nodes.
        devices: of this node.
        endpoint: this node's number and address.
        planning: gives plans and jobs for other numbers of ranks.

    Raises:
        ConfigError: when this process may not open as many files as the ranks after a failure need.
    """

    def __init__(self, job: TrainJob, devices: Devices, endpoint: NodeEndpoint, planning: Planning) -> None:
        self._endpoint, self._session = endpoint, uuid.uuid4().hex[:12]
        super().__init__(job, devices, planning, endpoint.nodes)
        listener = listen_at(endpoint.address, endpoint.port)
        self._port = listener.getsockname()[1]
        self._hub, self._claims = Hub(listener, endpoint.key, self.event), Claims(job.run_dir)
        newest = self._claims.newest()
        # An earlier command's generations don't count: their recorded outcome isn't this run's.
        self._newest_at_start = -1 if newest is None else newest.generation
        self._order: Order | None = None
        self._backoff = ReconnectBackoff()
        self._lost_at: float | None = None
        self._yielded_at = -math.inf
        self._search_started = time.monotonic()
        self._previous_leader = -1
        self.leads = False
        """Whether this node led when the run ended."""

    def _make_node(self) -> LocalNode:
        endpoint = self._endpoint
        storage = PeerStorage(endpoint.node, endpoint.address, endpoint.key, self.event)
        return LocalNode(
            self._job, self._devices, self._planning.make_job, self.event, storage, endpoint.node, self._session
        )

    def _lead_run(self) -> TrainOutcome:
        # One that this node's last command left behind, when it was killed.
        self._local.departure.withdraw()
        while True:
            # Each turn lasts as long as one leader does; then the node searches for the next one.
            outcome = self._lead_or_follow()
            if outcome is not None:
                return outcome
            self._search_started = time.monotonic()

    def _close(self) -> None:
        self._hub.close()
        super()._close()
        # Not before the node that leads has seen this one go: it would count on its devices again.
        if self._local.interrupts.leaving_since is not None:
            self._local.departure.withdraw()

    def _lead_or_follow(self) -> TrainOutcome | None:
        """Leads or follows under one leader; returns the run's outcome, or None when another leader is needed."""
        leader = self._find_leader()
        # The run ended while this node was searching.
        if isinstance(leader, TrainOutcome):
            return leader
        if isinstance(leader, Claim):
            return self._lead(leader)
        connection, claim = leader
        # A leader that answers is of this run, even if it led before this process began.
        self._newest_at_start = min(self._newest_at_start, claim.generation - 1)
        try:
            return self._follow(connection, claim)
        except GenerationAborted as error:
            # A leader that drops every call would otherwise fill the events: one loss, one event.
            if self._backoff.record_loss(claim.session):
                self._lost_at = time.monotonic()
                self.event("leader_lost", node=self._endpoint.node, leader=claim.node, why=str(error))
            self._backoff.record_failed_call()
            return None
        finally:
            self._hub.drop(connection)

    def _find_leader(self) -> Claim | tuple[PeerConnection, Claim] | TrainOutcome:
        """Finds the leader.

        Returns:
            A connection to the leader with its claim; this node's claim when nobody led; or the run's outcome when it
            has ended.

        Raises:
            LaunchError: when no leader was found in time, or the user interrupts.
        """
        deadline = time.monotonic() + max(_FIND_LEADER_S, self._job.config.launch.group_s)
        refused_at: float | None = None
        while True:
            self._claims.renew_presence(self._endpoint.node)
            newest = self._claims.newest()
            age_s = self._claims.age_s()
            ended = self._claims.read_outcome(self._newest_at_start)
            if ended is not None:
                return ended
            # Call only a leader that renews its lease: a connection to a dead host would block for seconds.
            if newest is not None and age_s < FRESH_S and self._backoff.may_call(newest.session):
                try:
                    connection = self._hub.call(newest.host, newest.port)
                # A refusal means that the leader's process is gone though its lease isn't: no need to wait for that.
                except ConnectionRefusedError:
                    connection, refused_at = None, refused_at or time.monotonic()
                else:
                    refused_at = None
                if connection is not None:
                    return connection, newest
                if refused_at is None:
                    self._backoff.record_failed_call()
            # Of nodes that claim at once one creates the file; the others find its claim in the next round.
            if self._may_claim(newest, age_s > LEASE_S, refused_at):
                number = 0 if newest is None else newest.generation + 1
                claim = Claim(
                    generation=number, node=self._endpoint.node, session=self._session, host=self._endpoint.address,
                    port=self._port,
                )  # fmt: skip
                if self._claims.try_claim(claim):
                    return claim
            # The last of nodes that all were asked to leave leads next, since the run's state is with it alone.
            if self._local.interrupts.count and not self._local.departure.saves_alone:
                raise LaunchError("ended while looking for the node that leads")
            # Errors only for a node that never joined: one that had an order waits for its run to go on.
            if self._order is None and newest is None and time.monotonic() > deadline:
                raise LaunchError(f"no node leads this run after {_FIND_LEADER_S:g} s; start node 0 too")
            if self._order is None and self._hub.mismatch and time.monotonic() > deadline:
                raise LaunchError(
                    f"who leads, at {self._hub.mismatch}, doesn't have this node's key of the run; "
                    "give both the same --key-file, or neither where they share the run directory"
                )
            self._local.departure.end_in_time()
            # Also paces this loop, and serves nodes that connect to this one as the next leader.
            self._hub.pump(0.05)

    def _may_claim(self, newest: Claim | None, expired: bool, refused_at: float | None) -> bool:
        """Whether nobody leads, and the nodes that come before this one have had time to claim.

        Args:
            newest: the newest claim; None before the first, which node 0 makes.
            expired: whether its lease ran out.
            refused_at: time.monotonic() at which its host first refused a connection.
        """
        if newest is None:
            return self._endpoint.node == 0
        now = time.monotonic()
        delay_s = self._endpoint.node * _STAGGER_S
        if self._order is not None:
            members = [node for node in self._order.members if node != newest.node]
            node = self._endpoint.node
            delay_s = (members.index(node) if node in members else len(members)) * _STAGGER_S
        # This process led and gave way or was superseded: others go first.
        if newest.session == self._session:
            delay_s += _CLAIM_DELAY_S
        # An expired lease counts from the search's start, a refused connection from the refusal.
        if expired:
            return now - self._search_started >= delay_s
        return refused_at is not None and now - refused_at >= delay_s

    def _lead(self, claim: Claim) -> TrainOutcome | None:
        expected, limit_s = set(range(self._endpoint.nodes)), self._job.config.launch.group_s
        if self._order is not None:
            survivors = [node for node in self._order.members if node != self._previous_leader]
            # After a leader's loss, wait only as long as its followers need to notice the loss.
            expected, limit_s = set(survivors), SILENCE_S + 1.0
        # A node that yielded once and leads again keeps the lead: the majority didn't claim it.
        yields = time.monotonic() - self._yielded_at > _YIELD_AGAIN_S
        members = PeerMembership(self._local, self._hub, self._claims, claim, self.event, yields)
        controller = Controller(members, self._planning, self.event, self._order, self._lost_at)
        self.event("leading", node=self._endpoint.node, generation=claim.generation)
        if self._order is not None:
            self.event("node_lost", node=self._previous_leader, why="it led", generation=claim.generation - 1)
        self.leads = True
        try:
            outcome = controller.run(expected, limit_s)
        except LeadershipLost as error:
            self.leads, self._order, self._previous_leader = False, controller.order, -1
            if isinstance(error, MinorityPartition):
                self._yielded_at = time.monotonic()
            self.event("deposed", node=self._endpoint.node, generation=members.generation)
            # Followers reconnect to the new leader by its claim.
            self._hub.drop_all()
            return None
        except LeftRun:
            raise
        except MeshwrightError as error:
            self._hub.broadcast(End(outcome=None, error=str(error)))
            # The file serves nodes that aren't connected just now: they must not wait for this leader.
            self._claims.record_outcome(members.generation, None)
            raise
        self._hub.broadcast(End(outcome=outcome, error=""))
        self._claims.record_outcome(members.generation, outcome)
        return outcome

    def _follow(self, connection: PeerConnection, claim: Claim) -> TrainOutcome | None:
        """Executes the leader's orders until the run ends; returns its outcome.

        Raises:
            GenerationAborted: when the leader is lost, or another leads.
        """
        self._send_ready(connection)
        started = time.monotonic()
        while True:
            for message in self._receive(connection, claim, 0.1):
                self._backoff.mark_stable()
                if isinstance(message, End):
                    if message.outcome is None:
                        raise LaunchError(message.error)
                    return message.outcome
                if isinstance(message, Start):
                    self._run_generation(connection, claim, message.order)
            if time.monotonic() - started > STEADY_S:
                self._backoff.mark_stable()
            if self._order is not None:
                self._local.departure.end_without_ranks(self._order)
            self._local.departure.end_in_time()
            if self._local.interrupts.count and self._local.end.outcome is None:
                raise LaunchError("ended while waiting for the node that leads")

    def _run_generation(self, connection: PeerConnection, claim: Claim, order: Order) -> None:
        """Runs this node's ranks of a generation, and reports the end to the leader."""
        self._order, self._previous_leader = order, claim.node
        # This node has no rank in this generation: it reports at once, and stays a member.
        if self._endpoint.node not in order.nodes:
            self._local.skip(order.generation)
            return
        # Forking the ranks blocks this thread for seconds; the leader must not take that for a loss.
        connection.send(Busy(_BUSY_S))
        fence = self._claims.make_fence(order.generation)

        def watch(ranks: GenerationRanks) -> None:
            self._local.poll(ranks)
            if ranks.times is not None and (times := ranks.times.read_new()) is not None:
                connection.send(ComputeTimes(order.generation, times))
            for message in self._receive(connection, claim, 0.0):
                if isinstance(message, Fence) and message.generation == order.generation:
                    # Only this generation's fence counts: one of an earlier generation may still be on its way.
                    raise _Fenced("the leader ends this generation")
                if isinstance(message, Reconfigure) and not ranks.control.reconfiguration_requested:
                    ranks.control.request_reconfiguration()

        try:
            self._local.run(order, watch, wake=self._hub.fileno(), fence=fence)
        except _Fenced:
            pass
        except LeaderLost as error:
            # The ranks are gone by now: `LocalNode.run` killed them before this error left it.
            self.event("fenced", node=self._endpoint.node, generation=order.generation, seconds=error.age_s)
            raise
        self._send_ready(connection)

    def _send_ready(self, connection: PeerConnection) -> None:
        connection.send(Ready(self._local.report()))

    def _receive(self, connection: PeerConnection, claim: Claim, seconds: float) -> list[Message]:
        """Returns the leader's messages, waiting up to ``seconds`` for one.

        Raises:
            LeaderLost: when it is lost, or another leads.
        """
        received, _ = self._hub.pump(seconds)
        self._claims.renew_presence(self._endpoint.node)
        # Called for its effect: the lease's age counts from the last change that was read.
        self._claims.age_s()
        newest = self._claims.newest()
        # Checked before the connection: a deposed leader may still be connected and send orders.
        if newest is not None and newest.session != claim.session:
            raise LeaderLost(f"node {newest.node} leads")
        messages = [message for sender, message in received if sender is connection]
        # The last messages of a leader that ends arrive together with the end of its connection.
        if not connection.open and not messages:
            raise LeaderLost("it was silent" if connection.silent else "its connection ended")
        return messages


class _Fenced(GenerationAborted):
    """The leader ends a generation; the leader itself isn't lost."""
