"""How one thing is timed: in a window long enough that other ranks get their share of the cores within it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

CHUNKS = 5
"""Parts of a window; the fastest counts: whatever else runs on a machine makes work slower, never faster."""
LEAST = 3
"""Runs of what takes longer than a window."""


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """Times work on one rank's device."""

    device: torch.device
    """Where the work runs."""
    window_s: float
    """Least time that the work is repeated for."""
    chunks: int = CHUNKS
    """Parts of the window; 1 where ranks outnumber the cores, so that each has its turns within the part."""
    sharing: float = 0.0
    """Ranks to a core, where each computes with one thread: its own processor time is read then, which other programs
    don't add to, and counts that many times. 0 reads the time that passes."""

    def sync(self) -> None:
        """Waits until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns seconds of one run of ``work``, of at least a window's repeats after one that doesn't count."""
        work()
        once = max(self.timed(work, 1), 1e-7)
        repeats = max(1, min(10_000, round(self.window_s / self.chunks / once)))
        if once > self.window_s:
            return once if self.chunks == 1 else min(once, *(self.timed(work, 1) for _ in range(LEAST - 1)))
        return min(self.timed(work, repeats) for _ in range(self.chunks))

    def timed(self, work: Callable[[], object], repeats: int) -> float:
        """Returns seconds of one of so many runs."""
        self.sync()
        now = time.thread_time if self.sharing else time.perf_counter
        begun = now()
        for _ in range(repeats):
            work()
        self.sync()
        return (now() - begun) * (self.sharing or 1.0) / repeats


def agreed(values: list[float], largest: bool) -> list[float]:
    """Returns the mean over all ranks of each value, or the largest; alone without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    given = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(given, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return [float(value) / (1 if largest else dist.get_world_size()) for value in given]
