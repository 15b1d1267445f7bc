"""A rank's share of its host's memory and bandwidth, for state that is offloaded from the device."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.node import Node

KERNEL_SHARE = 0.43
"""Share of the processors' nominal memory bandwidth that a fused Adam over all cores reaches: 10e9 parameters in
2.57 s, 28 bytes each, on a DGX-2 of 256 GB/s. Source: Ren et al., ZeRO-Offload (2021), table 4."""
RANK_BYTES_PER_S = 152.6e9
"""The most that an update moves on the cores of one rank: 5.45e9 weights a second, 28 bytes each, by torch's fused
AdamW on the 16 cores that come with one H100, whose whole host has 614 GB/s. Source: "AdamW on the host" of
tests/gpu/parts/calibrate.py."""
HOST_WEIGHTS = 10**9
"""Weights of which a calibration has the seconds on a node's cores."""
UPDATE_BYTES, NORM_BYTES = 28.0, 4.0
"""Bytes that a weight's update moves (weight, gradient, two moments read; all but the gradient written), and those of
its norm."""
UPDATE, NORM = "update", "norm"
"""Items of a calibration's ``host`` table: seconds of these of `HOST_WEIGHTS` on all cores of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """One rank's share of its host, while all ranks of the node use theirs."""

    memory_bytes: float
    """Bytes of host memory."""
    copy_bytes_per_s: float
    """Copy rate between device and host memory, in one direction."""
    kernel_bytes_per_s: float
    """Rate at which an update on processor cores moves host memory."""
    norm_bytes_per_s: float
    """Rate at which the norm of tensors there does."""


def host_of(node: Node) -> HostShare | None:
    """Returns a rank's share of a node's host; None where its memory, its bandwidth or the link to it is unknown.

    A copy runs at the rate of the link or of this rank's share of memory bandwidth, whichever is lower: the copies of
    all ranks share host memory. Kernels run at the node's measured shares of the bandwidth; where there are none, at
    `KERNEL_SHARE` of it or at `RANK_BYTES_PER_S`, whichever is lower.
    """
    if node.host_link is None or not node.host_memory_bytes or not node.host_bandwidth_bytes_per_s:
        return None
    bandwidth_share = node.host_bandwidth_bytes_per_s / node.count
    update_rate = bandwidth_share * node.host_update_share or min(bandwidth_share * KERNEL_SHARE, RANK_BYTES_PER_S)
    return HostShare(
        memory_bytes=node.host_memory_bytes / node.count,
        copy_bytes_per_s=min(node.host_link.rate, bandwidth_share),
        kernel_bytes_per_s=update_rate,
        norm_bytes_per_s=bandwidth_share * node.host_norm_share or update_rate,
    )


def slowest_host(nodes: list[Node]) -> HostShare | None:
    """Returns the least of each figure over unequal nodes; None where the host of any is unknown."""
    shares = [host_of(node) for node in nodes]
    hosts = [host for host in shares if host is not None]
    # One unknown host makes the slowest unknown.
    if not hosts or len(hosts) < len(shares):
        return None
    return HostShare(
        memory_bytes=min(host.memory_bytes for host in hosts),
        copy_bytes_per_s=min(host.copy_bytes_per_s for host in hosts),
        kernel_bytes_per_s=min(host.kernel_bytes_per_s for host in hosts),
        norm_bytes_per_s=min(host.norm_bytes_per_s for host in hosts),
    )
