"""Devices of several kinds: which ranks lie on which."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.device import Device
from meshwright.planner.cost.groups import Machine
from meshwright.units import format_bytes

Kind = tuple[Device, Machine, int]
"""A device, what it runs on, and how many of it there are, in rank order."""


def kinds_of(cluster: Cluster) -> list[Kind]:
    """Runs of equal devices in rank order; between kinds the slowest links count."""
    fabric = cluster.fabric()
    found: list[Kind] = []
    for group in cluster.groups:
        device = group.node.device
        if found and found[-1][0] == device:
            found[-1] = (device, found[-1][1], found[-1][2] + group.devices)
        else:
            found.append((device, Machine(device=device, fabric=fabric, host=cluster.host), group.devices))
    return found


def places_of(kinds: Sequence[Kind], size: int) -> list[int] | None:
    """For each run of ``size`` ranks the kind that it lies in; None where one would lie in two."""
    places: list[int] = []
    for number, (_, _, count) in enumerate(kinds):
        if count % size:
            return None
        places += [number] * (count // size)
    return places


def describe_kinds(cluster: Cluster) -> str:
    """Returns the kinds of a cluster with their memory, for people."""
    return ", ".join(
        f"{count}x{device.name} ({format_bytes(device.memory_bytes)})" for device, _, count in kinds_of(cluster)
    )
