"""Times of collectives: a hierarchical alpha-beta model over the links that a group crosses.

A group is ``inside`` members on each of ``nodes`` nodes. Bytes, inside, nodes and sharing are numbers, or float arrays
that broadcast; sizes are bytes of the full tensor (S), not of a rank's shard. A group of one costs 0 s.

Sources: ring and tree, Thakur et al., Optimization of Collective Communication Operations in MPICH (2005); the hops of
a ring over nodes and the three protocols, NCCL's tuning (src/graph/tuning.cc); sums in the switch, NCCL's NVLS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.link import Link, Protocol
from meshwright.errors import ClusterError, nearest

TREE_SHARE = 0.92
"""Bandwidth of a tree against a ring. Source: NCCL src/graph/tuning.cc."""
NOTHING = Link(name="nothing", bytes_per_s=1.0, latency_s=0.0)
"""Placeholder network of a cluster of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The two link levels that a group may cross: the links of a fast domain, and the network between domains."""

    inside: Link
    """Link between the devices of one domain."""
    outside: Link | None
    """One network card; None for a single domain."""
    devices: int
    """Devices of a domain."""
    cards: float
    """Network cards of a domain."""

    def network(self, inside: Values, sharing: Values) -> Values:
        """Returns bytes per second that one group can send out of a domain, in one direction.

        A member reaches its own card, or its share of several; ``sharing`` groups use the cards at once.

        Args:
            inside: members of the group in the domain.
            sharing: groups that share the domain's cards.
        """
        if self.outside is None:
            return np.inf
        # With more cards than devices each member drives several.
        member_rate = self.outside.rate * np.maximum(1.0, self.cards / self.devices)
        return np.minimum(inside * member_rate, self.outside.rate * self.cards / sharing)

    def ways(self) -> list[tuple[Protocol, Protocol]]:
        """Returns pairs of (inside, outside) protocols that a library may combine."""
        outside_protocols = (self.outside or NOTHING).protocols
        # Libraries switch both levels together (NCCL: LL, LL128, Simple), so protocols pair up in order.
        if len(outside_protocols) == len(self.inside.protocols):
            return list(zip(self.inside.protocols, outside_protocols))
        return [
            (inside_protocol, outside_protocol)
            for inside_protocol in self.inside.protocols
            for outside_protocol in outside_protocols
        ]


@overload
def span(rank_stride: int, degree: int, devices: int, world: int | None = None) -> tuple[int, int, int]: ...
@overload
def span(
    rank_stride: Values, degree: Values, devices: int, world: Values | None = None
) -> tuple[Values, Values, Values]: ...
def span(
    rank_stride: Values, degree: Values, devices: int, world: Values | None = None
) -> tuple[Values, Values, Values]:
    """Derives from the mesh's order which links a group along an axis crosses, for numbers or arrays.

    Ranks are row-major, so members of a group are ``rank_stride`` ranks apart and fill domains from the first.

    Args:
        rank_stride: product of the degrees of the faster axes (those after this one in the mesh).
        degree: of this axis.
        devices: ranks of a node, or of a fast domain of several nodes.
        world: number of ranks; a world within one domain crosses no network.

    Returns:
        (members of the group in a domain, domains, groups along this axis that share a domain's cards). Where groups
        and domains don't divide, those of a group that a boundary splits.
    """
    rank_stride, degree = np.asarray(rank_stride, dtype=float), np.asarray(degree, dtype=float)
    # A world at least as large as the block of groups.
    ranks = np.maximum(np.asarray(np.inf if world is None else world, dtype=float), rank_stride * degree)
    block = rank_stride * degree
    # A block of whole groups lies inside a domain if it divides it, or if all ranks fit into one.
    fits_domain = (block <= devices) & ((np.mod(devices, block) == 0) | (ranks <= devices))
    # Members that fall into one domain at this stride.
    inside = np.minimum(degree, np.maximum(1, devices // rank_stride))
    # Without divisibility, a group small enough for one domain may straddle two: half on each side.
    inside = np.where(fits_domain, degree, np.where(inside < degree, inside, np.ceil(degree / 2)))
    # A straddling group has half of its members in each of two domains.
    nodes = np.ceil(degree / inside)
    # Every rank of a domain belongs to one group along the axis: ranks / members groups use the cards.
    sharing = np.where(degree > 1, np.maximum(1, np.minimum(devices, ranks) // inside), 1)
    if sharing.ndim == 0:
        return int(inside), int(nodes), int(sharing)
    return inside, nodes, sharing


def _fastest_protocol(fabric: Fabric, nodes: Values, seconds_by: Callable[[Protocol, Protocol], Values]) -> Values:
    """Returns the least seconds over all protocol pairs, at least the latency of the level crossed."""
    best_s: Values = np.inf
    for near, far in fabric.ways():
        best_s = np.minimum(best_s, seconds_by(near, far))
    # No message is faster than the latency of the slowest level that it crosses.
    floor = np.where(nodes > 1, (fabric.outside or NOTHING).latency_s, fabric.inside.latency_s)
    return np.maximum(best_s, floor)


def _zero_for_single(seconds: Values, ranks: Values) -> Values:
    """Sets groups of one rank to 0; returns a float for scalars."""
    seconds = np.where(ranks > 1, seconds, 0.0)
    return float(seconds) if seconds.ndim == 0 else seconds


def _start_s(near: Protocol, far: Protocol, nodes: Values) -> Values:
    return np.where(nodes > 1, np.maximum(near.start_s, far.start_s), near.start_s)


def _ring_rate(fabric: Fabric, near: Protocol, far: Protocol, inside: Values, nodes: Values, sharing: Values) -> Values:
    """Returns bytes per second of a ring through all members: the rate of its slowest link."""
    # Bandwidth among the members alone, at this protocol's share of it.
    inside_rate = fabric.inside.rate_among(inside) * near.share
    local_rate = np.where(inside > 1, inside_rate, np.inf)
    return np.where(nodes > 1, np.minimum(local_rate, fabric.network(inside, sharing) * far.share), inside_rate)


def _ring_s(fabric: Fabric, size: Values, inside: Values, nodes: Values, sharing: Values, rounds: int) -> Values:
    """Returns seconds of ``rounds`` passes of a ring: 1 for all-gather or reduce-scatter, 2 for all-reduce."""
    ranks = inside * nodes

    def seconds_by(near: Protocol, far: Protocol) -> Values:
        # A ring over nodes has one network hop a node; all its other hops are inside.
        hops = (ranks - nodes) * near.hop_s + np.where(nodes > 1, nodes, 0) * far.hop_s
        rate = _ring_rate(fabric, near, far, inside, nodes, sharing)
        return _start_s(near, far, nodes) + rounds * (hops + (ranks - 1) / ranks * size / rate)

    return _fastest_protocol(fabric, nodes, seconds_by)


def all_reduce_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of an all-reduce of S bytes: the fastest of ring, tree and reduction in the switch.

    Ring: 2(n-1)/n S/B + 2(n-1) hops. Tree: 2 S/B + 2 log2(nodes) hops. In the switch: S/B + 2 hops.
    """
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    ring_s = _ring_s(fabric, size, inside, nodes, sharing, 2)

    def tree(near: Protocol, far: Protocol) -> Values:
        # A tree between nodes, a chain inside each of them.
        hops = (inside - 1) * near.hop_s + np.log2(np.maximum(nodes, 1)) * far.hop_s
        # A tree sends S up and S down, at a slightly lower rate than a ring.
        rate = TREE_SHARE * _ring_rate(fabric, near, far, inside, nodes, sharing)
        return _start_s(near, far, nodes) + 2 * (hops + size / rate)

    seconds = np.minimum(ring_s, np.where(nodes > 1, _fastest_protocol(fabric, nodes, tree), np.inf))
    if fabric.inside.reduce_share:
        switch_protocol = fabric.inside.protocols[-1]
        rate = fabric.inside.bytes_per_s * fabric.inside.reduce_share
        # NVLS or SHARP: the switch reduces, so each rank sends S bytes once.
        switch_s = switch_protocol.start_s + 2 * switch_protocol.hop_s + size / rate
        seconds = np.minimum(seconds, np.where((nodes == 1) & (inside > 1), switch_s, np.inf))
    return _zero_for_single(seconds, inside * nodes)


def all_gather_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of an all-gather to S bytes, of which each member holds 1/n: (n-1)/n S/B + (n-1) hops."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    return _zero_for_single(_ring_s(fabric, size, inside, nodes, sharing, 1), inside * nodes)


def reduce_scatter_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of a reduce-scatter of S bytes, after which each member holds 1/n: those of an all-gather."""
    return all_gather_s(size, inside, nodes, fabric, sharing)


def all_to_all_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of an all-to-all, in which every member sends 1/n of its S bytes to each member.

    Bytes that leave the domain also cross the inside links, on their way to a card; messages start one after another.
    """
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))
    ranks = inside * nodes

    def seconds_by(near: Protocol, far: Protocol) -> Values:
        local_s = np.where(
            inside > 1, size * (ranks - 1) / ranks / (fabric.inside.rate_among(inside) * near.share), 0.0
        )
        network_s = size * inside * (ranks - inside) / ranks / (fabric.network(inside, sharing) * far.share)
        # One message to each other member, one after another.
        messages = (inside - 1) * near.hop_s + (ranks - inside) * far.hop_s
        return _start_s(near, far, nodes) + np.maximum(local_s, network_s) + messages

    return _zero_for_single(_fastest_protocol(fabric, nodes, seconds_by), ranks)


