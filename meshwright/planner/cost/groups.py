"""Times of collectives: which links the groups of each axis cross on a cluster, and the seconds over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.array_types import Index, Values
from meshwright.cluster import traffic
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.device import Device
from meshwright.cluster.host import HostShare
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.planner.cost.rounding import CORE_BYTE, RoundingTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware of a layout: one kind of device, and the links between devices."""

    device: Device
    """The kind of device."""
    fabric: traffic.Fabric
    """Links inside nodes and between them."""
    host: HostShare | None = None
    """A rank's share of host memory; None where nothing can be offloaded."""
    network_share: float = 1.0
    """Share of the network's rate that collectives of many nodes reach under load."""
    node_devices: int = 8
    """Devices of a node, which are late together."""
    rounding: RoundingTimes | None = None
    """What rounding takes on it, as calibration measured it; None where nothing did."""
    core_byte_s: float = 0.0
    """Seconds of a rank's own core for a byte that it sends over the network, as it also sums and copies what arrives;
    0 where other units do this."""

    @classmethod
    def of(cls, cluster: Cluster) -> Machine:
        """Returns the machine of a cluster; of unequal devices the one with the least memory, and the slowest links."""
        calibration = cluster.calibration
        return cls(
            device=cluster.device,
            fabric=cluster.fabric(),
            host=cluster.host,
            node_devices=cluster.node_devices,
            rounding=None if calibration is None else RoundingTimes.of(cluster.device, calibration),
            core_byte_s=0.0 if calibration is None else calibration.host_s(CORE_BYTE),
        )


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Groups along one axis of N layouts: members on a node, nodes, groups that share a node's cards; (N,) each."""

    inside: Array
    nodes: Array
    sharing: Array

    @property
    def ranks(self) -> Array:
        """Members of a group."""
        return self.inside * self.nodes

    def split_runs(self, run: Array) -> tuple[GroupSpan, GroupSpan]:
        """Returns the span of runs of ``run`` neighbours, (N,), which divides the ranks, and that across the runs.

        Neighbours that don't fit a node's members of the group sum over the links between nodes.
        """
        on_node = np.gcd(np.rint(self.inside).astype(np.int64), np.rint(run).astype(np.int64)).astype(float)
        nodes = run / on_node
        # Runs that share a node's cards, where their members are on several.
        sharing = np.where(nodes > 1, self.sharing * self.inside / on_node, self.sharing)
        runs_inside, runs_nodes = self.inside / on_node, self.nodes / nodes
        # Runs that begin in the middle of a node: taken as one member a node, the slowest that can be.
        is_even = (on_node == run) | (on_node == self.inside)
        across = GroupSpan(
            np.where(is_even, runs_inside, 1.0),
            np.where(is_even, runs_nodes, self.ranks / run),
            self.sharing * on_node,
        )
        return GroupSpan(on_node, nodes, sharing), across


@dataclass(frozen=True, slots=True)
class WireTime:
    """Seconds of traffic, and of these the seconds in which each class of links is full; (N,), (N, P) or scalars.

    One link carries one collective at a time, so what hides under compute hides beside the compute's own traffic.
    """

    seconds: Values = 0.0
    """From start to end."""
    inside: Values = 0.0
    """In which the links inside nodes are full."""
    outside: Values = 0.0
    """In which the network is full."""
    core: Values = 0.0
    """Seconds of the core that also computes, for which no wire can hide the traffic."""

    def __add__(self, other: WireTime) -> WireTime:
        """Returns one after the other."""
        return WireTime(
            self.seconds + other.seconds,
            self.inside + other.inside,
            self.outside + other.outside,
            self.core + other.core,
        )

    def scaled(self, factor: Values) -> WireTime:
        """Returns ``factor`` of them, of a shape that broadcasts."""
        return WireTime(self.seconds * factor, self.inside * factor, self.outside * factor, self.core * factor)

    def where(self, condition: Array, other: WireTime) -> WireTime:
        """Returns this traffic where the condition holds, else the other."""
        return WireTime(
            np.where(condition, self.seconds, other.seconds),
            np.where(condition, self.inside, other.inside),
            np.where(condition, self.outside, other.outside),
            np.where(condition, self.core, other.core),
        )

    def exposed_s(self, busy_s: Values, carried: WireTime, overlap: Values) -> Array:
        """Returns the seconds that ``busy_s`` of compute and its own traffic don't hide.

        On each class of links compute hides at most what its own traffic leaves free: a step takes at least as long as
        the bytes of each link over its rate, and as long as all that its core does.

        Args:
            busy_s: seconds of compute and of the traffic that it waits for.
            carried: its own traffic, hidden or not, in these seconds.
            overlap: share of them that can hide other traffic.
        """
        exposed_s = np.maximum(self.seconds - overlap * busy_s, self.core)
        for own_s, other_s in ((self.inside, carried.inside), (self.outside, carried.outside)):
            exposed_s = np.maximum(exposed_s, own_s - overlap * np.maximum(busy_s - other_s, 0.0))
        return np.asarray(exposed_s)


