"""The kind of device of each rank: of a cluster with several kinds, or of equal devices at measured speeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster
from meshwright.planner.cost.groups import Machine
from meshwright.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKinds:
    """The kinds of device, and which of them each rank has."""

    machines: tuple[Machine, ...]
    """Device and links of each kind."""
    of_rank: tuple[int, ...]
    """Index into ``machines`` of each rank."""
    may_mix: bool = False
    """Whether a stage or a reader may lie on several kinds, of which the last in ``machines`` sets its pace."""

    def of_runs(self, size: int) -> list[int] | None:
        """Returns the index of the kind of each run of ``size`` ranks; None where a run would span two kinds."""
        runs = [self.of_rank[first : first + size] for first in range(0, len(self.of_rank), size)]
        if not self.may_mix and any(len(set(run)) > 1 for run in runs):
            return None
        return [max(run) for run in runs]

    def limits_bytes(self, usable: float) -> list[float]:
        """Returns the bytes of each kind's device that may be filled, at a share ``usable`` of its memory."""
        return [usable * machine.device.memory_bytes for machine in self.machines]


def kinds_of(cluster: Cluster) -> DeviceKinds:
    """Returns the kinds of a cluster's devices; links between kinds are the slowest of them."""
    fabric, machines, of_rank = cluster.fabric(), list[Machine](), list[int]()
    for group in cluster.groups:
        machine = Machine(device=group.node.device, fabric=fabric, host=cluster.host, node_devices=cluster.node_devices)
        if machine not in machines:
            machines.append(machine)
        of_rank += [machines.index(machine)] * group.devices
    return DeviceKinds(machines=tuple(machines), of_rank=tuple(of_rank))


def kinds_of_speeds(cluster: Cluster, speeds: Sequence[float]) -> DeviceKinds:
    """Returns the kinds of equal devices that compute at different speeds, the fastest first.

    A stage or reader may lie on several of them, since no wire or memory differs, and takes as long as its slowest.

    Args:
        cluster: of one kind of device.
        speeds: of each rank, as a factor on the device's rates, above 0.
    """
    machine, levels = Machine.of(cluster), sorted(set(speeds), reverse=True)
    machines = tuple(
        Machine(device=machine.device.scaled(speed, machine.device.memory_bytes), fabric=machine.fabric,
                host=machine.host, node_devices=machine.node_devices)
        for speed in levels
    )  # fmt: skip
    return DeviceKinds(machines=machines, of_rank=tuple(map(levels.index, speeds)), may_mix=True)


def describe_kinds(cluster: Cluster) -> str:
    """Returns the kinds of a cluster with their memory, for people."""
    kinds = kinds_of(cluster)
    runs = [(kind, len(list(ranks))) for kind, ranks in itertools.groupby(kinds.of_rank)]
    devices = [(count, kinds.machines[kind].device) for kind, count in runs]
    return ", ".join(f"{count}x{device.name} ({format_bytes(device.memory_bytes)})" for count, device in devices)
