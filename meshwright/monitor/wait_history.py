"""Waits of ranks over the recorded steps of a run, reduced to what drawings need."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwright.monitor.timeline import StepTimeline, TimelineReader

_KEPT_STEPS = 4
"""Newest steps whose spans are kept: several, since the ranks don't finish the newest one together."""
_MOST_STEPS = 4096
"""Recorded steps that are kept; of more, every second one of the older half goes."""


@dataclass
class WaitHistory:
    """Each rank's share of waiting in each recorded step, and the spans of the newest ones."""

    shares: dict[int, dict[int, float]] = field(default_factory=dict)
    """Share of the step in which the rank waited, by step and rank."""
    newest: dict[int, dict[int, StepTimeline]] = field(default_factory=dict)
    """Timelines of the newest steps, by step and rank."""
    operations: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """By collective and rank: number of waits, and their seconds."""

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Reads all timelines of a run directory."""
        history = cls()
        history.update(TimelineReader(run_dir))
        return history

    def update(self, reader: TimelineReader) -> bool:
        """Adds what a reader finds; returns whether there was anything."""
        count = 0
        for timeline in reader.read():
            self.add(timeline)
            count += 1
        if count:
            self._thin()
        return count > 0

    def add(self, timeline: StepTimeline) -> None:
        """Adds a rank's step; one that was repeated after a recovery replaces the first."""
        self.shares.setdefault(timeline.step, {})[timeline.rank] = timeline.waiting_share
        for span in timeline.waits:
            # "all_gather over shard of layer 3": the layers of an operation count together.
            totals = self.operations.setdefault(span.name.partition(" of ")[0], {})
            entry = totals.setdefault(timeline.rank, [0.0, 0.0])
            entry[0] += 1
            entry[1] += span.seconds
        if len(self.newest) < _KEPT_STEPS or timeline.step >= min(self.newest):
            self.newest.setdefault(timeline.step, {})[timeline.rank] = timeline
            while len(self.newest) > _KEPT_STEPS:
                del self.newest[min(self.newest)]

    def _thin(self) -> None:
        if len(self.shares) > _MOST_STEPS:
            for step in sorted(self.shares)[: _MOST_STEPS // 2 : 2]:
                del self.shares[step]

    def last_step(self) -> list[StepTimeline]:
        """Returns the newest step that the most ranks recorded, in order of ranks; empty without any."""
        if not self.newest:
            return []
        step = max(self.newest, key=lambda step: (len(self.newest[step]), step))
        return [self.newest[step][rank] for rank in sorted(self.newest[step])]

    def matrix(self, most_steps: int, most_ranks: int) -> tuple[NDArray[np.float64], list[int]]:
        """Returns mean waiting shares by rank and step, with at most so many rows and columns.

        Returns:
            (rows, columns), NaN where nothing was recorded; and the first step of each column. Neighbouring steps, and
            neighbouring ranks, share a column or row where there are more.
        """
        steps = sorted(self.shares)
        ranks = 1 + max((rank for by_rank in self.shares.values() for rank in by_rank), default=-1)
        if not steps or not ranks:
            return np.zeros((0, 0)), []
        shares = np.full((ranks, len(steps)), math.nan)
        for column, step in enumerate(steps):
            by_rank = self.shares[step]
            shares[list(by_rank), column] = list(by_rank.values())
        shares = _mean_groups(shares, most_ranks)
        shares = _mean_groups(shares.T, most_steps).T
        return shares, [steps[len(steps) * column // shares.shape[1]] for column in range(shares.shape[1])]

    def awaited(self) -> list[tuple[int, int, float, float]]:
        """Returns the ranks that others wait for, most often first.

        Returns:
            Rank, number of recorded steps in which it waited least, its mean share of waiting in these, and that of the
            others. A step counts where the others wait for a tenth of it more.
        """
        by_rank: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        for shares in self.shares.values():
            if len(shares) < 2:
                continue
            rank = min(shares, key=lambda candidate: shares[candidate])
            mean_of_others = (sum(shares.values()) - shares[rank]) / (len(shares) - 1)
            if mean_of_others - shares[rank] >= 0.1:
                by_rank[rank].append((shares[rank], mean_of_others))
        rows = [
            (rank, len(pairs), float(np.mean([own for own, _ in pairs])), float(np.mean([other for _, other in pairs])))
            for rank, pairs in by_rank.items()
        ]
        return sorted(rows, key=lambda row: -row[1])


def _mean_groups(values: NDArray[np.float64], most_rows: int) -> NDArray[np.float64]:
    """Averages neighbouring rows of ``values``, so that at most ``most_rows`` remain; NaN counts for nothing."""
    count = min(most_rows, len(values))
    if count == len(values):
        return values
    starts = np.arange(count) * len(values) // count
    sums = np.add.reduceat(np.nan_to_num(values), starts, axis=0)
    counts = np.add.reduceat((~np.isnan(values)).astype(np.float64), starts, axis=0)
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = sums / counts
    return means
