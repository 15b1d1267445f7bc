"""Discovery of this node's devices, without importing torch or initialising the GPU driver."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from meshwright.control_groups import allowed_memory_bytes, read_quota
from meshwright.errors import ClusterError

_SMI_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The devices that a run uses on this node."""

    kind: Literal["cpu", "cuda"]
    """Kind of the devices."""
    count: int
    """Number of ranks on this node, one per device."""
    found: int
    """Number of devices present: GPUs, or cores."""
    cores: int
    """Cores that this process may use."""
    slots: tuple[int, ...] = ()
    """Device numbers by local rank; 0, 1, ... when empty."""
    quota: float = math.inf
    """Cores' worth of processor time that this process's cgroups allow it."""

    @property
    def core_time(self) -> float:
        """Cores' worth of processor time that the ranks have: that of the cores, or less by the quota."""
        return min(self.cores, self.quota)

    def slot(self, local_rank: int) -> int:
        """Returns the number of a local rank's device."""
        return self.slots[local_rank] if self.slots else local_rank

    def name(self, local_rank: int) -> str:
        """Returns torch's name of a rank's device: ``cpu`` or ``cuda:<i>``."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.slot(local_rank)}"

    def only(self, slots: Sequence[int]) -> Devices:
        """Returns some of the devices, one rank each."""
        return replace(self, count=len(slots), slots=tuple(slots))

    def threads(self, local_world: int) -> int:
        """Returns how many threads each of ``local_world`` ranks gets for its operations."""
        # Within the quota: threads beyond it would stand still for a part of each period.
        return max(1, int(self.core_time) // max(1, local_world))


def found_devices(requested: int | None = None, kind: Literal["cpu", "cuda"] | None = None) -> Devices:
    """Chooses the devices of a run: all GPUs, else all cores.

    Args:
        requested: how many ranks; all devices when None. CPU ranks may outnumber the cores.
        kind: what they must be; GPUs when there are any, when None.

    Raises:
        ClusterError: when more GPUs are asked for than there are, or fewer than one device.
    """
    quota = read_quota()
    cores = count_cores(quota)
    gpus = count_gpus() if kind != "cpu" else 0
    if requested is not None and requested < 1:
        raise ClusterError(f"devices = {requested}: a run needs at least 1; leave it out to use all")
    if kind == "cuda" and gpus == 0:
        raise ClusterError("no GPU was found (nvidia-smi lists none, or torch is a CPU build); use CPU ranks")
    if gpus == 0:
        return Devices(kind="cpu", count=requested or cores, found=cores, cores=cores, quota=quota)
    # CPU ranks may outnumber the cores, GPU ranks never the GPUs: NCCL refuses two ranks on one.
    if requested is not None and requested > gpus:
        raise ClusterError(
            f"devices = {requested}, but this node has {gpus} usable GPU{'s' if gpus > 1 else ''}; ask for at most "
            f"{gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return Devices(kind="cuda", count=requested or gpus, found=gpus, cores=cores, quota=quota)


def count_cores(quota: float | None = None) -> int:
    """Returns the number of cores that this process may use: the lesser of its affinity and its cgroups' quota.

    Args:
        quota: as `read_quota` returned it; None to read it.
    """
    return math.ceil(allowed_core_time(quota))


def allowed_core_time(quota: float | None = None) -> float:
    """Returns the cores' worth of time that this process may use, of which a quota may leave parts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, read_quota() if quota is None else quota)


def count_gpus() -> int:
    """Returns how many GPUs torch could use here; 0 for a CPU build of torch."""
    if _torch_is_cpu_build():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    available = _count_by_driver()
    if visible is None or available == 0:
        return available
    # CUDA reads the list up to the first entry that names no device.
    names: list[str] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= available):
            break
        names.append(entry)
    return min(len(names), available)


def cuda_environment() -> dict[str, str]:
    """Returns the variables by which CUDA chooses and numbers GPUs."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}


def device_memory_bytes(devices: Devices, local_world: int) -> int:
    """Returns the memory that each of ``local_world`` ranks may use, without touching CUDA in this process.

    The smallest GPU's, or an even share of what this process may use of the host's.

    Raises:
        ClusterError: when nvidia-smi doesn't say how much the GPUs have.
    """
    if devices.kind == "cpu":
        return allowed_memory_bytes() // max(1, local_world)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
        return min(int(line) for line in listed.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"nvidia-smi doesn't say how much memory the GPUs have ({error}); name the layout with --layout"
        ) from error


@cache
def least_compute_capability() -> float | None:
    """Returns the lowest compute capability of this node's GPUs, as 8.0, without touching CUDA; None where unknown."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
        return min(float(line) for line in listed.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _torch_is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _count_by_driver() -> int:
    """Counts GPUs by nvidia-smi, which respects a container's limits; else by the driver's files."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            # A subprocess, since NVML or CUDA in this process would forbid the fork of ranks.
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_SMI_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            listed = None
        if listed is not None and listed.returncode == 0:
            return len(re.findall(r"^GPU \d+:", listed.stdout, flags=re.MULTILINE))
    # Without nvidia-smi: device nodes of a container, at most the GPUs that the driver has registered.
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    registered = Path("/proc/driver/nvidia/gpus")
    return min(len(nodes), len(list(registered.iterdir()))) if registered.is_dir() else len(nodes)
