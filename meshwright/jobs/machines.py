"""The machines of a run as a cluster, and the file of earlier runs' measured step times; loads no torch."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from meshwright.cluster.calibration import machine_key
from meshwright.cluster.cluster import Cluster
from meshwright.launch.devices import Devices
from meshwright.launch.machine import calibration_folder, machine_facts, this_cluster
from meshwright.planner.run_history import NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The devices, nodes and network of a run's ranks."""

    devices: Devices
    """Of this node; the others are taken to be alike."""
    ranks: int
    """On all nodes."""
    nodes: int = 1
    """That the ranks stand on."""
    network: str = ""
    """Between them, as a cluster's text has it behind @; the usual one when empty."""

    def for_ranks(self, ranks: int) -> Machines:
        """Returns the machines of fewer ranks, which fill as few nodes as possible."""
        each = -(-self.ranks // self.nodes)
        return dataclasses.replace(self, ranks=ranks, nodes=-(-ranks // each))


def cluster_of_machines(machines: Machines) -> Cluster:
    """Returns the machines of a run as a cluster, with their calibration where one is stored.

    Raises:
        ClusterError: for a GPU or a network that the catalogue doesn't know.
    """
    ranks_per_node = -(-machines.ranks // machines.nodes)
    devices = dataclasses.replace(machines.devices, count=ranks_per_node)
    cluster = this_cluster(devices, machines.nodes, machines.network)
    return cluster if cluster.devices == machines.ranks else cluster.restricted(machines.ranks)


def run_history_file(machines: Machines) -> tuple[Path, str]:
    """Returns the path of this machine's run history, and the machine's key in it.

    A measured-to-priced ratio holds only for the calibration it was priced with, so the key has the calibration's hash.
    """
    name = machine_key(machine_facts(machines.devices, machines.ranks, machines.nodes))
    calibrated = calibration_folder() / f"{name}.json"
    if calibrated.is_file():
        name += "-" + hashlib.sha256(calibrated.read_bytes()).hexdigest()[:8]
    return calibration_folder() / NAME, name
