"""Keeps freed tensor memory in the process: glibc returns big blocks to the kernel, and every page faults again.

By default glibc serves blocks over 32 MiB by mmap and gives them back when freed. Measured with
``benchmarks/bench_host_memory.py`` on one core of a busy machine, default against kept: doubling a tensor of 64 MiB
1.5 against 5.7 GiB/s, of 200 MiB 1.7 against 4.6 GiB/s, of 4 MiB and less no difference; a training step with 64 MiB of
logits 64,628 against 7,649 page faults, 1.24 against 1.06 s, 1.4 against 0.5 s in the kernel. The price is holes: the
peak of that step rose from 678 to 833 MiB, and that of a 20M GPT-2 by 3 % at 2 and 4 rows of 256 and by 11 % at 8 rows.
``launch.keep_memory = false`` keeps the peak low instead. The top pad made no difference to peak or faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.control_groups import group_folders

M_TRIM_THRESHOLD = -1
"""Source: glibc malloc.h."""
M_TOP_PAD = -2
"""Source: glibc malloc.h."""
M_MMAP_MAX = -4
"""Source: glibc malloc.h."""
TOP_PAD_BYTES = 64 * 1024 * 1024
"""Extra bytes by which the heap grows at once."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The outcome of `keep_host_memory`."""

    kept: bool
    """True when freed memory now stays in the process."""
    reason: str
    """The settings, or why none was changed."""


def keep_host_memory(top_pad_bytes: int = TOP_PAD_BYTES) -> HostMemory:
    """Sets glibc's malloc to serve big blocks from the heap and never to shrink it.

    Args:
        top_pad_bytes: extra bytes by which the heap grows at once.

    Returns:
        The outcome; nothing is changed without glibc, or where the user tuned malloc already.
    """
    if not _has_glibc():
        return HostMemory(False, "the C library is not glibc")
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return HostMemory(False, "the environment tunes malloc already")
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # No mmap blocks, so every block comes from the heap, which is never trimmed.
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, top_pad_bytes))
    if not all(mallopt(name, value) for name, value in settings):
        return HostMemory(False, "mallopt refused")
    return HostMemory(True, f"mmap_max=0, trim_threshold=off, top_pad={top_pad_bytes} B")


def _has_glibc() -> bool:
    try:
        return sys.platform.startswith("linux") and bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False


RANK_SCORE, SUPERVISOR_SCORE = 500, -500
"""oom_score_adj of a rank and of its supervisor, in thousandths of the memory: a killed rank is replaced, but the
supervisor, which may be larger, holds the state. Source: proc(5), oom_score_adj."""


def count_oom_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory: of this control group, else of this host.

    0 where neither is known. Source: Documentation/admin-guide/cgroup-v2.rst, ``memory.events``; cgroup-v1/memory.rst,
    ``memory.oom_control``; proc(5), vmstat.
    """
    names = ("memory.events", "memory.oom_control")
    groups = [folder / name for folder in group_folders("memory") for name in names]
    for path in (*groups, Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
            if "oom_kill" in fields:
                return int(fields["oom_kill"])
    return 0


def prefer_for_killing(score: int) -> None:
    """Sets how much the kernel prefers this process when it kills for lack of memory, as far as permitted."""
    with contextlib.suppress(OSError):
        # Lowering the score needs privileges: then it stays as it was.
        Path("/proc/self/oom_score_adj").write_text(str(score), encoding="ascii")
