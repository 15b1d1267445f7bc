"""Times one operation on a rank's device, in windows long enough for other ranks to get their share of the cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

CHUNKS = 5
"""Chunks of a window, of which the fastest counts: other programs make work slower, never faster."""
LEAST = 3
"""Runs of an operation that is longer than a window."""


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """Times work on one rank's device."""

    device: torch.device
    """Device that the work runs on."""
    window_s: float
    """Least duration of the repeated work."""
    chunks: int = CHUNKS
    """Chunks of the window; 1 where ranks outnumber the cores, so that every rank is scheduled within it."""
    sharing: float = 0.0
    """Ranks per core, where each computes with one thread: the timer then reads the thread's processor time (without
    that of other programs), times this number. 0 reads wall-clock time."""

    def sync(self) -> None:
        """Waits until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns seconds of one run of ``work``, measured over at least a window after a warm-up run."""
        work()
        single_s = max(self.timed(work, 1), 1e-7)
        # As many repeats as fill a chunk of the window.
        repeats = max(1, min(10_000, round(self.window_s / self.chunks / single_s)))
        # Longer than a window: a few single runs, of which the fastest counts.
        if single_s > self.window_s:
            return single_s if self.chunks == 1 else min(single_s, *(self.timed(work, 1) for _ in range(LEAST - 1)))
        return min(self.timed(work, repeats) for _ in range(self.chunks))

    def timed(self, work: Callable[[], object], repeats: int) -> float:
        """Returns the mean seconds of ``repeats`` runs."""
        self.sync()
        # Thread time excludes other programs, but also waiting for a GPU: only CPU ranks use it.
        read_clock = time.thread_time if self.sharing else time.perf_counter
        start_s = read_clock()
        for _ in range(repeats):
            work()
        self.sync()
        return (read_clock() - start_s) * (self.sharing or 1.0) / repeats


def agreed(values: list[float], largest: bool) -> list[float]:
    """Reduces each value over all ranks to its mean, or its largest; does nothing without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return [float(value) / (1 if largest else dist.get_world_size()) for value in reduced]
