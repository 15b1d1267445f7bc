"""Finds ranks that compute for a larger share of the time than others with the same work.

Wall time doesn't show a slow rank, since all ranks take as long as it does. But its peers wait for it in collectives
while it never waits: polling the ranks' stamps some times a second shows which compute and which wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import NamedTuple

from meshwright.monitor.progress import RankStamp

SAMPLES = 200
"""Polls for one verdict,"""
EARLY_SAMPLES, EARLY_STEPS = 40, 10
"""or this many, in this many steps, where chance can't explain it: a straggler is named within 20 steps."""
EARLY_DEVIATIONS = 4.0
"""Standard deviations that a share lies above the bound in an early verdict."""
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
        self._polls = self._first_step = 0
        self._computing: dict[int, int] = {}

    def poll(self, stamps: Sequence[RankStamp]) -> list[SlowRank]:
        """Counts one poll; returns the slow ranks as soon as enough polls show them."""
        # Startup, evaluation and checkpoints say nothing about the speed of training.
        if not stamps or any(stamp.step < 3 or stamp.phase not in _COMPUTES for stamp in stamps):
            return []
        step = min(stamp.step for stamp in stamps)
        if not self._polls:
            self._first_step = step
        self._polls += 1
        for stamp in stamps:
            self._computing[stamp.rank] = self._computing.get(stamp.rank, 0) + (not stamp.waits_for)
        is_complete = self._polls >= SAMPLES
        if not is_complete and (self._polls < EARLY_SAMPLES or step - self._first_step < EARLY_STEPS):
            return []
        slow = self._slow_ranks(0.0 if is_complete else EARLY_DEVIATIONS)
        if slow or is_complete:
            self._polls, self._computing = 0, {}
        return slow

    def _slow_ranks(self, deviations: float) -> list[SlowRank]:
        """Returns the ranks whose share lies above the bound by so many standard deviations of the two shares."""
        shares = {rank: count / self._polls for rank, count in self._computing.items()}
        slow = []
        for rank, share in shares.items():
            other_shares = [
                value
                for other_rank, value in shares.items()
                if other_rank != rank and self._do_same_work(other_rank, rank)
            ]
            if not other_shares or share < LEAST_SHARE:
                continue
            # The median, since one more slow rank among the others must not hide this one.
            others = median(other_shares)
            # Polls as independent draws: the variance of a share p of n polls is p (1 - p) / n.
            variance = (share * (1.0 - share) + SLOW_FACTOR**2 * others * (1.0 - others)) / self._polls
            if share - SLOW_FACTOR * others > deviations * math.sqrt(variance):
                slow.append(SlowRank(rank, share, others))
        return slow

    def _do_same_work(self, rank: int, other_rank: int) -> bool:
        return self._work_key(rank) == self._work_key(other_rank)
