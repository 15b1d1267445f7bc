"""Finds a run that no longer moves, and the rank that holds it up, from the ranks' progress stamps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.monitor.progress import RankProgress, read_progress, waiting_sentences

UNKNOWN_S = 1800.0
"""Limit of a phase that has not been seen to end yet, and of those in `PATIENT`: first steps compile, allocate and open
connections, a disk takes what it takes, and each such wait has a limit of its own."""
PATIENT = ("start", "evaluate", "checkpoint", "snapshot", "sample", "export")
"""Phases that may take much longer than they ever did."""
START_S = 120.0
"""Least limit of these, and until the first step is done, whatever limit is given."""
TIMES = 20.0
"""A phase hangs when it takes this many times the longest that was seen."""
LEAST_S = 60.0
"""No limit that was learned is shorter: storage that stalls for a while is no hang."""
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
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        ranks: int,
        limit_s: float | None,
        describe: Callable[[int], str] | None = None,
        first: int | None = None,
    ) -> None:
        self._path, self._generation, self._ranks = path, generation, ranks
        self._first, self._others = first or 0, first is not None
        self._limit, self._describe = limit_s, describe
        self.last: dict[int, RankProgress] = {}
        """The last stamp of each rank."""
        self._longest: dict[str, float] = {}

    def look(self) -> list[RankProgress]:
        """Reads the stamps, learns from them, and returns them.

        Raises:
            HangError: when no rank has stamped for longer than the phase they are in may take.
        """
        now, found = time.monotonic(), self._read()
        for one in found:
            before = self.last.get(one.rank)
            if before is not None and before.since != one.since:
                self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), one.since - before.since)
            self.last[one.rank] = one
        if found and len(found) == self._ranks and not all(one.phase == "done" for one in found):
            youngest = max(found, key=lambda one: one.since)
            if youngest.age_s(now) > self._allowed(found) * (PATIENCE if self._wait_for_others(found) else 1.0):
                raise self._error(found, now)
        return found

    def refresh(self) -> None:
        """Reads where the ranks stood when they ended, once they have; one that could say so keeps the stamp before."""
        self.last |= {one.rank: one for one in self._read() if one.phase != "done" or one.rank not in self.last}

    def _read(self) -> list[RankProgress]:
        mine = range(self._first, self._first + self._ranks)
        return [one for one in read_progress(self._path) if one.generation == self._generation and one.rank in mine]

    def _wait_for_others(self, found: list[RankProgress]) -> bool:
        """Whether all ranks here wait, so that the one that holds them up is on another node, which tells first."""
        return self._others and all(one.waits_for for one in found)

    def _allowed(self, found: list[RankProgress]) -> float:
        if self._limit is not None:
            slow = any(one.phase in PATIENT or one.step <= 1 for one in found)
            return max(self._limit, START_S) if slow else self._limit
        return max(self._learned(one.phase) for one in found)

    def _learned(self, phase: str) -> float:
        """Returns the limit that the run has taught for a phase, in seconds."""
        known = phase in self._longest and phase not in PATIENT
        return max(LEAST_S, TIMES * self._longest[phase]) if known else UNKNOWN_S

    def _error(self, found: list[RankProgress], now: float) -> HangError:
        busy = [one for one in found if not one.waits_for and one.phase != "done"]
        blamed = min(busy or found, key=lambda one: (one.step, one.since))
        place = self._describe(blamed.rank) if self._describe is not None else f"rank {blamed.rank}"
        text = (
            f"{place} made no progress in {blamed.phase} of step {blamed.step} for {blamed.age_s(now):.1f} s"
            + (f", waiting for {blamed.waits_for}" if blamed.waits_for else "")
        )
        others = [one for one in found if one is not blamed]
        return HangError("; ".join([text, *waiting_sentences(others, 0.0, self._describe, now, limit=3)]), blamed.rank)
