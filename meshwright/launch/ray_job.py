"""A run on the nodes of a Ray cluster: asks for them, starts their supervisors, asks again for those that are lost."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from meshwright.errors import ClusterError, LaunchError
from meshwright.launch.config import RayConfig
from meshwright.launch.ray_cluster import ClusterNode, NodeCluster, NodeLost, format_resources, missing_nodes
from meshwright.launch.ray_node import SharedFile
from meshwright.launch.signals import handle_interrupts

PREEMPTED = 143
_POLL_S = 0.2
_FREE_S = 10.0
"""Nodes that are free are reserved within this time."""
_MOST_PAUSE_S = 4.0
_RETRIES = 5
"""Supervisors of a node that end by themselves while the run goes on, one after the other."""
_STEADY_S = 600.0
"""A supervisor that lived for so long has its retries back."""
_OTHERS_END_S = 20.0
"""After a run's end its supervisors end within this time of each other, but for the one that led."""
_ALONE_S = 600.0
"""Limit of a wait for nodes while none trains."""
_LAST_S = 60.0
"""What a supervisor needs beyond ``launch.stop_s`` to end."""


class EndRequest(enum.IntEnum):
    """How somebody asked the run to end."""

    NONE = 0
    CHECKPOINT = 1
    NOW = 2


class RunRecords(Protocol):
    """What the driver reads and writes of a run."""

    def is_finished(self) -> bool:
        """Whether the run has reached its last step."""

    def is_over(self) -> bool:
        """Whether the nodes have recorded how the run ended."""

    def end_request(self) -> EndRequest:
        """Returns how another command asked the run to end."""

    def report(self, state: str, nodes: Sequence[str], reason: str) -> None:
        """Records how the nodes stand, and passes on what their supervisors printed."""


@dataclass(kw_only=True)
class _Node:
    """One node of the run, over all actors that stood for it."""

    number: int
    actor: ClusterNode | None = None
    address: str = ""
    is_running: bool = False
    status: int | None = None
    """Exit status of its supervisor that ended by itself; None before."""
    changed_at: float = field(default_factory=time.monotonic)
    """When its supervisor was started, ended or lost."""
    retries: int = 0
    ask_at: float = 0.0


