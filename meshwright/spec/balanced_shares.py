"""Deals out rows to readers of different speed so that the slowest ends as early as can be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_shares(seconds_per_row: Sequence[float], limits: Sequence[int], rows: int, unit: int = 1) -> list[int]:
    """Returns the rows of each reader that make the slowest as fast as can be.

    Rows are dealt out one unit at a time to the reader that would end first with it, which is optimal for units of one
    size on machines of different speed (Graham, Bounds on Multiprocessing Timing Anomalies, 1969, without anomalies
    where all jobs are equal).

    Args:
        seconds_per_row: of each reader, above 0.
        limits: most rows that each reader has memory for.
        rows: to deal out, a multiple of ``unit`` and at least one unit for each reader.
        unit: rows that can't be split.

    Returns:
        Rows of each reader in order, each at least one unit, which add up to ``rows``. Limits give way where they would
        leave rows over.
    """
    shares = [unit] * len(seconds_per_row)
    capped = [max(unit, limit // unit * unit) for limit in limits]
    if sum(capped) < rows:
        capped = [rows] * len(shares)
    ends = [
        (2 * unit * cost, reader)
        for reader, cost in enumerate(seconds_per_row)
        if shares[reader] + unit <= capped[reader]
    ]
    heapq.heapify(ends)
    for _ in range(rows // unit - len(shares)):
        end, reader = heapq.heappop(ends)
        shares[reader] += unit
        if shares[reader] + unit <= capped[reader]:
            heapq.heappush(ends, (end + unit * seconds_per_row[reader], reader))
    return shares
