"""The machines of a job: groups of equal nodes, and the wires that a group of ranks crosses on them.

Ranks fill nodes in order: group after group, node after node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshwright.cluster import cluster_text, notation
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.device import Device
from meshwright.cluster.fitted import fitted_node, measured_on
from meshwright.cluster.host import HostShare, slowest_host
from meshwright.cluster.link import Link
from meshwright.cluster.node import Node, standard_node
from meshwright.cluster.traffic import Fabric, collective_s, span
from meshwright.errors import ClusterError

MIN_PART = 0.5
"""A rack of which a job's nodes fill less than this share evenly is counted as full, the last one ragged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Equal nodes."""

    node: Node
    """Each of them."""
    count: int
    """How many."""

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
        """Devices that share the fast links: a node's, or a rack's where nodes are joined by them."""
        racked = min(self.node.rack, self.count)
        if racked < self.count:
            even = max(size for size in range(1, racked + 1) if self.count % size == 0)
            racked = even if even >= MIN_PART * racked else racked
        return racked * self.node.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All machines of a job."""

    groups: tuple[NodeGroup, ...]
    """Nodes by kind, in the order of their ranks."""
    name: str = ""
    """What it was called by."""
    calibration: Calibration | None = field(default=None, compare=False)
    """What was measured on these machines; None where the catalogue is all there is."""

    def __post_init__(self) -> None:
        """Refuses clusters that can't work together."""
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ClusterError("the cluster has 0 devices; name at least one, as 8xh100")
        if self.nodes > 1:
            for group in self.groups:
                if group.node.outside is None and group.domain < self.devices:
                    raise ClusterError(
                        f"the cluster has {self.nodes} nodes, but those of {group.node.device.name} have no network: "
                        "give them 'outside' and 'outside_count'"
                    )

    # -------------------------------------------------------- what there is

    @property
    def devices(self) -> int:
        """Number of devices, hence ranks."""
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(group.count for group in self.groups)

    @property
    def uniform(self) -> bool:
        """Whether all devices are equal."""
        return len({group.node.device.name for group in self.groups}) == 1

    @property
    def device(self) -> Device:
        """The device, or of several kinds the one with the least memory."""
        return min((group.node.device for group in self.groups), key=lambda device: device.memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return self.device.memory_bytes

    @property
    def kinds(self) -> dict[str, int]:
        """Device name to number of devices, in rank order."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.node.device.name] = found.get(group.node.device.name, 0) + group.devices
        return found

    @property
    def node_devices(self) -> int:
        """Devices of the smallest node; nodes are equal in a cluster of one group."""
        return min(group.node.count for group in self.groups)

    @property
    def domain(self) -> int:
        """Devices that share fast links, in the smallest such domain."""
        return min(group.domain for group in self.groups)

    @property
    def rack(self) -> int:
        """Nodes that share the links inside; the smallest group's number."""
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
        """A rank's part of its host, of unequal nodes the least; None where some host isn't known, or is the device."""
        if any(group.node.device.name.startswith("cpu") for group in self.groups):
            return None
        return slowest_host([group.node for group in self.groups])

    def device_of(self, rank: int) -> Device:
        """Returns the device of a rank.

        Raises:
            ClusterError: for a rank that there isn't.
        """
        for group in self.groups:
            if 0 <= rank < group.devices:
                return group.node.device
            rank -= group.devices
        raise ClusterError(f"there is no such rank: the cluster has {self.devices} devices")

    # -------------------------------------------------------- what it crosses

    def fabric(self, *groups: int) -> Fabric:
        """Returns the wires that ranks of these groups of nodes share; of all of them without an argument.

        Between unequal groups the slower of each link counts.
        """
        chosen = [self.groups[index] for index in groups] or list(self.groups)
        inside = min((group.node.inside for group in chosen), key=lambda link: link.rate)
        domains = [(group.domain, group.domain / group.node.count * group.node.outside_count) for group in chosen]
        outside: list[tuple[float, Link, int, float]] = [
            (link.rate * cards / devices, link, devices, cards)
            for group, (devices, cards) in zip(chosen, domains)
            if (link := group.node.outside) is not None
        ]
        if not outside:
            return Fabric(inside=inside, outside=None, devices=min(devices for devices, _ in domains), cards=0.0)
        _, link, devices, cards = min(outside, key=lambda item: item[0])
        smallest = min(size for size, _ in domains)
        return Fabric(inside=inside, outside=link, devices=smallest, cards=cards * smallest / devices)

    def span(self, before: int, degree: int) -> tuple[int, int, int]:
        """Returns members in a domain, domains, and groups that share its cards; see `traffic.span`."""
        return span(before, degree, self.domain, self.devices)

    def collective_s(self, kind: str, size: Any, before: int, degree: int) -> Any:
        """Returns seconds of an operation over S bytes along a mesh axis: measured where it was, else by the links.

        Args:
            kind: a name of `traffic.COLLECTIVES`.
            size: bytes of the whole tensor; a number or an array.
            before: product of the degrees of the faster axes.
            degree: of the axis.
        """
        inside, nodes, sharing = self.span(before, degree)
        if self._measured(kind, inside * nodes, nodes):
            assert self.calibration is not None
            return self.calibration.collective_s(kind, size, inside * nodes, nodes, before)
        return collective_s(kind, size, inside, nodes, self.fabric(), sharing)

    def _measured(self, kind: str, ranks: int, nodes: int) -> bool:
        """Whether the calibration has an operation over such groups, under the load of as many ranks as there are."""
        held = self.calibration
        return held is not None and held.ranks == self.devices and held.covers(kind, ranks, nodes)

    def seconds(self, kind: str, size: Any, inside: Any, nodes: Any, sharing: Any = 1) -> Any:
        """Returns seconds of an operation over groups as `span` describes them, all of them arrays that broadcast.

        As `collective_s`: each group's time is the measured one where that was measured, else by the links.
        """
        found = collective_s(kind, size, inside, nodes, self.fabric(), sharing)
        if self.calibration is None:
            return found
        size, ranks, nodes = np.broadcast_arrays(size, np.multiply(inside, nodes), nodes)
        found = np.broadcast_to(found, size.shape).copy()
        for group, number in {(int(n), int(m)) for n, m in zip(ranks.ravel(), nodes.ravel())}:
            if self._measured(kind, group, number):
                chosen = (ranks == group) & (nodes == number)
                found[chosen] = self.calibration.collective_s(kind, size[chosen], group, number)
        return float(found) if found.ndim == 0 else found

    # -------------------------------------------------------- parts of it

    def restricted(self, devices: int) -> Cluster:
        """Returns the first ``devices`` of the cluster: whole nodes, the last one in part.

        Raises:
            ClusterError: for more than there are, or none.
        """
        if not 1 <= devices <= self.devices:
            raise ClusterError(f"{devices} devices of a cluster that has {self.devices}; ask for 1 to {self.devices}")
        found, left = [], devices
        for group in self.groups:
            whole, rest = divmod(min(left, group.devices), group.node.count)
            if whole:
                found.append(NodeGroup(node=group.node, count=whole))
            if rest:
                found.append(NodeGroup(node=group.node.resized(rest), count=1))
            left -= whole * group.node.count + rest
            if not left:
                break
        return dataclasses.replace(self, groups=tuple(found), name=f"{self.name or 'cluster'}[:{devices}]")

    def without(self, nodes: int | Sequence[int]) -> Cluster:
        """Returns the cluster after a loss of nodes.

        Args:
            nodes: how many of the last, or which by index in rank order.

        Raises:
            ClusterError: when none is left, or an index names none.
        """
        lost = set(range(self.nodes - nodes, self.nodes)) if isinstance(nodes, int) else set(nodes)
        if not lost <= set(range(self.nodes)) or len(lost) == self.nodes:
            raise ClusterError(f"a loss of nodes {sorted(lost)} leaves nothing of {self.nodes}, or names none of them")
        found, first = [], 0
        for group in self.groups:
            left = sum(index not in lost for index in range(first, first + group.count))
            first += group.count
            if left:
                found.append(NodeGroup(node=group.node, count=left))
        return dataclasses.replace(self, groups=tuple(found), name=f"{self.name or 'cluster'} less {len(lost)} nodes")

    def subset(self, groups: Sequence[int]) -> Cluster:
        """Returns some of the groups of nodes: the fast ones without the slow, say."""
        kept = tuple(self.groups[index] for index in groups)
        return dataclasses.replace(self, groups=kept, name="+".join(f"{g.devices}x{g.node.device.name}" for g in kept))

    def calibrated(self, calibration: Calibration) -> Cluster:
        """Returns the cluster with what was measured on such machines: its tables, and figures of devices and links.

        Raises:
            ClusterError: when it was measured on other devices.
        """
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

    # -------------------------------------------------------- where it comes from

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``64xh100``, ``h100x64``, ``2x8xh100`` (nodes x devices), ``64xh100+32xa100``, ``4xcpu``, or a file.

        ``@LINK`` after a part names its network: ``16xh100@infiniband-hdr``. A path ends in ``.toml`` or ``.json``.

        Raises:
            ClusterError: for what can't be read, an unknown device or link (naming the nearest), or zero devices.
        """
        if text.endswith((".toml", ".json")):
            return cls.from_dict(notation.read_file(Path(text)), Path(text).stem)
        found = [row for part in text.split("+") for row in cluster_text.read_nodes(part)]
        return cls(groups=_grouped(found), name=text.strip())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str = "") -> Self:
        """Builds the cluster from `to_dict`'s values, or from what a user wrote (docs/cluster.md).

        Raises:
            ClusterError: for unknown keys, devices or links, and for values that can't be.
        """
        return cls(groups=_grouped(notation.read_nodes(values)), name=str(values.get("name", name)))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for TOML or JSON that `from_dict` takes back; the calibration isn't among them."""
        return notation.write_nodes(self.name, [(group.node, group.count) for group in self.groups])

    @classmethod
    def from_hosts(cls, slots: Sequence[int], device: str, link: str = "") -> Self:
        """Builds the cluster of a hostfile: a node for each host, with as many devices as it has slots.

        Args:
            slots: ranks of each host, in order.
            device: what they all have.
            link: network between them; the usual one when empty.
        """
        found = [(cluster_text.with_network(standard_node(device, count), link), 1) for count in slots]
        return cls(groups=_grouped(found), name=f"{len(slots)} hosts of {device}")

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
        """Builds the cluster of the machine at hand from what the launcher found on it.

        Args:
            devices: ranks of each node.
            kind: ``cpu`` or ``cuda``.
            name: the GPU's name as its driver gives it; an unknown one is refused.
            nodes: how many such machines.
            cores: cores of each node that ranks may use; CPU ranks share them evenly.
            memory_bytes: of each device; the catalogue's when 0.
            host_memory_bytes: of each node; the catalogue's when 0.
            link: network between nodes; the usual one when empty.
        """
        if kind != "cpu" and not name:
            raise ClusterError("a cluster of GPUs is detected by their driver's name for them; none was given")
        node = cluster_text.with_network(standard_node("cpu" if kind == "cpu" else name, devices), link)
        memory = memory_bytes or node.device.memory_bytes
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


def _grouped(rows: Sequence[tuple[Node, int]]) -> tuple[NodeGroup, ...]:
    """Returns (node, count) as groups, equal neighbours in one."""
    found: list[NodeGroup] = []
    for node, count in rows:
        if found and found[-1].node == node:
            found[-1] = NodeGroup(node=node, count=found[-1].count + count)
        else:
            found.append(NodeGroup(node=node, count=count))
    return tuple(found)
