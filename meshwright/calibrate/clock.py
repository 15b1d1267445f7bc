"""Times one operation on a rank's device, in windows long enough for other ranks to get their share of the cores."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

CHUNKS = 5
"""Chunks of a window, of which the fastest counts: other programs make work slower, never faster. Where a rank has less
than a core the middle one does: a step's work also begins with what others left in the caches after each of its turns.
Four processes of 0.45 cores by a quota each took 1 to 12 % more of the processor in the middle chunk than in the
fastest, of products, GELU and additions."""
LEAST = 3
"""Runs of an operation that is longer than a window."""
DEVICE_CHUNKS = 3
"""Chunks of a window on a GPU, of which the middle one counts: its clock rises and falls, and no other program runs."""
QUEUED_RUNS = 40
"""Most runs of a chunk on a GPU: those of up to 25 kernels fit the 1,024 launches that its queue takes ahead."""
BLOCKER, BLOCKER_COPIES = 8192, 4
"""Rows and columns of the product that keeps a GPU at work while the host fills its queue (1.1 TFLOP, over 1 ms), and
the copies of as many bytes behind each, a fifth of the time. Products in a row meet a GPU's limit of power within a
tenth of a second (8192^3 in bf16 on an H100 of 700 W: 720, then 587 TFLOP/s), and behind copies alone they take what no
step leaves them (830); a step's lie between kernels that wait for memory, and took 748."""
MOST_BLOCKERS = 20
"""Most of these products before a chunk."""
REST = 0.25
"""Seconds of copies before a chunk over the chunk's own, for the same reason."""


@dataclass(frozen=True)
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
    that of other programs, and without the pauses of a quota), times this number. 0 reads wall-clock time."""

    def sync(self) -> None:
        """Waits until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns seconds of one run of ``work``, measured over at least a window after a warm-up run.

        On a GPU they are the device's alone: what its host takes to launch is `launch_seconds`.
        """
        work()
        if self.device.type == "cuda":
            return self._device_seconds(work)
        single_s = max(self.timed(work, 1), 1e-7)
        # As many repeats as fill a chunk of the window.
        repeats = max(1, min(10_000, round(self.window_s / self.chunks / single_s)))
        # Longer than a window: a few single runs.
        if single_s > self.window_s:
            return single_s if self.chunks == 1 else self._counted(single_s, *self._runs(work, 1, LEAST - 1))
        return self._counted(*self._runs(work, repeats, self.chunks))

    def _runs(self, work: Callable[[], object], repeats: int, chunks: int) -> list[float]:
        return [self.timed(work, repeats) for _ in range(chunks)]

    def _counted(self, *seconds: float) -> float:
        """Returns the chunk that counts: the fastest, or the middle one where a rank has less than a core."""
        return statistics.median(seconds) if self.sharing > 1.0 else min(seconds)

    def launch_seconds(self, work: Callable[[], object]) -> float:
        """Returns wall-clock seconds of one of many runs of ``work``, which the device does faster than they come."""
        self.timed(work, QUEUED_RUNS)
        return min(self.timed(work, 10 * QUEUED_RUNS) for _ in range(CHUNKS))

    def heat(self, seconds: float) -> None:
        """Keeps a GPU at work until its clock is that of work; does nothing on processor cores."""
        if self.device.type != "cuda":
            return
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            self._block(MOST_BLOCKERS)
            self.sync()

    def _device_seconds(self, work: Callable[[], object]) -> float:
        """Returns seconds of a run on the device, whose queue the host has filled ahead.

        Products and copies run before each chunk: they keep clock and power where training has them, and nothing of a
        chunk is in the device's cache when it begins.
        """
        self.sync()
        start_s = time.perf_counter()
        work()
        host_s = time.perf_counter() - start_s
        single_s = max(self._queued_seconds(work, 1, host_s), 1e-7)
        if single_s > self.window_s:
            return min(single_s, *(self._queued_seconds(work, 1, host_s, single_s) for _ in range(LEAST - 1)))
        repeats = max(1, min(QUEUED_RUNS, round(self.window_s / DEVICE_CHUNKS / single_s)))
        return statistics.median(self._queued_seconds(work, repeats, host_s, single_s) for _ in range(DEVICE_CHUNKS))

    def _queued_seconds(self, work: Callable[[], object], repeats: int, host_s: float, single_s: float = 0.0) -> float:
        """Returns the mean device seconds of ``repeats`` runs behind as much other work as hides their launches."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._block(min(MOST_BLOCKERS, 1 + math.ceil(1.5 * repeats * host_s / self._blocker_s)))
        self._copy(math.ceil(REST * repeats * single_s / self._copy_s))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        self.sync()
        return 1e-3 * start.elapsed_time(end) / repeats

    def _block(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._blocker, self._blocker, out=self._blocked)
            self._copy(BLOCKER_COPIES)

    def _copy(self, count: int) -> None:
        for _ in range(count):
            self._blocked.copy_(self._blocker)

    @cached_property
    def _blocker(self) -> torch.Tensor:
        """(BLOCKER, BLOCKER) in 16 bits, values of training's size."""
        return torch.randn(BLOCKER, BLOCKER, device=self.device).to(torch.float16).mul_(0.01)

    @cached_property
    def _blocked(self) -> torch.Tensor:
        return torch.empty_like(self._blocker)

    @cached_property
    def _blocker_s(self) -> float:
        """Seconds of such a product with its copies."""
        self._block(2)
        return max(self.timed(lambda: self._block(1), LEAST), 1e-5)

    @cached_property
    def _copy_s(self) -> float:
        """Seconds of such a copy."""
        self._copy(2)
        return max(self.timed(lambda: self._copy(1), 10), 1e-5)

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