class RayJob:
    """Runs a supervisor on each of some nodes to the run's end.

    Args:
        cluster: gives the nodes.
        argv: words of the command for each node, without those that number nodes.
        config: what is asked for.
        environment: variables of the supervisors.
        shared: by which nodes check that they share the run directory.
        output: returns the file for what a node's supervisor prints.
        records: of the run.
        start_s: within which actors have started.
        stop_s: within which ranks have written a checkpoint and ended.
        say: takes a line for people.
    """

    def __init__(
        self,
        cluster: NodeCluster,
        argv: Sequence[str],
        config: RayConfig,
        environment: Mapping[str, str],
        shared: SharedFile,
        output: Callable[[int], str],
        records: RunRecords,
        start_s: float,
        stop_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._argv, self._config, self._shared = cluster, tuple(argv), config, shared
        self._output, self._records, self._say = output, records, say
        self._start_s, self._stop_s = start_s, stop_s
        self._environment = dict(environment)
        self._nodes = [_Node(number=number) for number in range(config.nodes)]
        self._signals: list[int] = []
        self._end_at: float | None = None
        """When supervisors that were asked to end are killed; None as long as the run goes on."""
        self._alone_since = time.monotonic()

    def check_cluster(self) -> None:
        """Refuses what the cluster can't hold; starts nothing.

        Raises:
            ClusterError: when it has fewer nodes of this size, and none are to be waited for.
        """
        lacking = missing_nodes(self._cluster.node_resources(), self._config.bundle, self._config.nodes)
        if lacking and not self._config.timeout:
            raise ClusterError(f"{lacking}; where an autoscaler brings more, wait for it with ray.timeout = 600")

    def run(self) -> int:
        """Runs to the run's end, or to a request's; returns the exit status.

        Raises:
            ClusterError: when the cluster doesn't have the nodes.
            LaunchError: when a supervisor can't be started, or all nodes stay lost.
            KeyboardInterrupt: at the second signal.
        """
        # After the connection: Ray puts handlers of its own in place there.
        with handle_interrupts(self._record_signal):
            if self._reserve() and self._start_all():
                self._watch_nodes()
        if self._records.is_finished():
            return 0
        return PREEMPTED if signal.SIGTERM in self._signals else 1

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            raise KeyboardInterrupt

    @property
    def _request(self) -> EndRequest:
        return max(self._records.end_request(), EndRequest.CHECKPOINT if self._signals else EndRequest.NONE)

    def _reserve(self) -> bool:
        """Waits for the nodes; returns False when the run is to end instead."""
        bundle, count = self._config.bundle, self._config.nodes
        self._cluster.reserve(bundle, count)
        deadline = time.monotonic() + max(self._config.timeout, _FREE_S)
        wanted = f"{count} nodes with {format_resources(bundle)} each"
        while not self._cluster.is_reserved():
            self._records.report("PENDING", (), f"waits for {wanted}")
            if self._request:
                return False
            if time.monotonic() > deadline:
                lacking = missing_nodes(self._cluster.node_resources(), bundle, count)
                used = f"the cluster has {wanted}, but other jobs use them"
                raise ClusterError(f"{lacking or used}; wait for them with a longer ray.timeout")
            time.sleep(_POLL_S)
        return True

    def _start_all(self) -> bool:
        """Starts the actors, and the supervisors once every node has answered."""
        deadline, reason = time.monotonic() + self._start_s + _FREE_S, ""
        ready: list[_Node] = []
        while len(ready) < len(self._nodes):
            self._records.report("PENDING", [node.address for node in ready], "starts its actors")
            if self._request:
                return False
            if time.monotonic() > deadline:
                raise LaunchError(f"{len(ready)} of {len(self._nodes)} nodes started{reason and ': '}{reason}")
            time.sleep(_POLL_S)
            ready = []
            for node in self._nodes:
                try:
                    ready += [node] if self._ask(node) else []
                except NodeLost as error:
                    reason = str(error)
                    self._lose(node)
        for node in self._nodes:
            self._start(node)
        return True

    def _ask(self, node: _Node) -> bool:
        """Asks for the actor of a node that has none; returns whether it is ready."""
        if node.actor is None and time.monotonic() >= node.ask_at:
            node.actor = self._cluster.start_node(node.number, self._shared, self._output(node.number))
        address = node.actor.address() if node.actor is not None else None
        node.address = address or node.address
        return address is not None

    def _start(self, node: _Node) -> None:
        assert node.actor is not None
        numbering: tuple[str, ...] = ()
        if len(self._nodes) > 1:
            # Node 0 listens at its own address; the others find theirs on the route to it.
            meet = self._nodes[0].address
            numbering = ("--nodes", str(len(self._nodes)), "--node", str(node.number), "--meet", meet)
        node.actor.run((*self._argv, *numbering), self._environment, self._shared.workdir)
        node.is_running, node.status, node.changed_at = True, None, time.monotonic()

    def _lose(self, node: _Node) -> None:
        """Kills what may be left of a node's actor, and plans to ask for another."""
        if node.actor is not None:
            node.actor.kill()
        node.retries = 0 if time.monotonic() - node.changed_at > _STEADY_S else node.retries + 1
        node.ask_at = time.monotonic() + min(2.0**node.retries / 4, _MOST_PAUSE_S)
        node.actor, node.is_running, node.changed_at = None, False, time.monotonic()

    def _watch_nodes(self) -> None:
        """Waits until no supervisor lives and none is to live again."""
        while True:
            for node in self._nodes:
                self._look_after(node)
            running = [node for node in self._nodes if node.is_running]
            self._report(running)
            if self._follow_request(running):
                return
            has_ended = self._end_at is not None or all(node.status is not None for node in self._nodes)
            if not running and (has_ended or self._records.is_over()):
                return
            self._check_alone(bool(running))
            time.sleep(_POLL_S)

    def _look_after(self, node: _Node) -> None:
        """Notices a node's end or loss, and asks for it again."""
        try:
            if node.is_running:
                assert node.actor is not None
                node.status = node.actor.status()
                if node.status is not None:
                    node.is_running, node.changed_at = False, time.monotonic()
            elif self._end_at is None and self._is_wanted(node) and self._ask(node):
                self._say(f"node {node.number} is back, at {node.address}")
                self._start(node)
        except NodeLost as error:
            if node.is_running and self._end_at is None:
                self._say(f"node {node.number} ({node.address}) is lost, and asked for again: {error}")
            self._lose(node)

    def _is_wanted(self, node: _Node) -> bool:
        """Whether a node without a supervisor is to have one."""
        if self._records.is_over():
            return False
        if node.status is None:
            return True
        # It was refused, say, by a limit of its host, and the others go on; their ends come together.
        if node.status == 0 or node.retries >= _RETRIES or time.monotonic() - node.changed_at < _OTHERS_END_S:
            return False
        if not any(other.is_running for other in self._nodes):
            return False
        self._say(f"the supervisor of node {node.number} ended with status {node.status}; it is started again")
        self._lose(node)
        node.status = None
        return True

    def _report(self, running: Sequence[_Node]) -> None:
        lost = [str(node.number) for node in self._nodes if not node.is_running and node.status is None]
        ends = "ends with a checkpoint" if self._end_at is not None else ""
        reason = ends or (f"node {', '.join(lost)} lost, asked for again" if lost else "")
        self._records.report("RUNNING", [node.address for node in running], reason)

    def _follow_request(self, running: Sequence[_Node]) -> bool:
        """Passes a request on to the supervisors, once; returns whether to end at once."""
        request = self._request
        if request == EndRequest.NONE:
            return False
        if self._end_at is None:
            self._end_at = time.monotonic() + self._stop_s + _LAST_S
            # The first that ends in order ends the run on all nodes.
            for node in running:
                assert node.actor is not None
                node.actor.terminate()
        return request == EndRequest.NOW or time.monotonic() > self._end_at

    def _check_alone(self, trains: bool) -> None:
        """Raises `LaunchError` when no node has trained for a long time."""
        limit_s = max(_ALONE_S, self._config.timeout)
        if trains:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > limit_s:
            raise LaunchError(f"all nodes are lost, and the cluster has given none for {limit_s:g} s")
