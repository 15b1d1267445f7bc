"""Finds ranks that are slower than those who do the same work: by how much of the time they compute.

Wall time can't tell: a slow rank makes all of them take as long. Its peers wait for it in collectives, though, and it
waits for nobody; looking at the ranks' stamps some times a second shows who computes and who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import NamedTuple

from meshwright.monitor.progress import RankStamp

SAMPLES = 200
"""Looks of which a verdict is made."""
TIMES = 1.4
"""A rank is slow that computes for this many times as long as the others do, in the median."""
LEAST_SHARE = 0.5
"""and for at least this share of the time: one that is hardly used holds nobody up."""
_COMPUTES = ("data", "forward", "backward", "reduce", "optimizer", "record")


class Slow(NamedTuple):
    """A rank that holds others up."""

    rank: int
    """Which one."""
    share: float
    """Share of the time that it computes."""
    others: float
    """Median of that share over the ranks that do the same work."""


class SlowWatch:
    """Counts, look by look, who computes.

    Args:
        alike: names a rank's work; ranks with equal names are compared.
    """

    def __init__(self, alike: Callable[[int], Hashable]) -> None:
        self._alike = alike
        self._looks = 0
        self._busy: dict[int, int] = {}

    def poll(self, found: Sequence[RankStamp]) -> list[Slow]:
        """Takes one look; returns the slow ranks of the last `SAMPLES` looks when these are full."""
        if not found or any(one.step < 3 or one.phase not in _COMPUTES for one in found):
            return []
        self._looks += 1
        for one in found:
            self._busy[one.rank] = self._busy.get(one.rank, 0) + (not one.waits_for)
        if self._looks < SAMPLES:
            return []
        shares = {rank: count / self._looks for rank, count in self._busy.items()}
        self._looks, self._busy = 0, {}
        return self._verdict(shares)

    def _verdict(self, shares: dict[int, float]) -> list[Slow]:
        slow = []
        for rank, share in shares.items():
            others = [value for other, value in shares.items() if other != rank and self._same(other, rank)]
            if others and share >= LEAST_SHARE and share > TIMES * median(others):
                slow.append(Slow(rank, share, median(others)))
        return slow

    def _same(self, one: int, other: int) -> bool:
        return self._alike(one) == self._alike(other)
