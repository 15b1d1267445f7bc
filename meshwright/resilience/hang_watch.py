"""Finds a run that no longer moves, and the rank that holds it up, from the ranks' progress stamps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.monitor.progress import RankStamp, ordinal, read_progress, waiting_sentences
from meshwright.resilience.idle import IdleWatch

UNKNOWN_S = 1800.0
"""Limit of a phase that has not been seen to end yet, and of those in `PATIENT`: first steps compile, allocate and open
connections, a disk takes what it takes, and each such wait has a limit of its own."""
PATIENT = ("start", "restore", "evaluate", "checkpoint", "snapshot", "compare", "sample", "export")
"""Phases that may take much longer than they ever did."""
OUTSIDE = ("start", "restore", "record", "evaluate", "checkpoint", "sample", "export", "done")
"""Phases in which a rank may wait for what isn't on this host: hooks, file systems, connections. In all others it
computes, or waits for other ranks or a local disk, and all ranks of a host asleep at once are deadlocked."""
SUSPECT_S = 0.1
"""Time without a stamp after which processes are looked at."""
STOPPED_S = 0.5
"""A process that is stopped (state T) for so long, with nobody moving, is as good as dead."""
START_S = 120.0
"""Least limit of these, and until the first step is done, whatever limit is given."""
TIMES = 20.0
"""A phase hangs when it takes this many times the longest that was seen."""
COMPILE_S = UNKNOWN_S
"""Limit of each phase of a compiled layout's first step, in which any layer may be compiled, and nothing is learned."""
LEAST_S = 60.0
"""No limit that was learned is shorter: storage that stalls for a while is no hang."""
_DEVICES = 3
PATIENCE = 1.5
"""Limits are so much longer for a host whose ranks all wait, since a host of the same run may know whom for."""


