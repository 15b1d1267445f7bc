"""Fits figures of devices and links to a calibration, for shapes that its tables don't cover."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.cluster import catalogue
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.device import Device
from meshwright.cluster.host import HOST_WEIGHTS, NORM, NORM_BYTES, UPDATE, UPDATE_BYTES
from meshwright.cluster.link import Link
from meshwright.cluster.node import Node
from meshwright.errors import ClusterError


def measured_on(calibration: Calibration, device: Device) -> bool:
    """Returns whether a calibration is of this kind of device."""
    if calibration.machine.get("kind") == "cpu":
        return device.units == 0
    try:
        return catalogue.device(str(calibration.machine.get("device", ""))).name == device.name
    except ClusterError:
        return False


def fitted_node(calibration: Calibration, node: Node, ranks: int) -> Node:
    """Returns a node with measured rates of its device and links, under the load of all ranks.

    Args:
        calibration: of such nodes.
        node: of the catalogue.
        ranks: of the cluster; with another number than measured, links keep the catalogue's figures.
    """
    node = dataclasses.replace(
        node,
        device=fitted_device(calibration, node.device),
        host_update_share=_host_share(calibration, node, UPDATE, UPDATE_BYTES) or node.host_update_share,
        host_norm_share=_host_share(calibration, node, NORM, NORM_BYTES) or node.host_norm_share,
    )
    if calibration.ranks != ranks or calibration.ranks % calibration.nodes:
        return node
    # Groups inside a node give the inside link, groups of one rank a node the network.
    local_ranks = calibration.ranks // calibration.nodes
    inside = _fit_link(node.inside, calibration.times("all_reduce", local_ranks, 1, 1), local_ranks, 1.0)
    if node.outside is None or calibration.nodes == 1:
        return dataclasses.replace(node, inside=inside)
    network_times = calibration.times("all_reduce", calibration.nodes, calibration.nodes, local_ranks)
    return dataclasses.replace(
        node,
        inside=inside,
        outside=_fit_link(node.outside, network_times, calibration.nodes, local_ranks / node.outside_count),
        # The switches are part of what was measured.
        oversubscription=1.0,
    )


def _host_share(calibration: Calibration, node: Node, item: str, weight_bytes: float) -> float:
    """Returns the measured share of the host's bandwidth; 0 where either is unknown."""
    seconds = calibration.host_s(item)
    if not seconds or not node.host_bandwidth_bytes_per_s:
        return 0.0
    return HOST_WEIGHTS * weight_bytes / seconds / node.host_bandwidth_bytes_per_s


def fitted_device(calibration: Calibration, device: Device) -> Device:
    """Returns a device with measured rates; a peak is raised where a product exceeded it."""
    peaks, shares = dict(device.peak_flops), dict(device.matmul_share)
    for dtype in {str(row[0]) for row in calibration.matmul}:
        best = calibration.best_matmul(dtype)
        if best:
            # A measured rate above the nominal peak shows that the catalogue is too low.
            peaks[dtype] = max(best, peaks.get(dtype, 0.0))
            shares[dtype] = best / peaks[dtype]
    values: dict[str, Any] = {"peak_flops": peaks, "matmul_share": shares}
    if calibration.launch_s:
        values["launch_s"] = calibration.launch_s
    # The longest copy has the least share of launch time.
    longest = max((int(row[3]) for row in calibration.operations if row[:2] == ("copy", "float32")), default=0)
    if longest:
        rate = float(calibration.bandwidth_bytes_per_s(4 * longest))
        # A share can't exceed 1, so the nominal rate rises instead.
        nominal = max(rate, device.bandwidth_bytes_per_s)
        values |= {"bandwidth_bytes_per_s": nominal, "memory_share": rate / nominal}
    return dataclasses.replace(device, source="calibration", **values)


def _fit_link(link: Link, times: list[tuple[float, float]], ranks: int, sharing: float) -> Link:
    """Fits a link's latency and rate to measured all-reduces, modelled as rings of ``ranks``.

    Args:
        link: of the catalogue; returned unchanged without measurements.
        times: (bytes, seconds).
        ranks: members of each group.
        sharing: groups that share one such link.
    """
    if ranks < 2 or not times:
        return link
    (_, first_s), (size, last_s) = times[0], times[-1]
    hop = min(first_s, last_s) / (2 * (ranks - 1))
    # Ring: t = 2(n-1) hops + 2(n-1)/n S/B, so the slope between first and last message gives B. With one message, or
    # a disturbed first one, the last message's own time.
    slope_s = last_s - first_s if last_s > 2 * first_s else last_s
    rate = 2 * (ranks - 1) / ranks * size * sharing / slope_s
    return Link(name=link.name, bytes_per_s=rate, latency_s=hop, source="calibration")
