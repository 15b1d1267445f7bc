# long: a cluster's devices, link times and text forms are one class
"""The cluster of a job: groups of equal nodes, and the links that a group of ranks crosses on them.

Ranks fill nodes in order: group after group, node after node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import cluster_text, notation
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.device import Device
from meshwright.cluster.fitted import fitted_node, measured_on
from meshwright.cluster.host import HostShare, slowest_host
from meshwright.cluster.link import Link
from meshwright.cluster.node import Node, standard_node
from meshwright.cluster.traffic import Fabric, collective_s, span
from meshwright.errors import ClusterError
from meshwright.json_types import JsonObject

MIN_PART = 0.5
"""Least share of a rack that an even split of the nodes must fill; below it racks count as full, the last as ragged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Equal nodes."""

    node: Node
    """One of them."""
    count: int
    """Number of nodes."""

    def __post_init__(self) -> None:
        """Refuses an empty group."""
        if self.count < 1:
            raise ClusterError(f"{self.count} nodes of {self.node.device.name}; a group has at least 1")

    @property
    def devices(self) -> int:
        """Devices of all its nodes."""
        return self.count * self.node.count

    @property
    def domain(self) -> int:
        """Devices that share the fast links: a node's, or a rack's where those join its nodes."""
        # A job that uses fewer nodes than a rack has fills a part of one.
        racked = min(self.node.rack, self.count)
        if racked < self.count:
            even = max(size for size in range(1, racked + 1) if self.count % size == 0)
            racked = even if even >= MIN_PART * racked else racked
        return racked * self.node.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All nodes of a job."""

    groups: tuple[NodeGroup, ...]
    """Nodes by kind, in the order of their ranks."""
    name: str = ""
    """Text or file name that it was built from."""
    calibration: Calibration | None = field(default=None, compare=False)
    """Measurements of these machines; None where only the catalogue is known."""

    def __post_init__(self) -> None:
        """Refuses an empty cluster, and nodes without a network between them."""
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ClusterError("the cluster has 0 devices; name at least one, as 8xh100")
        if self.nodes > 1:
            for group in self.groups:
                # One fast domain needs no network; more than one does.
                if group.node.outside is None and group.domain < self.devices:
                    raise ClusterError(
                        f"the cluster has {self.nodes} nodes, but those of {group.node.device.name} have no network: "
                        "give them 'outside' and 'outside_count'"
                    )

    # -------------------------------------------------------- devices

    @property
    def devices(self) -> int:
        """Number of devices, hence ranks."""
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(group.count for group in self.groups)

    @property
    def nodes_text(self) -> str:
        """The nodes and what joins them: ``1 node``, ``18 nodes of one rack``, ``8 nodes with 8xinfiniband-ndr``."""
        if self.nodes == 1:
            return "1 node"
        if len(self.groups) == 1 and self.groups[0].node.rack >= self.nodes:
            return f"{self.nodes} nodes of one rack"
        networks = dict.fromkeys(cluster_text.network_of(group.node) for group in self.groups)
        return f"{self.nodes} nodes with {' and '.join(networks)}"

    @property
    def unused_network(self) -> str:
        """Name of the network that was named after @ of one node, which has no use for it; empty otherwise."""
        network = self.groups[0].node.network
        return network.name if self.nodes == 1 and "@" in self.name and network is not None else ""

    @property
    def uniform(self) -> bool:
        """Whether all devices are equal."""
        return len({group.node.device.name for group in self.groups}) == 1

    @property
    def device(self) -> Device:
        """The device; of several kinds the one with the least memory."""
        return min((group.node.device for group in self.groups), key=lambda device: device.memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return self.device.memory_bytes

    @property
    def kinds(self) -> dict[str, int]:
        """Device name to number of devices, in rank order."""
        device_counts: dict[str, int] = {}
        for group in self.groups:
            device_counts[group.node.device.name] = device_counts.get(group.node.device.name, 0) + group.devices
        return device_counts

    @property
    def node_devices(self) -> int:
        """Devices of the smallest node; all nodes are equal in a cluster of one group."""
        return min(group.node.count for group in self.groups)

    @property
    def domain(self) -> int:
        """Devices that share fast links, in the smallest such domain."""
        return min(group.domain for group in self.groups)

    @property
    def rack(self) -> int:
        """Nodes that share the fast links; the least over groups."""
        return min(group.node.rack for group in self.groups)

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for an hour of all devices; None when one has no price."""
        prices = [(group.node.device.price_per_hour, group.devices) for group in self.groups]
        return None if any(price is None for price, _ in prices) else sum((p or 0.0) * n for p, n in prices)

    @property
    def watts(self) -> float:
        """Power of all devices under load."""
        return sum(group.node.device.watts * group.devices for group in self.groups)

    @property
    def host(self) -> HostShare | None:
        """A rank's share of its host, the least over nodes; None where a host is unknown, or is the device itself."""
        if any(group.node.device.name.startswith("cpu") for group in self.groups):
            return None
        return slowest_host([group.node for group in self.groups])

    def device_of(self, rank: int) -> Device:
        """Returns the device of a rank.

        Raises:
            ClusterError: for a rank beyond the devices.
        """
        for group in self.groups:
            if 0 <= rank < group.devices:
                return group.node.device
            rank -= group.devices
        raise ClusterError(f"there is no such rank: the cluster has {self.devices} devices")

    # -------------------------------------------------------- links and times

    def fabric(self, *groups: int) -> Fabric:
        """Returns the two link levels that ranks of these node groups share; of all groups without an argument.

        Between unequal groups the slower link of each level counts.
        """
        chosen_groups = [self.groups[index] for index in groups] or list(self.groups)
        # The slowest inside link bounds every ring that crosses it.
        inside = min((group.node.inside for group in chosen_groups), key=lambda link: link.rate)
        domains = [
            (group.domain, group.domain / group.node.count * group.node.outside_count) for group in chosen_groups
        ]
        # A domain's bandwidth to the outside, by device: its cards' rates over its devices.
        networks: list[tuple[float, Link, int, float]] = [
            (link.rate * cards / devices, link, devices, cards)
            for group, (devices, cards) in zip(chosen_groups, domains)
            if (link := group.node.network) is not None
        ]
        if not networks:
            return Fabric(inside=inside, outside=None, devices=min(devices for devices, _ in domains), cards=0.0)
        _, link, devices, cards = min(networks, key=lambda item: item[0])
        # Domains of unequal size: scale the cards to the smallest one.
        smallest = min(size for size, _ in domains)
        return Fabric(inside=inside, outside=link, devices=smallest, cards=cards * smallest / devices)

    def span(self, rank_stride: int, degree: int) -> tuple[int, int, int]:
        """Returns (members in a domain, domains, groups that share its cards); see `traffic.span`."""
        return span(rank_stride, degree, self.domain, self.devices)

    def collective_s(self, kind: str, size: Values, rank_stride: int, degree: int) -> Values:
        """Returns seconds of a collective over S bytes along a mesh axis: measured, or else computed from the links.

        Args:
            kind: a name of `traffic.COLLECTIVES`.
            size: bytes of the full tensor; a number or a float array.
            rank_stride: product of the degrees of the faster axes.
            degree: of the axis.
        """
        # Placement of the group: members in a domain, domains, and groups that share the cards.
        inside, nodes, sharing = self.span(rank_stride, degree)
        if self._has_measured(kind, inside * nodes, nodes):
            assert self.calibration is not None
            return self.calibration.collective_s(kind, size, inside * nodes, nodes, rank_stride)
        return collective_s(kind, size, inside, nodes, self.fabric(), sharing)

    def _has_measured(self, kind: str, ranks: int, nodes: int) -> bool:
        """Returns whether the calibration has a collective over such groups, under the load of this cluster's ranks."""
        calibration = self.calibration
        return calibration is not None and calibration.ranks == self.devices and calibration.covers(kind, ranks, nodes)

    def seconds(self, kind: str, size: Values, inside: Values, nodes: Values, sharing: Values = 1) -> Values:
        """Returns seconds of a collective over groups as `span` describes them: measured, or else by the links.

        Args:
            kind: a name of `traffic.COLLECTIVES`.
            size: bytes of the full tensor, S.
            inside: members of a group in one domain.
            nodes: domains of a group.
            sharing: groups that share a domain's cards.

        Returns:
            A float, or a float array of the shape to which all arguments broadcast.
        """
        times = collective_s(kind, size, inside, nodes, self.fabric(), sharing)
        if self.calibration is None:
            return times
        size, ranks, nodes = np.broadcast_arrays(size, np.multiply(inside, nodes), nodes)
        times = np.broadcast_to(times, size.shape).copy()
        # One look-up for each distinct group shape, not for each entry of the arrays.
        for group_ranks, group_nodes in {(int(n), int(m)) for n, m in zip(ranks.ravel(), nodes.ravel())}:
            if self._has_measured(kind, group_ranks, group_nodes):
                selected = (ranks == group_ranks) & (nodes == group_nodes)
                times[selected] = self.calibration.collective_s(kind, size[selected], group_ranks, group_nodes)
        return float(times) if times.ndim == 0 else times

    # -------------------------------------------------------- sub-clusters

    def restricted(self, devices: int) -> Cluster:
        """Returns the first ``devices`` of the cluster: full nodes, and a partial last one.

        Raises:
            ClusterError: for more devices than the cluster has, or none.
        """
        if not 1 <= devices <= self.devices:
            raise ClusterError(f"{devices} devices of a cluster that has {self.devices}; ask for 1 to {self.devices}")
        kept_groups, remaining = [], devices
        for group in self.groups:
            full_nodes, partial_devices = divmod(min(remaining, group.devices), group.node.count)
            if full_nodes:
                kept_groups.append(NodeGroup(node=group.node, count=full_nodes))
            if partial_devices:
                kept_groups.append(NodeGroup(node=group.node.resized(partial_devices), count=1))
            remaining -= full_nodes * group.node.count + partial_devices
            if not remaining:
                break
        return dataclasses.replace(self, groups=tuple(kept_groups), name=f"{self.name or 'cluster'}[:{devices}]")

    def without(self, nodes: int | Sequence[int]) -> Cluster:
        """Returns the cluster after a loss of nodes.

        Args:
            nodes: number of nodes lost from the end, or their indices in rank order.

        Raises:
            ClusterError: when no node remains, or an index is out of range.
        """
        if isinstance(nodes, int) and nodes >= self.nodes:
            count = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
            most = f"lose at most {self.nodes - 1}" if self.nodes > 1 else "name a cluster of several nodes"
            raise ClusterError(f"a loss of {nodes} nodes leaves nothing of {self.name or 'a cluster'}, {count}; {most}")
        # A number means the last nodes; indices are taken as they are.
        lost = set(range(self.nodes - nodes, self.nodes)) if isinstance(nodes, int) else set(nodes)
        if not lost <= set(range(self.nodes)) or len(lost) == self.nodes:
            raise ClusterError(f"a loss of nodes {sorted(lost)} leaves nothing of {self.nodes}, or names none of them")
        kept_groups, first_index = [], 0
        for group in self.groups:
            kept_nodes = sum(index not in lost for index in range(first_index, first_index + group.count))
            first_index += group.count
            if kept_nodes:
                kept_groups.append(NodeGroup(node=group.node, count=kept_nodes))
        return dataclasses.replace(
            self, groups=tuple(kept_groups), name=f"{self.name or 'cluster'} less {len(lost)} nodes"
        )

    def subset(self, groups: Sequence[int]) -> Cluster:
        """Returns the cluster of some node groups, such as the fast ones alone."""
        chosen_groups = tuple(self.groups[index] for index in groups)
        return dataclasses.replace(
            self, groups=chosen_groups, name="+".join(f"{g.devices}x{g.node.device.name}" for g in chosen_groups)
        )

    def calibrated(self, calibration: Calibration) -> Cluster:
        """Returns the cluster with a calibration: its tables, and fitted figures of devices and links.

        Raises:
            ClusterError: when it was measured on other devices.
        """
        # A calibration of one device kind may serve some groups of a mixed cluster.
        fits = [measured_on(calibration, group.node.device) for group in self.groups]
        if not any(fits):
            raise ClusterError(
                f"the calibration is of {calibration.machine.get('device', 'another machine')}, the cluster has "
                f"{', '.join(self.kinds)}; measure on such a machine, or leave the calibration out"
            )
        groups = tuple(
            dataclasses.replace(group, node=fitted_node(calibration, group.node, self.devices)) if fit else group
            for group, fit in zip(self.groups, fits)
        )
        return dataclasses.replace(self, groups=groups, calibration=calibration)

    # -------------------------------------------------------- construction

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``64xh100``, ``h100x64``, ``2x8xh100`` (nodes x devices), ``64xh100+32xa100``, ``4xcpu``, or a file.

        ``@LINK`` after a term names its network: ``16xh100@infiniband-hdr``, or ``@infiniband-hdr:2`` where it is 2:1
        oversubscribed. A path ends in ``.toml`` or ``.json``.

        Raises:
            ClusterError: for invalid text, an unknown device or link (naming the nearest), or zero devices.
        """
        if text.endswith((".toml", ".json")):
            return cls.from_dict(notation.read_file(Path(text)), Path(text).stem)
        node_counts = [row for term in text.split("+") for row in cluster_text.read_nodes(term)]
        return cls(groups=_merge_equal(node_counts), name=text.strip())

    @classmethod
    def from_dict(cls, values: JsonObject, name: str = "") -> Self:
        """Builds the cluster from `to_dict`'s values, or from a user's file (docs/cluster.md).

        Raises:
            ClusterError: for unknown keys, devices or links, and for invalid values.
        """
        return cls(groups=_merge_equal(notation.read_nodes(values)), name=str(values.get("name", name)))

    def to_dict(self) -> JsonObject:
        """Returns plain values for TOML or JSON, which `from_dict` reads; without the calibration."""
        return notation.write_nodes(self.name, [(group.node, group.count) for group in self.groups])

    @classmethod
    def from_hosts(cls, slots: Sequence[int], device: str, link: str = "") -> Self:
        """Builds the cluster of a hostfile: a node for each host, with as many devices as it has slots.

        Args:
            slots: ranks of each host, in order.
            device: name of all their devices.
            link: network between them; the standard one when empty.
        """
        node_counts = [(cluster_text.with_network(standard_node(device, count), link), 1) for count in slots]
        return cls(groups=_merge_equal(node_counts), name=f"{len(slots)} hosts of {device}")

    @classmethod
    def from_hostfile(cls, path: Path, device: str, link: str = "") -> Self:
        """Builds the cluster of a hostfile (``host slots=8`` a line).

        Raises:
            ClusterError: when it can't be read or holds another kind of line.
        """
        return cls.from_hosts(cluster_text.read_slots(path), device, link)

    @classmethod
    def detected(
        cls,
        devices: int,
        kind: str,
        *,
        name: str = "",
        nodes: int = 1,
        cores: int = 1,
        memory_bytes: int = 0,
        host_memory_bytes: int = 0,
        link: str = "",
    ) -> Self:
        """Builds the cluster of this machine from the launcher's detection.

        Args:
            devices: ranks of each node.
            kind: ``cpu`` or ``cuda``.
            name: the GPU's name by its driver; an unknown one is refused.
            nodes: number of such machines.
            cores: cores of each node that ranks may use; CPU ranks share them evenly.
            memory_bytes: of each device; the catalogue's when 0.
            host_memory_bytes: of each node; the catalogue's when 0.
            link: network between nodes; the standard one when empty.
        """
        if kind != "cpu" and not name:
            raise ClusterError("a cluster of GPUs is detected by their driver's name for them; none was given")
        node = cluster_text.with_network(standard_node("cpu" if kind == "cpu" else name, devices), link)
        # The driver's figure, where known, replaces the catalogue's.
        memory = memory_bytes or node.device.memory_bytes
        # CPU ranks share the cores evenly, so a rank may have a fraction of one.
        factor = cores / devices if kind == "cpu" else 1.0
        node = dataclasses.replace(
            node,
            device=node.device.scaled(factor, memory),
            host_memory_bytes=host_memory_bytes or node.host_memory_bytes,
        )
        return cls(groups=(NodeGroup(node=node, count=nodes),), name=f"{nodes * devices}x{node.device.name} found here")

    def __str__(self) -> str:
        """Returns ``64xh100+32xa100-80``."""
        return "+".join(f"{count}x{name}" for name, count in self.kinds.items())


def _merge_equal(rows: Sequence[tuple[Node, int]]) -> tuple[NodeGroup, ...]:
    """Merges equal neighbours of (node, count) into groups."""
    merged: list[NodeGroup] = []
    for node, count in rows:
        if merged and merged[-1].node == node:
            merged[-1] = NodeGroup(node=node, count=merged[-1].count + count)
        else:
            merged.append(NodeGroup(node=node, count=count))
    return tuple(merged)
