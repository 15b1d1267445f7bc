"""A cluster with some figures changed, to ask the same question of it: twice the network, half as much memory again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.device import Device
from meshwright.cluster.link import Link, Protocol
from meshwright.cluster.node import Node
from meshwright.errors import ClusterError, nearest

FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "flops": "peak FLOP/s of a device, in every data type",
        "bandwidth": "bandwidth of a device's memory",
        "memory": "memory of a device",
        "inside": "rate of the links inside a node",
        "nic": "rate of a node's network cards",
        "latency": "time that a message takes to start, on all links",
        "host_memory": "memory of a host",
        "host_bandwidth": "bandwidth of a host's memory",
        "launch": "time between two kernel launches",
        "price": "dollars an hour",
        "watts": "power of a device",
        "nodes": "number of nodes",
    }
)
"""What can be changed."""


def parse_factors(text: str) -> dict[str, float]:
    """Parses ``nic=2x,memory=1.5x`` to factors by figure.

    Raises:
        ClusterError: for an unknown figure, one that is given twice, or a value that is no factor above 0.
    """
    factors: dict[str, float] = {}
    for assignment in (item.strip() for item in text.split(",") if item.strip()):
        key, _, value = assignment.partition("=")
        if key not in FIGURES:
            raise ClusterError(f"what_if: '{key}' can't be changed{nearest(key, FIGURES)}")
        try:
            factor = float(value.removesuffix("x")) if value.endswith("x") else -1.0
        except ValueError:
            factor = -1.0
        if not 0 < factor < float("inf"):
            raise ClusterError(f"what_if: {assignment}: write a factor above 0 of today's figure, as {key}=2x")
        if key in factors:
            raise ClusterError(f"what_if: {key} is given twice")
        factors[key] = factor
    if not factors:
        raise ClusterError("what_if: nothing is changed; write nic=2x,memory=1.5x")
    return factors


def changed_cluster(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Returns the cluster with some of `FIGURES` multiplied.

    Args:
        cluster: described by figures alone; measured times can't be scaled.
        factors: by figure.

    Raises:
        ClusterError: for a figure that this cluster doesn't have, and for a calibrated cluster.
    """
    if cluster.calibration is not None:
        raise ClusterError(
            "what_if changes figures of a description, and this cluster's times are measured; name it without its "
            "calibration, as --cluster 8xh100"
        )
    if "nic" in factors and cluster.domain >= cluster.devices:
        raise ClusterError(
            f"what_if: nic changes nothing, since the ranks of {cluster} cross no network; change inside, or name a "
            "cluster of several nodes"
        )
    if "inside" in factors and cluster.domain == 1:
        raise ClusterError(f"what_if: inside changes nothing, since the nodes of {cluster} have one device; change nic")
    groups = tuple(
        NodeGroup(node=_changed_node(group.node, factors), count=_node_count(group, factors.get("nodes", 1.0)))
        for group in cluster.groups
    )
    changes = ",".join(f"{key}={factor:g}x" for key, factor in factors.items())
    return dataclasses.replace(cluster, groups=groups, name=f"{cluster.name or cluster} with {changes}")


def _node_count(group: NodeGroup, factor: float) -> int:
    count = group.count * factor
    if count < 1 or abs(count - round(count)) > 1e-9:
        raise ClusterError(
            f"what_if: nodes={factor:g}x of {group.count} nodes of {group.node.device.name} is {count:g}; take a "
            "factor that gives a whole number"
        )
    return round(count)


def _changed_node(node: Node, factors: Mapping[str, float]) -> Node:
    if "host_memory" in factors and not node.host_memory_bytes:
        raise ClusterError(f"what_if: no host memory is known for nodes of {node.device.name}")
    if "host_bandwidth" in factors and not node.host_bandwidth_bytes_per_s:
        raise ClusterError(f"what_if: no bandwidth of host memory is known for nodes of {node.device.name}")
    latency = factors.get("latency", 1.0)
    return dataclasses.replace(
        node,
        device=_changed_device(node.device, factors),
        inside=_changed_link(node.inside, factors.get("inside", 1.0), latency),
        outside=None if node.outside is None else _changed_link(node.outside, factors.get("nic", 1.0), latency),
        host_memory_bytes=round(node.host_memory_bytes * factors.get("host_memory", 1.0)),
        host_bandwidth_bytes_per_s=node.host_bandwidth_bytes_per_s * factors.get("host_bandwidth", 1.0),
    )


def _changed_device(device: Device, factors: Mapping[str, float]) -> Device:
    if "price" in factors and device.price_per_hour is None:
        raise ClusterError(f"what_if: no price is known for {device.name}; give price_per_hour in the cluster's file")
    if "watts" in factors and not device.watts:
        raise ClusterError(f"what_if: no power is known for {device.name}; give watts in the cluster's file")
    price = device.price_per_hour
    return dataclasses.replace(
        device,
        memory_bytes=round(device.memory_bytes * factors.get("memory", 1.0)),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * factors.get("bandwidth", 1.0),
        peak_flops={dtype: rate * factors.get("flops", 1.0) for dtype, rate in device.peak_flops.items()},
        launch_s=device.launch_s * factors.get("launch", 1.0),
        watts=device.watts * factors.get("watts", 1.0),
        price_per_hour=None if price is None else price * factors.get("price", 1.0),
    )


def _changed_link(link: Link, rate: float, latency: float) -> Link:
    protocols = tuple(
        Protocol(protocol.share, protocol.start_s * latency, protocol.hop_s * latency) for protocol in link.protocols
    )
    return dataclasses.replace(
        link, bytes_per_s=link.bytes_per_s * rate, latency_s=link.latency_s * latency, protocols=protocols
    )
