"""The memory of a node's host, as each of its ranks has it for state that doesn't stay on the device."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.node import Node

KERNEL_SHARE = 0.43
"""Share of the processors' nominal memory bandwidth that a fused Adam over all cores reaches: 10e9 parameters in
2.57 s, 28 bytes each, on a DGX-2 of 256 GB/s. Source: Ren et al., ZeRO-Offload (2021), table 4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """One rank's part of its host, while all ranks of the node use theirs."""

    memory_bytes: float
    """Of the host's memory."""
    copy_bytes_per_s: float
    """Between device and host memory, in one direction."""
    kernel_bytes_per_s: float
    """That kernels of the processor cores move in host memory."""


def host_of(node: Node) -> HostShare | None:
    """Returns a rank's part of a node's host; None where its memory, its bandwidth or the link to it isn't known.

    Copies go as fast as the link, or as this rank's part of the memory's bandwidth, whichever is slower: the copies of
    all ranks meet in host memory.
    """
    if node.host_link is None or not node.host_memory_bytes or not node.host_bandwidth_bytes_per_s:
        return None
    part = node.host_bandwidth_bytes_per_s / node.count
    return HostShare(
        memory_bytes=node.host_memory_bytes / node.count,
        copy_bytes_per_s=min(node.host_link.rate, part),
        kernel_bytes_per_s=part * KERNEL_SHARE,
    )


def slowest_host(nodes: list[Node]) -> HostShare | None:
    """Returns of unequal nodes the least of each figure; None where one has none."""
    found = [host_of(node) for node in nodes]
    hosts = [host for host in found if host is not None]
    if not hosts or len(hosts) < len(found):
        return None
    return HostShare(
        memory_bytes=min(host.memory_bytes for host in hosts),
        copy_bytes_per_s=min(host.copy_bytes_per_s for host in hosts),
        kernel_bytes_per_s=min(host.kernel_bytes_per_s for host in hosts),
    )