def span(rank_stride: Values, degree: Values, devices: int, world: Values) -> GroupSpan:
    """Returns the span of groups along an axis as arrays (N,); see `cluster.traffic.span`."""
    inside, nodes, sharing = traffic.span(rank_stride, degree, devices, world)
    shape = np.broadcast_shapes(np.shape(inside), np.shape(world))
    return GroupSpan(*(np.broadcast_to(np.asarray(item, float), shape) for item in (inside, nodes, sharing)))


class CollectiveTimes:
    """Seconds of collectives of N layouts; ranks are ordered tp inside cp inside shard inside replicate inside pp.

    Args:
        layouts: N layouts.
        machine: the hardware.
    """

    def __init__(self, layouts: LayoutBatch, machine: Machine) -> None:
        self._layouts, self._machine = layouts, machine

    def _span(self, rank_stride: Values, degree: Values) -> GroupSpan:
        return span(rank_stride, degree, self._machine.fabric.devices, self._layouts.world)

    @cached_property
    def tp(self) -> GroupSpan:
        """Groups along tp."""
        return self._span(1, self._layouts.tp)

    @cached_property
    def cp(self) -> GroupSpan:
        """Groups along cp."""
        return self._span(self._layouts.tp, self._layouts.cp)

    @cached_property
    def ep(self) -> GroupSpan:
        """Groups along ep."""
        return self._span(1, self._layouts.ep)

    @cached_property
    def shard_cp(self) -> GroupSpan:
        """Groups that share the state."""
        return self._span(self._layouts.tp, self._layouts.shard * self._layouts.cp)

    @cached_property
    def secondary(self) -> GroupSpan:
        """Neighbours that share gathered weights."""
        return self._span(self._layouts.tp, np.maximum(1.0, self._layouts.secondary))

    @cached_property
    def replicate(self) -> GroupSpan:
        """Copies of one part of the state."""
        return self._span(self._layouts.tp * self._layouts.cp * self._layouts.shard, self._layouts.replicate)

    @cached_property
    def readers(self) -> GroupSpan:
        """Groups that hold the same weights."""
        return self._span(self._layouts.tp, self._layouts.readers)

    @cached_property
    def expert_shard(self) -> GroupSpan:
        """Groups that share the state of one expert."""
        return self._span(*self._experts())

    @cached_property
    def expert_readers(self) -> GroupSpan:
        """Groups that hold the same experts."""
        stride, ranks = self._experts()
        return self._span(stride, ranks * self._layouts.replicate)

    def _experts(self) -> tuple[Array, Array]:
        """Returns stride and number of the ranks that shard one expert.

        With ep they are every ep-th of shard x cp x tp; without, as for any weight.
        """
        layouts = self._layouts
        has_ep, carved_degree = layouts.ep > 1, layouts.shard * layouts.cp * layouts.tp / layouts.ep
        return np.where(has_ep, layouts.ep, layouts.tp), np.where(has_ep, carved_degree, layouts.shard * layouts.cp)

    @cached_property
    def pp(self) -> GroupSpan:
        """Groups along pp."""
        return self._span(self._layouts.tp * self._layouts.cp * self._layouts.data, self._layouts.pp)

    def take(self, index: Index, layouts: LayoutBatch) -> CollectiveTimes:
        """Returns the groups of the layouts at an index, slice or mask, which are ``layouts``."""
        selected = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, GroupSpan):
                setattr(selected, name, GroupSpan(value.inside[index], value.nodes[index], value.sharing[index]))
        selected._layouts = layouts
        return selected

    def wire(self, kind: Callable[..., Values], size: Values, group: GroupSpan) -> WireTime:
        """Returns a collective's seconds, and those in which it fills each class of links.

        The arguments are those of `seconds`.
        """
        return self.booked(self.seconds(kind, size, group), group)

    def booked(self, seconds: Array, group: GroupSpan, sent_bytes: Values = 0.0) -> WireTime:
        """Returns ``seconds`` of a group's collectives, (N,) or (N, P), with the links that these fill meanwhile.

        A group on one node fills its links. A ring over nodes fills the network, and between its members of a node the
        links inside for (k-1)/k of the bytes, with k members there.

        Args:
            seconds: of the collectives.
            group: along which axis.
            sent_bytes: that each member sends, of the shape of ``seconds``.
        """
        fabric, crosses = self._machine.fabric, group.nodes > 1
        local_rate = fabric.inside.rate_among(group.inside)
        ring_rate = np.minimum(local_rate, fabric.network(group.inside, group.sharing))
        inside_share = np.where(crosses, ring_rate / local_rate * (1.0 - 1.0 / group.inside), 1.0)
        if np.ndim(seconds) == 2:
            crosses, inside_share = crosses[:, None], inside_share[:, None]
        core_byte_s = self._machine.core_byte_s
        # Inside a node cores copy from memory to memory, and do nothing else meanwhile.
        core_s = np.where(crosses, sent_bytes * core_byte_s, seconds) if core_byte_s else 0.0
        return WireTime(seconds, seconds * inside_share, np.where(crosses, seconds, 0.0), core_s)

    def seconds(self, kind: Callable[..., Values], size: Values, group: GroupSpan) -> Array:
        """Returns seconds of a collective on every layout.

        Args:
            kind: of `cluster.traffic`.
            size: bytes of the full tensor, (N,) or (N, P) float64.
            group: along which axis.
        """
        size = np.asarray(size, float)
        has_peers = group.ranks > 1
        if not has_peers.any():
            return np.zeros(np.broadcast_shapes(size.shape, has_peers.shape[:1] + (1,) * (size.ndim - 1)))
        # A link at a share of its rate takes as long as more bytes at the full rate.
        between_nodes_scale = self._layouts.outside_scale * self._machine.network_share
        scale = np.where(group.nodes > 1, between_nodes_scale, self._layouts.inside_scale)
        arrays = [scale, group.inside, group.nodes, group.sharing]
        if size.ndim == 2:
            arrays = [values[:, None] for values in arrays]
        scale, inside, nodes, sharing = arrays
        return np.asarray(kind(size / scale, inside, nodes, self._machine.fabric, sharing), float)

    def send(self, size: Values) -> Array:
        """Returns seconds of a send of ``size`` bytes, (N,), to the next stage, inside a node where two stages fit."""
        layouts, devices = self._layouts, self._machine.fabric.devices
        # pp is the outermost axis: neighbouring stages share a node where two whole stages fit into it.
        inside_node = layouts.world / layouts.pp * 2 <= devices
        return self._send_s(size, inside_node)

    def local_send(self, size: Values) -> Array:
        """Returns seconds of a send of ``size`` bytes, (N,), inside a node; 0 where no two stages fit into one."""
        fits = self._layouts.world / self._layouts.pp * 2 <= self._machine.fabric.devices
        return np.asarray(self._send_s(size, np.ones_like(fits)) * fits)

    def crossing_send(self, size: Values) -> Array:
        """Returns seconds of a send of ``size`` bytes, (N,), between nodes; 0 where all ranks share one."""
        layouts, devices = self._layouts, self._machine.fabric.devices
        crosses = layouts.world > devices
        return np.asarray(self._send_s(size, ~crosses) * crosses)

    def _send_s(self, size: Values, inside_node: Array) -> Array:
        """Returns seconds of a send of ``size`` bytes, (N,), inside a node or between nodes."""
        layouts, devices = self._layouts, self._machine.fabric.devices
        group = GroupSpan(np.where(inside_node, 2.0, 1.0), np.where(inside_node, 1.0, 2.0), self.pp.sharing)
        sharing = np.minimum(devices, layouts.world / layouts.pp)
        return self.seconds(traffic.send_s, size, GroupSpan(group.inside, group.nodes, np.maximum(1, sharing)))
