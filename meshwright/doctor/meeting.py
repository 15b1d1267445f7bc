"""A meeting of the nodes: a store on node 0 through which every node gets what all others reported.

Whatever waits for the network does so in a process of its own with a limit. Reports are JSON.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshwright.doctor.time_limit import LimitedCall, Outcome, call_with_limit
from meshwright.errors import LaunchError
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import open_store

_MARGIN_S = 15.0
"""Time for the other nodes to fetch what node 0 has gathered."""
_SERVE_S = 86400.0
_CONNECT_S = 3.0
_POLL_S = 0.02
_PREFIX = "doctor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """This node's place in the meeting."""

    host: str
    """Address of node 0."""
    port: int
    """Port of the store."""
    node: int
    """Number of this node."""
    nodes: int
    """Number of nodes."""
    interface: str = ""
    """Network interface by which the other nodes reach this one; empty for the library's own choice."""

    def context(self, run_id: str, rank: int, world: int, device: str = "cpu", local_rank: int = 0) -> RankContext:
        """Returns the context of a process that is a client of the store."""
        return RankContext(
            rank=rank,
            world=world,
            local_rank=local_rank,
            local_world=world if self.nodes == 1 else 1,
            device=device,
            host=self.host,
            port=self.port,
            # The store is another process's: every rank is a client.
            agent_store=True,
            run_id=f"{_PREFIX}/{run_id}",
            nodes=self.nodes,
            node=self.node if self.nodes > 1 else None,
            interface=self.interface,
        )

    def gather(self, stage: str, values: Mapping[str, Any], members: list[int], limit_s: float) -> Outcome:
        """Sends this node's values to node 0, and returns what it has gathered: the same on every node.

        Args:
            stage: name of the exchange.
            values: of this node, as JSON.
            members: numbers of the nodes that take part.
            limit_s: for which node 0 waits for the others.

        Returns:
            The outcome: values by node number (a text, as JSON has it), without those that didn't arrive in time.
        """
        return call_with_limit(lambda: self._gather(stage, values, members, limit_s), limit_s + 2 * _MARGIN_S)

    def _gather(self, stage: str, values: Mapping[str, Any], members: list[int], limit_s: float) -> Any:
        deadline_s = time.monotonic() + limit_s
        if self.node:
            self._await_listener(deadline_s)
        store = open_store(self.context("store", self.node, self.nodes), limit_s)
        store.set(f"{stage}/{self.node}", json.dumps(values))
        if self.node:
            return json.loads(_await_key(store, f"{stage}/all", deadline_s + _MARGIN_S, "node 0 gave no answer"))
        received: dict[str, Any] = {}
        while len(received) < len(members) and time.monotonic() < deadline_s:
            for member in members:
                if str(member) not in received and store.check([f"{stage}/{member}"]):
                    received[str(member)] = json.loads(store.get(f"{stage}/{member}"))
            time.sleep(_POLL_S)
        store.set(f"{stage}/all", json.dumps(received))
        return received

    def _await_listener(self, deadline_s: float) -> None:
        """Connects to node 0 until it listens, so that a closed or filtered port has a sentence of its own."""
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=_CONNECT_S).close()
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise LaunchError(_unreachable(self.host, self.port, error)) from None
            time.sleep(10 * _POLL_S)


def _await_key(store: dist.Store, key: str, deadline_s: float, reason: str) -> bytes:
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            raise LaunchError(reason)
        time.sleep(_POLL_S)
    return bytes(store.get(key))


def _unreachable(host: str, port: int, error: OSError) -> str:
    target = f"{host}:{port}"
    if isinstance(error, TimeoutError):
        return f"{target} doesn't answer at all, as behind a firewall: open the port between the nodes, or give another"
    if isinstance(error, ConnectionRefusedError):
        return f"{target} refuses the connection: nothing listens there; start node 0, and check the address"
    return f"{target} can't be reached: {error.strerror or error}; check the address and the route"


def serve_store(listener: socket.socket) -> LimitedCall:
    """Serves the store in a process of its own, until it is closed; closes this process's listener."""
    host, port = listener.getsockname()

    def serve() -> None:
        store = dist.TCPStore(
            host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        while True:
            time.sleep(_SERVE_S)
            store.num_keys()

    try:
        return LimitedCall(serve, _SERVE_S)
    finally:
        listener.close()
