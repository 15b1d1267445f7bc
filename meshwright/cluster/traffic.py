"""What a collective takes: hierarchical alpha-beta times over the links that its group really crosses.

A group is ``inside`` members on each of ``nodes`` nodes. All functions take scalars or numpy arrays for bytes, inside,
nodes and sharing, and broadcast; sizes are the whole tensor's bytes (S), not a rank's part. A group of one takes 0 s.

Sources: ring and tree, Thakur et al., Optimization of Collective Communication Operations in MPICH (2005); the hops of
a ring over nodes and the three protocols, NCCL's tuning (src/graph/tuning.cc); sums in the switch, NCCL's NVLS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cluster.link import Link, Protocol
from meshwright.errors import ClusterError, nearest

TREE_SHARE = 0.92
"""Bandwidth of a tree against a ring. Source: NCCL src/graph/tuning.cc."""
NOTHING = Link(name="nothing", bytes_per_s=1.0, latency_s=0.0)
"""Stands where a cluster has one node and no network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The two levels of wire that a group may cross: the links of a fast domain, and the network between domains."""

    inside: Link
    """Between the devices of one domain."""
    outside: Link | None
    """A network card; None where there is one domain alone."""
    devices: int
    """Devices of a domain."""
    cards: float
    """Network cards of a domain."""

    def network(self, inside: Any, sharing: Any) -> Any:
        """Returns bytes per second that one group may send out of a domain, one direction.

        A member reaches its own card, or its part of several; the cards are shared by ``sharing`` groups at once.
        """
        if self.outside is None:
            return np.inf
        own = self.outside.rate * np.maximum(1.0, self.cards / self.devices)
        return np.minimum(inside * own, self.outside.rate * self.cards / sharing)

    def ways(self) -> list[tuple[Protocol, Protocol]]:
        """Returns the protocols of both levels, paired."""
        out = (self.outside or NOTHING).protocols
        if len(out) == len(self.inside.protocols):
            return list(zip(self.inside.protocols, out))
        return [(near, far) for near in self.inside.protocols for far in out]


def span(before: Any, degree: Any, devices: int, world: Any = None) -> tuple[Any, Any, Any]:
    """Derives what a group along a mesh axis crosses from the mesh's order; takes numbers or arrays.

    Ranks lie row-major, so the members of a group stand ``before`` ranks apart and fill domains from the first.

    Args:
        before: product of the degrees of the faster axes (those after this one in the mesh).
        degree: of this axis.
        devices: ranks of a node, or of a fast domain of several nodes.
        world: ranks in all; a world within one domain crosses nothing.

    Returns:
        Members of the group in a domain; domains; groups along this axis that share a domain's cards at once. Where
        groups and domains don't divide, a group that a boundary cuts.
    """
    before, degree = np.asarray(before, dtype=float), np.asarray(degree, dtype=float)
    ranks = np.maximum(np.asarray(np.inf if world is None else world, dtype=float), before * degree)
    block = before * degree
    whole = (block <= devices) & ((np.mod(devices, block) == 0) | (ranks <= devices))
    inside = np.minimum(degree, np.maximum(1, devices // before))
    # A group that would fit into one domain is cut by the boundary between two.
    inside = np.where(whole, degree, np.where(inside < degree, inside, np.ceil(degree / 2)))
    nodes = np.ceil(degree / inside)
    sharing = np.where(degree > 1, np.maximum(1, np.minimum(devices, ranks) // inside), 1)
    if sharing.ndim == 0:
        return int(inside), int(nodes), int(sharing)
    return inside, nodes, sharing


def _fastest(fabric: Fabric, nodes: Any, price: Callable[[Protocol, Protocol], Any]) -> Any:
    found: Any = np.inf
    for near, far in fabric.ways():
        found = np.minimum(found, price(near, far))
    floor = np.where(nodes > 1, (fabric.outside or NOTHING).latency_s, fabric.inside.latency_s)
    return np.maximum(found, floor)


def _result(seconds: Any, ranks: Any) -> Any:
    """Returns 0 for groups of one; a float when everything was scalar."""
    seconds = np.where(ranks > 1, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds


def _start(near: Protocol, far: Protocol, nodes: Any) -> Any:
    return np.where(nodes > 1, np.maximum(near.start_s, far.start_s), near.start_s)


def _rate(fabric: Fabric, near: Protocol, far: Protocol, inside: Any, nodes: Any, sharing: Any) -> Any:
    """Returns bytes per second of a ring through all members: the slowest link that it passes."""
    among = fabric.inside.rate_among(inside) * near.share
    local = np.where(inside > 1, among, np.inf)
    return np.where(nodes > 1, np.minimum(local, fabric.network(inside, sharing) * far.share), among)


def _ring(fabric: Fabric, size: Any, inside: Any, nodes: Any, sharing: Any, rounds: int) -> Any:
    ranks = inside * nodes

    def price(near: Protocol, far: Protocol) -> Any:
        hops = (ranks - nodes) * near.hop_s + np.where(nodes > 1, nodes, 0) * far.hop_s
        rate = _rate(fabric, near, far, inside, nodes, sharing)
        return _start(near, far, nodes) + rounds * (hops + (ranks - 1) / ranks * size / rate)

    return _fastest(fabric, nodes, price)


def all_reduce_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds of a sum of S bytes that every member ends up with: ring, tree or sum in the switch.

    Ring 2(n-1)/n S/B + 2(n-1) hops; tree 2 S/B + 2 log2(nodes) hops; in the switch S/B and two hops.
    """
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    ring = _ring(fabric, size, inside, nodes, sharing, 2)

    def tree(near: Protocol, far: Protocol) -> Any:
        hops = (inside - 1) * near.hop_s + np.log2(np.maximum(nodes, 1)) * far.hop_s
        rate = TREE_SHARE * _rate(fabric, near, far, inside, nodes, sharing)
        return _start(near, far, nodes) + 2 * (hops + size / rate)

    found = np.minimum(ring, np.where(nodes > 1, _fastest(fabric, nodes, tree), np.inf))
    if fabric.inside.reduce_share:
        way = fabric.inside.protocols[-1]
        rate = fabric.inside.bytes_per_s * fabric.inside.reduce_share
        switch = way.start_s + 2 * way.hop_s + size / rate
        found = np.minimum(found, np.where((nodes == 1) & (inside > 1), switch, np.inf))
    return _result(found, inside * nodes)


