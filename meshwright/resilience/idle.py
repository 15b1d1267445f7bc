"""What the kernel says of ranks that no longer move: whether they are stopped, and whether they do anything at all.

A rank that computes, or would if it had a core, is seen by the CPU time that its threads get and wait for; one that
waits for a disk, a network file system or memory by their state. One that does neither for seconds sleeps. Linux only:
elsewhere nothing is known, and nothing follows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MAIN_SHARE = 0.02
"""A main thread that wants a core for a larger share of the time does something."""
OTHER_SHARE = 0.25
"""Other threads may want one for so much: displays draw, servers of stores listen."""
GAP_S = 1.0
"""Looks that are further apart say nothing of the time between: the one who looks was held up itself."""


class IdleWatch:
    """Looks at processes some times a second, and keeps since when each has been stopped or idle without a break."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._looked = -GAP_S
        self._wanted: dict[int, dict[int, int]] = {}
        self._idle: dict[int, float] = {}
        self._stopped: dict[int, float] = {}

    def forget(self) -> None:
        """Drops what was seen: the processes have moved."""
        self._wanted, self._idle, self._stopped = {}, {}, {}

    def poll(self, pids: Iterable[int], now: float) -> None:
        """Takes one look.

        Args:
            pids: of the processes.
            now: time.monotonic().
        """
        passed, self._looked = now - self._looked, now
        if not 0 < passed <= GAP_S:
            self.forget()
        for pid in pids:
            states, wanted = self._threads(pid)
            before, self._wanted[pid] = self._wanted.get(pid), wanted
            if states.get(pid) == "T":
                self._stopped.setdefault(pid, now)
            else:
                self._stopped.pop(pid, None)
            if before is None or not self._rests(pid, states, before, wanted, passed):
                self._idle.pop(pid, None)
            else:
                self._idle.setdefault(pid, now - passed)

    def idle_s(self, pid: int, now: float) -> float:
        """Returns the seconds for which a process has done nothing."""
        return now - self._idle[pid] if pid in self._idle else 0.0

    def stopped_s(self, pid: int, now: float) -> float:
        """Returns the seconds for which a process has been stopped, as by SIGSTOP."""
        return now - self._stopped[pid] if pid in self._stopped else 0.0

    def _rests(
        self, pid: int, states: dict[int, str], before: dict[int, int], wanted: dict[int, int], passed: float
    ) -> bool:
        """Whether no thread wanted a core since the last look, or waits for a disk (D) or a debugger (t)."""
        if pid not in before or pid not in wanted or {"D", "t"} & set(states.values()):
            return False
        shares = {tid: (ns - before.get(tid, ns)) / 1e9 / passed for tid, ns in wanted.items()}
        return shares.pop(pid) < MAIN_SHARE and all(share < OTHER_SHARE for share in shares.values())

    def _threads(self, pid: int) -> tuple[dict[int, str], dict[int, int]]:
        """Returns each thread's state, and the nanoseconds for which it ran or waited for a core; none if unknown."""
        states, wanted = {}, {}
        try:
            for tid in map(int, os.listdir(self._proc / f"{pid}/task")):
                folder = self._proc / f"{pid}/task/{tid}"
                # The name before it, in brackets, may hold anything.
                states[tid] = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                ran, waited, *_ = (folder / "schedstat").read_text().split()
                wanted[tid] = int(ran) + int(waited)
        except (OSError, ValueError, IndexError):
            return states, {}
        return states, wanted
