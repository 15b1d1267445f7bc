"""What this process's control groups, as of a container, a pod or a Slurm job, leave it of cores and memory.

Source: Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/memory.rst and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS_BYTES = 0.35 * 2**30
"""Memory of a rank's process with torch and transformers loaded, before the model (resident set, torch 2.13)."""
ROOT = Path("/")
"""Root of the file system; each function takes another."""


def read_quota(system: Path = ROOT) -> float:
    """Returns the cores' worth of time that the tightest quota of this process's groups allows; infinity for none."""
    return min((_folder_quota(folder) for folder in group_folders("cpu", system)), default=math.inf)


def allowed_memory_bytes(system: Path = ROOT) -> int:
    """Returns the memory that this process's node may use: the machine's, or less by the tightest limit of a group."""
    limits = (_limit_bytes(folder) for folder in group_folders("memory", system))
    return int(min([machine_memory_bytes(), *limits]))


def available_bytes(system: Path = ROOT) -> int:
    """Returns the memory that this node can still give this process, without swapping and within each group's limit."""
    return int(min([_machine_available_bytes(system), *map(_free_bytes, group_folders("memory", system))]))


def machine_memory_bytes() -> int:
    """Returns the memory of this machine, whatever of it this process may use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def group_folders(controller: str, system: Path = ROOT) -> Iterator[Path]:
    """Yields the folders of a controller's files: of this process's group and of those above it, of both versions.

    Args:
        controller: ``cpu`` or ``memory``.
        system: root of the file system.
    """
    mount = system / "sys/fs/cgroup"
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for controllers, _, group in (line.partition(":")[2].partition(":") for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        # A container sees its own group as the root, and none of those above it.
        folder = root / group.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _folder_quota(folder: Path) -> float:
    """Returns the quota of a group's folder in cores; infinity for none."""
    try:
        limit = folder / "cpu.max"
        files = [limit] if limit.is_file() else [folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
        return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _limit_bytes(folder: Path) -> float:
    """Returns the memory limit of a group's folder; infinity for none.

    ``memory.high`` counts as one: beyond it a group's processes are slowed until they have given memory back.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    return min(_read_bytes(folder / name) for name in names)


def _free_bytes(folder: Path) -> float:
    """Returns what is left of a group's memory limit; infinity without one.

    Its page cache counts as left, which the kernel gives back as it does the machine's.
    """
    limit_bytes = _limit_bytes(folder)
    used_bytes = min(_read_bytes(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
    if math.isinf(limit_bytes) or math.isinf(used_bytes):
        return limit_bytes
    try:
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        counts = {name: int(value) for name, value in rows}
    except (OSError, ValueError):
        counts = {}
    # Version 1 counts a group alone there, and with all below it in the lines of these names.
    prefix = "total_" if "total_inactive_file" in counts else ""
    cache_bytes = sum(counts.get(f"{prefix}{list_name}_file", 0) for list_name in ("active", "inactive"))
    return max(0, limit_bytes - used_bytes + cache_bytes)


def _read_bytes(path: Path) -> float:
    """Returns the number of bytes in a file; infinity for ``max``, or without such a file."""
    try:
        text = path.read_text(encoding="ascii").strip()
        return math.inf if text == "max" else int(text)
    except (OSError, ValueError):
        return math.inf


def _machine_available_bytes(system: Path) -> int:
    try:
        lines = (system / "proc/meminfo").read_text(encoding="ascii").splitlines()
        # MemAvailable counts reclaimable page cache, which a training process fills with its data files.
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return machine_memory_bytes() // 2
