"""The catalogue's figures with what was measured put in their place; for what the measured tables don't cover."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.cluster import catalogue
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.device import Device
from meshwright.cluster.link import Link
from meshwright.cluster.node import Node
from meshwright.errors import ClusterError


def measured_on(calibration: Calibration, device: Device) -> bool:
    """Whether a calibration is of such a device."""
    if calibration.machine.get("kind") == "cpu":
        return device.units == 0
    try:
        return catalogue.device(str(calibration.machine.get("device", ""))).name == device.name
    except ClusterError:
        return False


def fitted_node(calibration: Calibration, node: Node, ranks: int) -> Node:
    """Returns a node with measured rates of its device and links, those of all ranks at work.

    Args:
        calibration: of such nodes.
        node: as the catalogue has it.
        ranks: of the cluster; with other many than were measured, links keep the catalogue's figures.
    """
    node = dataclasses.replace(node, device=fitted_device(calibration, node.device))
    if calibration.ranks != ranks or calibration.ranks % calibration.nodes:
        return node
    local = calibration.ranks // calibration.nodes
    near = _link(node.inside, calibration.times("all_reduce", local, 1, 1), local, 1.0)
    if node.outside is None or calibration.nodes == 1:
        return dataclasses.replace(node, inside=near)
    far = calibration.times("all_reduce", calibration.nodes, calibration.nodes, local)
    return dataclasses.replace(
        node, inside=near, outside=_link(node.outside, far, calibration.nodes, local / node.outside_count)
    )


def fitted_device(calibration: Calibration, device: Device) -> Device:
    """Returns a device with measured rates; its peaks are raised where a product exceeded them."""
    peaks, shares = dict(device.peak_flops), dict(device.matmul_share)
    for dtype in {str(row[0]) for row in calibration.matmul}:
        best = calibration.best_matmul(dtype)
        if best:
            peaks[dtype] = max(best, peaks.get(dtype, 0.0))
            shares[dtype] = best / peaks[dtype]
    values: dict[str, Any] = {"peak_flops": peaks, "matmul_share": shares}
    if calibration.launch_s:
        values["launch_s"] = calibration.launch_s
    longest = max((int(row[3]) for row in calibration.operations if row[:2] == ("copy", "float32")), default=0)
    if longest:
        rate = float(calibration.bandwidth_bytes_per_s(4 * longest))
        nominal = max(rate, device.bandwidth_bytes_per_s)
        values |= {"bandwidth_bytes_per_s": nominal, "memory_share": rate / nominal}
    return dataclasses.replace(device, source="calibration", **values)


def _link(link: Link, times: list[tuple[float, float]], ranks: int, sharing: float) -> Link:
    """Returns a link with the latency and rate of measured all-reduces, taken as rings of ``ranks``.

    Args:
        link: what the catalogue has; returned as it is where nothing was measured.
        times: (bytes, seconds).
        ranks: members of each group.
        sharing: groups that share one such link.
    """
    if ranks < 2 or not times:
        return link
    (_, first), (size, last) = times[0], times[-1]
    hop = min(first, last) / (2 * (ranks - 1))
    # The slope between the first and last message; of one message alone, or a disturbed first one, its own rate.
    spent = last - first if last > 2 * first else last
    rate = 2 * (ranks - 1) / ranks * size * sharing / spent
    return Link(name=link.name, bytes_per_s=rate, latency_s=hop, source="calibration")