class HangError(LaunchError):
    """No rank made progress for longer than the run ever took before."""

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that the others wait for; -1 when none stands out."""


class HangWatch:
    """Looks at the stamps of all ranks of a host.

    Args:
        path: the progress file.
        generation: of the ranks; stamps of others don't count.
        ranks: how many there are.
        limit_s: seconds without any stamp; None learns a limit for each phase.
        describe: names a rank's place in the mesh.
        first: the host's first rank, where there are ranks on other nodes.
        idle_s: seconds for which all ranks may sleep; 0 for no limit, where ranks wait for a device or another host.
        ask: says, by the number of a rank among those of this host, what its device waits for; None where devices are
            never ahead of stamps.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        ranks: int,
        limit_s: float | None,
        describe: Callable[[int], str] | None = None,
        first: int | None = None,
        idle_s: float = 0.0,
        ask: Callable[[], Mapping[int, str]] | None = None,
        compiles: bool = False,
    ) -> None:
        self._compiles, self._first_step = compiles, 0
        self._path, self._generation, self._ranks = path, generation, ranks
        self._first, self._others = first or 0, first is not None
        self._limit, self._describe = limit_s, describe
        self.last_stamps: dict[int, RankStamp] = {}
        """The last stamp of each rank."""
        self._longest: dict[str, float] = {}
        self._looked = self._awake = time.monotonic()
        self._idle, self._idle_s, self._ask = IdleWatch(), idle_s, ask

    def poll(self) -> list[RankStamp]:
        """Reads the stamps, learns from them, and returns them.

        Raises:
            HangError: when no rank has stamped for longer than the phase they are in may take.
        """
        now, found = time.monotonic(), self._read()
        for one in found:
            before = self.last_stamps.get(one.rank)
            if not self._first_step and one.phase not in ("start", "restore"):
                self._first_step = one.step
            if before is not None and before.since != one.since and not self._may_compile(before):
                self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), one.since - before.since)
            self.last_stamps[one.rank] = one
        if found and len(found) == self._ranks and not all(one.phase == "done" for one in found):
            youngest = max(found, key=lambda one: one.since)
            allowed = self._allowed(found) * (PATIENCE if self._wait_for_others(found) else 1.0)
            # A machine that slept, or a process that was stopped, saw nothing of what the ranks did meanwhile.
            if now - self._looked > allowed / 2:
                self._awake = now
            if now - max(youngest.since, self._awake) > allowed:
                raise self._error(found, now)
            if youngest.age_s(now) < SUSPECT_S:
                self._idle.forget()
            else:
                self._look_closer(found, now)
        self._looked = now
        return found

    def _look_closer(self, found: list[RankStamp], now: float) -> None:
        """Looks at the processes themselves.

        Raises:
            HangError: when one is stopped, or all sleep where none of them can be woken but by another of them.
        """
        self._idle.poll([one.pid for one in found], now)
        for one in found:
            if self._idle.stopped_s(one.pid, now) > STOPPED_S:
                raise self._error(found, now, one, "stopped, as by SIGSTOP")
        asleep = min(min(self._idle.idle_s(one.pid, now), one.age_s(now)) for one in found)
        inside = all(one.step > 1 and one.phase not in OUTSIDE for one in found)
        if self._idle_s and inside and asleep > self._idle_s:
            raise self._error(found, now, why=f"all ranks asleep for {asleep:.1f} s")

    def refresh(self) -> None:
        """Reads where the ranks stood when they ended, once they have; one that could say so keeps the stamp before."""
        self.last_stamps |= {
            one.rank: one for one in self._read() if one.phase != "done" or one.rank not in self.last_stamps
        }

    def _read(self) -> list[RankStamp]:
        mine = range(self._first, self._first + self._ranks)
        return [one for one in read_progress(self._path) if one.generation == self._generation and one.rank in mine]

    def _wait_for_others(self, found: list[RankStamp]) -> bool:
        """Whether all ranks here wait, so that the one that holds them up is on another node, which tells first."""
        return self._others and all(one.waits_for for one in found)

    def _allowed(self, found: list[RankStamp]) -> float:
        least = COMPILE_S if any(self._may_compile(one) for one in found) else 0.0
        if self._limit is not None:
            slow = any(one.phase in PATIENT or one.step <= 1 for one in found)
            return max(self._limit, least, START_S if slow else 0.0)
        return max(least, *(self._learned(one.phase) for one in found))

    def _may_compile(self, one: RankStamp) -> bool:
        """Whether a rank is in the first step of its generation, before which nothing was compiled."""
        return self._compiles and one.step <= self._first_step

    def _learned(self, phase: str) -> float:
        """Returns the limit that the run has taught for a phase, in seconds."""
        known = phase in self._longest and phase not in PATIENT
        return max(LEAST_S, TIMES * self._longest[phase]) if known else UNKNOWN_S

    def _error(self, found: list[RankStamp], now: float, blamed: RankStamp | None = None, why: str = "") -> HangError:
        busy = [one for one in found if not one.waits_for and one.phase != "done"]
        blamed = blamed or min(busy or found, key=lambda one: (one.step, one.since))
        place = self._describe(blamed.rank) if self._describe is not None else f"rank {blamed.rank}"
        text = (
            f"{place} made no progress in {blamed.place} for {blamed.age_s(now):.1f} s"
            + (f", waiting for {blamed.collective}" if blamed.waits_for else _since(blamed))
            + (f", {why}" if why else "")
        )
        others = [one for one in found if one is not blamed]
        waits = waiting_sentences(others, 0.0, self._describe, now, limit=3)
        return HangError("; ".join([text, *waits, *self._devices([blamed, *others])]), blamed.rank)

    def _devices(self, found: list[RankStamp]) -> list[str]:
        """Returns what the devices of the first few ranks wait for; nothing of ranks that can't say so any more."""
        told = self._ask() if self._ask is not None else {}
        words = ((one.rank, told.get(one.rank - self._first)) for one in found)
        return [f"the GPU of rank {rank} hasn't finished {what}" for rank, what in words if what][:_DEVICES]


def _since(one: RankStamp) -> str:
    """Says which collective a rank that computes waited for last."""
    return f", after the {ordinal(one.number)} collective of the step" if one.number else ""