def all_gather_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds until every member has all S bytes, of which it held 1/n: (n-1)/n S/B + (n-1) hops."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    return _result(_ring(fabric, size, inside, nodes, sharing, 1), inside * nodes)


def reduce_scatter_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds until every member has its 1/n of the sum of S bytes: an all-gather backwards."""
    return all_gather_s(size, inside, nodes, fabric, sharing)


def all_to_all_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds until every member has sent 1/n of its S bytes to each member.

    What leaves the domain passes the links inside as well, on its way to a card; each message starts after the other.
    """
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    ranks = inside * nodes

    def price(near: Protocol, far: Protocol) -> Any:
        local = np.where(inside > 1, size * (ranks - 1) / ranks / (fabric.inside.rate_among(inside) * near.share), 0.0)
        away = size * inside * (ranks - inside) / ranks / (fabric.network(inside, sharing) * far.share)
        messages = (inside - 1) * near.hop_s + (ranks - inside) * far.hop_s
        return _start(near, far, nodes) + np.maximum(local, away) + messages

    return _result(_fastest(fabric, nodes, price), ranks)


def send_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds of S bytes from one rank to its neighbour; over the network when the group has nodes > 1."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))

    def price(near: Protocol, far: Protocol) -> Any:
        local = size / (fabric.inside.rate_among(2) * near.share) + near.hop_s
        away = size / (fabric.network(1.0, sharing) * far.share) + far.hop_s
        return _start(near, far, nodes) + np.where(nodes > 1, away, local)

    return _result(_fastest(fabric, nodes, price), inside * nodes)


def broadcast_s(size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds until S bytes of one member are with all: S/B and a logarithm of hops."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))

    def price(near: Protocol, far: Protocol) -> Any:
        hops = np.ceil(np.log2(inside)) * near.hop_s + np.ceil(np.log2(nodes)) * far.hop_s
        return _start(near, far, nodes) + hops + size / _rate(fabric, near, far, inside, nodes, sharing)

    return _result(_fastest(fabric, nodes, price), inside * nodes)


COLLECTIVES: Mapping[str, Callable[..., Any]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "exchange": all_to_all_s,
    "send": send_s,
    "broadcast": broadcast_s,
}
"""Every operation that is priced, by the name that the runtime's account of traffic gives it."""


def collective_s(kind: str, size: Any, inside: Any, nodes: Any, fabric: Fabric, sharing: Any = 1) -> Any:
    """Returns seconds of the operation ``kind``; see `COLLECTIVES`.

    Raises:
        ClusterError: for an unknown operation, or nodes without a network between them.
    """
    if kind not in COLLECTIVES:
        raise ClusterError(f"unknown collective '{kind}'{nearest(kind, COLLECTIVES)}")
    if fabric.outside is None and np.any(np.asarray(nodes) > 1):
        raise ClusterError("the group spans several nodes, but the cluster has no network between nodes")
    return COLLECTIVES[kind](size, inside, nodes, fabric, sharing)
