"""The machine's description: facts that key its calibrations, and the folder that stores them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.control_groups import allowed_memory_bytes, machine_memory_bytes
from meshwright.errors import ClusterError
from meshwright.launch.devices import Devices, device_memory_bytes

_SMI_S = 20.0


def machine_facts(devices: Devices, ranks: int, nodes: int = 1) -> dict[str, Any]:
    """Returns the facts that a calibration depends on: device, cores, memory, torch, ranks, nodes; no host names.

    Args:
        devices: of this node.
        ranks: on all nodes.
        nodes: that they run on.
    """
    return {
        "kind": devices.kind,
        "device": gpu_name() if devices.kind == "cuda" else processor_name(),
        "found": devices.found,
        "cores": int(time) if (time := devices.core_time) == int(time) else time,
        "memory_gib": round(machine_memory_bytes() / 2**30),
        "torch": importlib.metadata.version("torch"),
        "ranks": ranks,
        "nodes": nodes,
    }


def this_cluster(devices: Devices, nodes: int = 1, link: str = "") -> Cluster:
    """Returns this machine as a cluster, with the measurements of `meshwright calibrate` if there are any.

    Args:
        devices: of this node; ``count`` ranks run on it.
        nodes: number of such nodes.
        link: network between them; the usual one when empty.

    Raises:
        ClusterError: for a GPU that the catalogue doesn't have.
    """
    cluster = Cluster.detected(
        devices.count,
        devices.kind,
        name=gpu_name() if devices.kind == "cuda" else "",
        nodes=nodes,
        cores=devices.cores,
        memory_bytes=device_memory_bytes(devices, devices.count),
        host_memory_bytes=allowed_memory_bytes(),
        link=link,
    )
    folder, each = calibration_folder(), devices.count
    measured = Calibration.find(folder, machine_facts(devices, each * nodes, nodes))
    if measured is None and nodes > 1:
        # A single-node calibration still measures compute; the network is then the catalogue's.
        measured = Calibration.find(folder, machine_facts(devices, each))
    return cluster if measured is None else cluster.calibrated(measured)


def gpu_name() -> str:
    """Returns the first GPU's name as its driver gives it.

    Raises:
        ClusterError: when nvidia-smi doesn't say.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"nvidia-smi doesn't say what the GPUs are ({error}); name the cluster instead") from error
    if not listed:
        raise ClusterError("nvidia-smi lists no GPU; name the cluster instead")
    return listed[0].strip()


def processor_name() -> str:
    """Returns the processor's name, or its architecture where the system doesn't say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def calibration_folder() -> Path:
    """Returns the folder of calibrations: ``meshwright/calibration`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "meshwright" / "calibration"
