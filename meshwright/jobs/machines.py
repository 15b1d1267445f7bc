"""The machines of a run as a cluster, and the file of what earlier runs on them taught; loads no torch."""

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
    """What the ranks of a run stand on."""

    devices: Devices
    """Of this node; the others are taken to be alike."""
    ranks: int
    """On all nodes."""
    nodes: int = 1
    """That the ranks stand on."""
    network: str = ""
    """Between them, as a cluster's text has it behind @; the usual one when empty."""

    def fewer(self, ranks: int) -> Machines:
        """Returns what is left for fewer ranks: full nodes, as far as can be."""
        each = -(-self.ranks // self.nodes)
        return dataclasses.replace(self, ranks=ranks, nodes=-(-ranks // each))


def cluster_here(machines: Machines) -> Cluster:
    """Returns the machines of a run as a cluster, with what was measured on them where it was.

    Raises:
        ClusterError: for a GPU or a network that the catalogue doesn't know.
    """
    each = -(-machines.ranks // machines.nodes)
    devices = dataclasses.replace(machines.devices, count=each)
    found = this_cluster(devices, machines.nodes, machines.network)
    return found if found.devices == machines.ranks else found.restricted(machines.ranks)


def ledger_here(machines: Machines) -> tuple[Path, str]:
    """Returns the file of this machine's runs, and what the machine is called in it.

    What a run took over its price says nothing of prices by another calibration, so the name goes by that too.
    """
    name = machine_key(machine_facts(machines.devices, machines.ranks, machines.nodes))
    calibrated = calibration_folder() / f"{name}.json"
    if calibrated.is_file():
        name += "-" + hashlib.sha256(calibrated.read_bytes()).hexdigest()[:8]
    return calibration_folder() / NAME, name
