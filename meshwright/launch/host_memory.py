"""Keeps freed tensor memory in the process: glibc hands big blocks back to the kernel, and every page faults again."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

M_TRIM_THRESHOLD = -1
"""Source: glibc malloc.h."""
M_TOP_PAD = -2
"""Source: glibc malloc.h."""
M_MMAP_MAX = -4
"""Source: glibc malloc.h."""
TOP_PAD_BYTES = 64 * 1024 * 1024
"""How much more than asked for the heap grows by at once."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What was done to the process's allocator."""

    kept: bool
    """True when freed memory now stays in the process."""
    reason: str
    """What was set, or why nothing was."""


def keep_host_memory(top_pad_bytes: int = TOP_PAD_BYTES) -> HostMemory:
    """Tells glibc's malloc to serve big blocks from the heap and never to shrink it.

    Args:
        top_pad_bytes: how much more than asked for the heap grows by.

    Returns:
        What was done; nothing where the C library isn't glibc or where the user already tuned it.
    """
    if not sys.platform.startswith("linux") or not os.confstr("CS_GNU_LIBC_VERSION"):
        return HostMemory(False, "the C library is not glibc")
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return HostMemory(False, "the environment tunes malloc already")
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, top_pad_bytes))
    if not all(mallopt(name, value) for name, value in settings):
        return HostMemory(False, "mallopt refused")
    return HostMemory(True, f"mmap_max=0, trim_threshold=off, top_pad={top_pad_bytes} B")