def send_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of a send of S bytes to the next rank; over the network when the group has nodes > 1."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))

    def seconds_by(near: Protocol, far: Protocol) -> Values:
        local_s = size / (fabric.inside.rate_among(2) * near.share) + near.hop_s
        network_s = size / (fabric.network(1.0, sharing) * far.share) + far.hop_s
        return _start_s(near, far, nodes) + np.where(nodes > 1, network_s, local_s)

    return _zero_for_single(_fastest_protocol(fabric, nodes, seconds_by), inside * nodes)


def broadcast_s(size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of a broadcast of S bytes: S/B + log2(inside) + log2(nodes) hops."""
    size, inside, nodes, sharing = (np.asarray(value, dtype=float) for value in (size, inside, nodes, sharing))

    def seconds_by(near: Protocol, far: Protocol) -> Values:
        # A binary tree inside, and one between nodes.
        hops = np.ceil(np.log2(inside)) * near.hop_s + np.ceil(np.log2(nodes)) * far.hop_s
        return _start_s(near, far, nodes) + hops + size / _ring_rate(fabric, near, far, inside, nodes, sharing)

    return _zero_for_single(_fastest_protocol(fabric, nodes, seconds_by), inside * nodes)


COLLECTIVES: Mapping[str, Callable[..., Values]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "exchange": all_to_all_s,
    "send": send_s,
    "broadcast": broadcast_s,
}
"""Every priced collective, by its name in the runtime's traffic log."""


@overload
def collective_s(kind: str, size: float, inside: float, nodes: float, fabric: Fabric, sharing: float = 1) -> float: ...
@overload
def collective_s(
    kind: str, size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1
) -> Values: ...
def collective_s(kind: str, size: Values, inside: Values, nodes: Values, fabric: Fabric, sharing: Values = 1) -> Values:
    """Returns seconds of the collective ``kind``; see `COLLECTIVES`.

    Raises:
        ClusterError: for an unknown operation, or nodes without a network between them.
    """
    if kind not in COLLECTIVES:
        raise ClusterError(f"unknown collective '{kind}'{nearest(kind, COLLECTIVES)}")
    if fabric.outside is None and np.any(np.asarray(nodes) > 1):
        raise ClusterError("the group spans several nodes, but the cluster has no network between nodes")
    return COLLECTIVES[kind](size, inside, nodes, fabric, sharing)
