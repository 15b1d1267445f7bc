"""A node: equal devices, the links between them, and its network cards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.cluster import catalogue
from meshwright.cluster.device import Device
from meshwright.cluster.link import Link
from meshwright.errors import ClusterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Equal devices of one machine."""

    device: Device
    """One of them."""
    count: int
    """Devices of the node."""
    inside: Link
    """Link between two of them."""
    outside: Link | None = None
    """One network card; None for a node without a network."""
    outside_count: float = 0
    """Network cards of the node."""
    oversubscription: float = 1.0
    """Bytes that the cards of all nodes can send over those that the switches carry between them: 2 for a network that
    is 2:1 oversubscribed; 1 where it isn't."""
    host_memory_bytes: int = 0
    """Memory of the host, for offload and data."""
    host_bandwidth_bytes_per_s: float = 0.0
    """Nominal bandwidth of that memory, all processors of the host together; 0 where unknown, which rules out
    offload."""
    host_update_share: float = 0.0
    """Share of that bandwidth that an AdamW update by all of the host's cores reaches; 0 where it wasn't measured."""
    host_norm_share: float = 0.0
    """The same of the norm of tensors there."""
    host_link: Link | None = None
    """Link between one device and host memory; None rules out offload."""
    rack: int = 1
    """Nodes that share the inside links: 18 for an NVL72."""

    def __post_init__(self) -> None:
        """Refuses invalid figures."""
        if self.count < 1:
            raise ClusterError(f"a node of {self.count} devices; a node has at least 1")
        if self.rack < 1 or self.host_memory_bytes < 0 or self.host_bandwidth_bytes_per_s < 0:
            raise ClusterError(
                f"node of {self.device.name}: rack is at least 1, host_memory_bytes and host_bandwidth_bytes_per_s not "
                "below 0"
            )
        if self.host_update_share < 0 or self.host_norm_share < 0:
            raise ClusterError(f"node of {self.device.name}: host_update_share and host_norm_share are not below 0")
        if not self.oversubscription >= 1:
            raise ClusterError(
                f"node of {self.device.name}: oversubscription = {self.oversubscription}; it is 1 where the switches "
                "carry all that the cards can send, and 2 where they carry half"
            )
        if self.outside is not None and not self.outside_count > 0:
            raise ClusterError(
                f"node of {self.device.name}: outside_count = {self.outside_count} cards of {self.outside.name} carry "
                "nothing; give at least 1, or leave 'outside' out"
            )

    @property
    def network(self) -> Link | None:
        """One network card at its rate when all cards of all nodes send at once; None without a network."""
        if self.outside is None or self.oversubscription == 1.0:
            return self.outside
        return dataclasses.replace(self.outside, bytes_per_s=self.outside.bytes_per_s / self.oversubscription)

    def resized(self, count: int) -> Node:
        """Returns the node with another number of devices; fewer ones keep their share of the network cards."""
        cards = self.outside_count
        if self.outside is not None and count < self.count:
            # At least one card: a rank without a network couldn't join.
            cards = max(1.0, cards * count / self.count)
        return dataclasses.replace(self, count=count, outside_count=cards)


def standard_node(device: str | Device, count: int | None = None) -> Node:
    """Returns the standard node of a device.

    Args:
        device: a name, or a device that may differ from the catalogue's.
        count: devices in the node; the standard number when None.

    Raises:
        ClusterError: for an unknown device.
    """
    catalogue_entry = catalogue.entry(device if isinstance(device, str) else device.name)
    node = named_node(catalogue_entry.node, catalogue_entry.device if isinstance(device, str) else device)
    return node if count is None else node.resized(count)


def named_node(name: str, device: Device) -> Node:
    """Returns a node of the catalogue by name with a device in it.

    Raises:
        ClusterError: for an unknown node.
    """
    catalogue_nodes = catalogue.nodes()
    if name not in catalogue_nodes:
        raise ClusterError(f"unknown node '{name}'; known: {', '.join(sorted(catalogue_nodes))}")
    values = catalogue_nodes[name]
    return Node(
        device=device,
        count=values["count"],
        inside=catalogue.link(values["inside"]),
        outside=catalogue.link(values["outside"]),
        outside_count=values["outside_count"],
        host_memory_bytes=values["host_memory_bytes"],
        host_bandwidth_bytes_per_s=values.get("host_bandwidth_bytes_per_s", 0.0),
        host_link=catalogue.link(values["host_link"]),
        rack=values.get("rack", 1),
    )
