"""Detects a hung run, and the rank that blocks the others, from the ranks' progress stamps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.monitor.progress import RankStamp, ordinal, read_progress, waiting_sentences
from meshwright.resilience.idle import IdleWatch

UNLEARNED_LIMIT_S = 1800.0
"""Limit of a phase that hasn't been seen to end yet, and of `LONG_PHASES`: first steps compile, allocate and open
connections, disks vary, and each such wait has a timeout elsewhere."""
LONG_PHASES = ("start", "restore", "evaluate", "checkpoint", "snapshot", "compare", "sample", "export", "server")
"""Phases that may last much longer than ever before."""
EXTERNAL_PHASES = ("start", "restore", "data", "record", "evaluate", "checkpoint", "sample", "export", "done", "server")
"""Phases in which a rank may wait for something outside this host: hooks, connections, file systems, of which those in
user space (FUSE) let a reader sleep as a deadlock does. In all others it computes, or waits for other ranks or a local
disk, and all ranks of a host asleep at once are deadlocked."""
SUSPECT_S = 0.1
"""Time without a stamp after which the processes themselves are checked."""
STOPPED_S = 0.5
"""A process that is stopped (state T) for so long, while no rank stamps, counts as hung."""
START_LIMIT_S = 120.0
"""Least limit of `LONG_PHASES` phases, and of all phases until the first step is done, under any ``limit_s``."""
LIMIT_FACTOR = 20.0
"""A phase hangs when it lasts this many times its longest duration so far."""
COMPILE_LIMIT_S = UNLEARNED_LIMIT_S
"""Limit of each phase of a compiled layout's first step, which compiles; its durations don't teach limits."""
LEAST_LIMIT_S = 60.0
"""Least learned limit: storage that stalls for a while is no hang."""
_DEVICES = 3
WAITING_HOST_FACTOR = 1.5
"""Factor on the limits of a host whose ranks all wait: the host with the hung rank reports first."""


class HangError(LaunchError):
    """No rank made progress for longer than its limit."""

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that the others wait for; -1 when unknown."""


