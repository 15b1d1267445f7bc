"""Finds ranks that compute for a larger share of the time than others with the same work.

Wall time doesn't show a slow rank, since all ranks take as long as it does. But its peers wait for it in collectives
while it never waits: polling the ranks' stamps some times a second shows which compute and which wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import NamedTuple

from meshwright.monitor.progress import RankStamp

SAMPLES = 200
"""Polls for one verdict."""
SLOW_FACTOR = 1.4
"""A rank is slow when it computes for this many times the median share of the others,"""
LEAST_SHARE = 0.5
"""and for at least this share of the time: a rank that is mostly idle delays nobody."""
_COMPUTES = ("data", "forward", "backward", "reduce", "optimizer", "record")


class SlowRank(NamedTuple):
    """A rank that delays others."""

    rank: int
    """The slow rank."""
    share: float
    """Share of the time that it computes."""
    others: float
    """Median of that share over the ranks that do the same work."""


class SlowRankWatch:
    """Counts over many polls which ranks compute.

    Args:
        work_key: returns a key of a rank's work; ranks with equal keys are compared.
    """

    def __init__(self, work_key: Callable[[int], Hashable]) -> None:
        self._work_key = work_key
        self._polls = 0
        self._computing: dict[int, int] = {}

    def poll(self, stamps: Sequence[RankStamp]) -> list[SlowRank]:
        """Counts one poll; returns the slow ranks of the last `SAMPLES` polls each time that many are complete."""
        # Startup, evaluation and checkpoints say nothing about the speed of training.
        if not stamps or any(stamp.step < 3 or stamp.phase not in _COMPUTES for stamp in stamps):
            return []
        self._polls += 1
        for stamp in stamps:
            self._computing[stamp.rank] = self._computing.get(stamp.rank, 0) + (not stamp.waits_for)
        if self._polls < SAMPLES:
            return []
        shares = {rank: count / self._polls for rank, count in self._computing.items()}
        self._polls, self._computing = 0, {}
        return self._slow_ranks(shares)

    def _slow_ranks(self, shares: dict[int, float]) -> list[SlowRank]:
        slow = []
        for rank, share in shares.items():
            other_shares = [
                value
                for other_rank, value in shares.items()
                if other_rank != rank and self._do_same_work(other_rank, rank)
            ]
            # The median, since one more slow rank among the others must not hide this one.
            if other_shares and share >= LEAST_SHARE and share > SLOW_FACTOR * median(other_shares):
                slow.append(SlowRank(rank, share, median(other_shares)))
        return slow

    def _do_same_work(self, rank: int, other_rank: int) -> bool:
        return self._work_key(rank) == self._work_key(other_rank)
