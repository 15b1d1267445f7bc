"""The kernel's view of ranks without progress: whether a process is stopped, and whether it is idle.

A rank that computes, or would if it had a core, shows in the CPU time that its threads get and wait for
(``/proc/<pid>/task/<tid>/schedstat``) and in their state; one that waits for a disk or memory in their state alone.
A rank with neither for seconds is idle. Linux only: elsewhere no process is ever reported idle or stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MAIN_SHARE = 0.02
"""Largest share of the time for which the main thread of an idle process runs or waits for a core."""
OTHER_SHARE = 0.25
"""The same for its other threads: displays draw, store servers listen."""
GAP_S = 1.0
"""Polls further apart are discarded: the polling process itself was blocked in between."""


class IdleWatch:
    """Polls processes some times a second, and keeps since when each has been stopped or idle without a break."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._polled_at = -GAP_S
        self._cpu_demand_ns: dict[int, dict[int, int]] = {}
        self._idle_since: dict[int, float] = {}
        self._stopped_since: dict[int, float] = {}

    def forget(self) -> None:
        """Forgets earlier polls, because the processes have made progress."""
        self._cpu_demand_ns, self._idle_since, self._stopped_since = {}, {}, {}

    def poll(self, pids: Iterable[int], now_s: float) -> None:
        """Reads the state and CPU demand of all processes once.

        Args:
            pids: of the processes.
            now_s: time.monotonic().
        """
        elapsed_s, self._polled_at = now_s - self._polled_at, now_s
        if not 0 < elapsed_s <= GAP_S:
            self.forget()
        for pid in pids:
            states, demand_ns = self._read_threads(pid)
            previous_ns, self._cpu_demand_ns[pid] = self._cpu_demand_ns.get(pid), demand_ns
            if states.get(pid) == "T":
                self._stopped_since.setdefault(pid, now_s)
            else:
                self._stopped_since.pop(pid, None)
            if previous_ns is None or not self._is_idle(pid, states, previous_ns, demand_ns, elapsed_s):
                self._idle_since.pop(pid, None)
            else:
                self._idle_since.setdefault(pid, now_s - elapsed_s)

    def idle_s(self, pid: int, now_s: float) -> float:
        """Returns the seconds for which a process has done nothing."""
        return now_s - self._idle_since[pid] if pid in self._idle_since else 0.0

    def stopped_s(self, pid: int, now_s: float) -> float:
        """Returns the seconds for which a process has been stopped, as by SIGSTOP."""
        return now_s - self._stopped_since[pid] if pid in self._stopped_since else 0.0

    def _is_idle(
        self, pid: int, states: dict[int, str], previous_ns: dict[int, int], demand_ns: dict[int, int], elapsed_s: float
    ) -> bool:
        """Whether no thread wanted a core since the last look, or waits for a core, a disk (D) or a debugger (t)."""
        if pid not in previous_ns or pid not in demand_ns or {"D", "t"} & set(states.values()):
            return False
        # CPU demand: running or runnable time per elapsed time, so a starved thread counts as working.
        shares = {tid: (ns - previous_ns.get(tid, ns)) / 1e9 / elapsed_s for tid, ns in demand_ns.items()}
        # The kernel adds a wait for a core when it ends: until then the thread's state (R) alone shows it.
        if any(share == 0.0 and states.get(tid) == "R" for tid, share in shares.items()):
            return False
        return shares.pop(pid) < MAIN_SHARE and all(share < OTHER_SHARE for share in shares.values())

    def _read_threads(self, pid: int) -> tuple[dict[int, str], dict[int, int]]:
        """Returns by thread id its state and the ns for which it ran or waited for a core; empty if unknown."""
        states, demand_ns = {}, {}
        try:
            for tid in map(int, os.listdir(self._proc / f"{pid}/task")):
                folder = self._proc / f"{pid}/task/{tid}"
                # The state follows the command name in parentheses, which may itself contain any character.
                states[tid] = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                ran, waited, *_ = (folder / "schedstat").read_text().split()
                demand_ns[tid] = int(ran) + int(waited)
        except (OSError, ValueError, IndexError):
            return states, {}
        return states, demand_ns