class HangWatch:
    """Watches the progress stamps of a host's ranks.

    Args:
        path: the progress file.
        generation: of the ranks; stamps of other generations are ignored.
        ranks: number of ranks on this host.
        limit_s: seconds without any stamp; None learns a limit for each phase.
        describe: names a rank's coordinates in the mesh.
        first_rank: the host's first rank when other nodes have ranks too; else None.
        idle_s: seconds for which all ranks may sleep; 0 for no limit, where ranks wait for a device or another host.
        query_devices: returns, by local rank, the operation that its device waits for; None for ranks without a device
            queue.
        compiles: whether the layout compiles layers in its first step.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        ranks: int,
        limit_s: float | None,
        describe: Callable[[int], str] | None = None,
        first_rank: int | None = None,
        idle_s: float = 0.0,
        query_devices: Callable[[], Mapping[int, str]] | None = None,
        compiles: bool = False,
    ) -> None:
        self._compiles, self._first_step = compiles, 0
        self._path, self._generation, self._ranks = path, generation, ranks
        self._first_rank, self._has_other_nodes = first_rank or 0, first_rank is not None
        self._fixed_limit_s, self._describe = limit_s, describe
        self.last_stamps: dict[int, RankStamp] = {}
        """The last stamp of each rank."""
        self._longest_s: dict[str, float] = {}
        self._polled_at = self._awake_since = time.monotonic()
        self._idle, self._idle_s, self._query_devices = IdleWatch(), idle_s, query_devices

    def poll(self) -> list[RankStamp]:
        """Reads the stamps, learns limits from them, and returns them.

        Raises:
            HangError: when no rank has stamped for longer than its phase's limit.
        """
        now_s, stamps = time.monotonic(), self._read_stamps()
        for stamp in stamps:
            previous = self.last_stamps.get(stamp.rank)
            # The generation's first step is the one at which ranks leave start and restore.
            if not self._first_step and stamp.phase not in ("start", "restore"):
                self._first_step = stamp.step
            # A changed stamp ends the previous phase, whose duration teaches its limit.
            if previous is not None and previous.since != stamp.since and not self._may_compile(previous):
                self._longest_s[previous.phase] = max(
                    self._longest_s.get(previous.phase, 0.0), stamp.since - previous.since
                )
            self.last_stamps[stamp.rank] = stamp
        if stamps and len(stamps) == self._ranks and not all(stamp.phase == "done" for stamp in stamps):
            # The run hangs only when every rank is silent: one that progresses may be what others wait for.
            youngest = max(stamps, key=lambda stamp: stamp.since)
            allowed = self._limit_s(stamps) * (WAITING_HOST_FACTOR if self._all_wait(stamps) else 1.0)
            # A gap between polls means that this process or the machine was suspended: count from now.
            if now_s - self._polled_at > allowed / 2:
                self._awake_since = now_s
            if now_s - max(youngest.since, self._awake_since) > allowed:
                raise self._make_error(stamps, now_s)
            # Reading /proc costs more than reading stamps: only for silent ranks.
            if youngest.age_s(now_s) < SUSPECT_S:
                self._idle.forget()
            else:
                self._check_processes(stamps, now_s)
        self._polled_at = now_s
        return stamps

    def _check_processes(self, stamps: list[RankStamp], now_s: float) -> None:
        """Checks the kernel's view of the processes.

        Raises:
            HangError: when one is stopped, or all sleep in phases where only another of these ranks could wake them.
        """
        self._idle.poll([stamp.pid for stamp in stamps], now_s)
        for stamp in stamps:
            # A stopped process keeps its connections open: no peer would notice.
            if self._idle.stopped_s(stamp.pid, now_s) > STOPPED_S:
                raise self._make_error(stamps, now_s, stamp, "stopped, as by SIGSTOP")
        asleep_s = min(min(self._idle.idle_s(stamp.pid, now_s), stamp.age_s(now_s)) for stamp in stamps)
        # Not in the first step, which allocates and connects, nor where something outside may be awaited.
        inside = all(stamp.step > 1 and not _may_wait_outside(stamp) for stamp in stamps)
        if self._idle_s and inside and asleep_s > self._idle_s:
            raise self._make_error(stamps, now_s, reason=f"all ranks asleep for {asleep_s:.1f} s")

    def refresh(self) -> None:
        """Reads the final stamps of ended ranks; a rank that stamped "done" keeps its stamp before that."""
        self.last_stamps |= {
            stamp.rank: stamp
            for stamp in self._read_stamps()
            if stamp.phase != "done" or stamp.rank not in self.last_stamps
        }

    def _read_stamps(self) -> list[RankStamp]:
        local_ranks = range(self._first_rank, self._first_rank + self._ranks)
        return [
            stamp
            for stamp in read_progress(self._path)
            if stamp.generation == self._generation and stamp.rank in local_ranks
        ]

    def _all_wait(self, stamps: list[RankStamp]) -> bool:
        """Whether all local ranks wait, so that the hung rank is on another node, which should report it first."""
        return self._has_other_nodes and all(stamp.waits_for for stamp in stamps)

    def _limit_s(self, stamps: list[RankStamp]) -> float:
        compile_limit_s = COMPILE_LIMIT_S if any(self._may_compile(stamp) for stamp in stamps) else 0.0
        if self._fixed_limit_s is not None:
            # A fixed limit still must not end slow phases before `START_LIMIT_S`.
            slow = any(stamp.phase in LONG_PHASES or stamp.step <= 1 for stamp in stamps)
            return max(self._fixed_limit_s, compile_limit_s, START_LIMIT_S if slow else 0.0)
        return max(compile_limit_s, *(self._learned_limit_s(stamp.phase) for stamp in stamps))

    def _may_compile(self, stamp: RankStamp) -> bool:
        """Whether a rank is still in the first step of its generation, which compiles."""
        return self._compiles and stamp.step <= self._first_step

    def _learned_limit_s(self, phase: str) -> float:
        """Returns a phase's limit, `LIMIT_FACTOR` its longest duration so far, in seconds."""
        is_learned = phase in self._longest_s and phase not in LONG_PHASES
        return max(LEAST_LIMIT_S, LIMIT_FACTOR * self._longest_s[phase]) if is_learned else UNLEARNED_LIMIT_S

    def _make_error(
        self, stamps: list[RankStamp], now_s: float, blamed: RankStamp | None = None, reason: str = ""
    ) -> HangError:
        # Blame a rank that waits for nobody, at the earliest step, longest in its phase.
        busy = [stamp for stamp in stamps if not stamp.waits_for and stamp.phase != "done"]
        blamed = blamed or min(busy or stamps, key=lambda stamp: (stamp.step, stamp.since))
        description = self._describe(blamed.rank) if self._describe is not None else f"rank {blamed.rank}"
        text = (
            f"{description} made no progress in {blamed.place} for {blamed.age_s(now_s):.1f} s"
            + (f", waiting for {blamed.collective}" if blamed.waits_for else _since(blamed))
            + (f", {reason}" if reason else "")
        )
        other_stamps = [stamp for stamp in stamps if stamp is not blamed]
        waits = waiting_sentences(other_stamps, 0.0, self._describe, now_s, limit=3)
        return HangError("; ".join([text, *waits, *self._device_sentences([blamed, *other_stamps])]), blamed.rank)

    def _device_sentences(self, stamps: list[RankStamp]) -> list[str]:
        """Returns a sentence for each of the first `_DEVICES` ranks whose device is waiting for an operation."""
        answers = self._query_devices() if self._query_devices is not None else {}
        rank_answers = ((stamp.rank, answers.get(stamp.rank - self._first_rank)) for stamp in stamps)
        return [f"the GPU of rank {rank} hasn't finished {operation}" for rank, operation in rank_answers if operation][
            :_DEVICES
        ]


def _may_wait_outside(stamp: RankStamp) -> bool:
    """Whether a rank may wait for something that isn't a rank of this host."""
    # A later stage of a pipeline receives its first input while it still counts as reading rows.
    return stamp.phase in EXTERNAL_PHASES and not (stamp.phase == "data" and stamp.waits_for)


def _since(stamp: RankStamp) -> str:
    """Names the last collective of a rank that computes."""
    return f", after the {ordinal(stamp.number)} collective of the step" if stamp.number else ""
