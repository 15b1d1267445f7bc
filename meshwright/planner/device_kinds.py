"""Finds the kind of device of each rank on a cluster with several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.device import Device
from meshwright.planner.cost.groups import Machine
from meshwright.units import format_bytes

Kind = tuple[Device, Machine, int]
"""(device, its machine, number of such devices in a row, in rank order)."""


def kinds_of(cluster: Cluster) -> list[Kind]:
    """Returns the runs of equal devices in rank order; links between kinds are the slowest of them."""
    fabric = cluster.fabric()
    runs: list[Kind] = []
    for group in cluster.groups:
        device = group.node.device
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1], runs[-1][2] + group.devices)
        else:
            runs.append((device, Machine(device=device, fabric=fabric, host=cluster.host), group.devices))
    return runs


def kinds_of_runs(kinds: Sequence[Kind], size: int) -> list[int] | None:
    """Returns the index of the kind of each run of ``size`` ranks; None where a run would span two kinds."""
    run_kinds: list[int] = []
    for kind, (_, _, count) in enumerate(kinds):
        if count % size:
            return None
        run_kinds += [kind] * (count // size)
    return run_kinds


def describe_kinds(cluster: Cluster) -> str:
    """Returns the kinds of a cluster with their memory, for people."""
    return ", ".join(
        f"{count}x{device.name} ({format_bytes(device.memory_bytes)})" for device, _, count in kinds_of(cluster)
    )
