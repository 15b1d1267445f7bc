"""Measured times over sizes, and what lies between them: linear between the logarithms of size and rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.errors import ClusterError


class RateTable:
    """Work per second on a full grid of sizes.

    Between sizes the logarithm of the rate is linear in the logarithm of each size; beyond the grid the rate is that
    of its edge, so time grows with the work.
    """

    def __init__(self, name: str, points: Mapping[tuple[int, ...], float]) -> None:
        """Takes measured rates.

        Args:
            name: of the table, for messages.
            points: sizes to work per second.

        Raises:
            ClusterError: when the sizes form no full grid, or a rate isn't above 0.
        """
        sizes = list(points)
        self._axes = [sorted({size[axis] for size in sizes}) for axis in range(len(sizes[0]) if sizes else 0)]
        if not sizes or len(sizes) != int(np.prod([len(axis) for axis in self._axes])):
            raise ClusterError(f"calibration: the sizes of {name} form no full grid; measure again")
        if min(points.values()) <= 0 or min(min(size) for size in sizes) < 1:
            raise ClusterError(f"calibration: {name} holds a time or a size that isn't above 0; measure again")
        self._rates = np.empty([len(axis) for axis in self._axes])
        for size, rate in points.items():
            self._rates[tuple(axis.index(value) for axis, value in zip(self._axes, size))] = np.log(rate)
        self._logs = [np.log(axis) for axis in self._axes]

    @property
    def best(self) -> float:
        """The highest rate of the grid."""
        return float(np.exp(self._rates.max()))

    def rate(self, *sizes: Any) -> Any:
        """Returns work per second at sizes, which may be arrays that broadcast."""
        given = np.broadcast_arrays(*(np.asarray(size, dtype=float) for size in sizes))
        shape = given[0].shape
        corners: list[tuple[list[Any], Any]] = [([], np.ones(shape))]
        for values, logs in zip(given, self._logs):
            at = np.clip(np.log(np.maximum(values, 1.0)), logs[0], logs[-1])
            low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, max(0, len(logs) - 2))
            high = np.minimum(low + 1, len(logs) - 1)
            width = np.where(high > low, logs[high] - logs[low], 1.0)
            part = np.where(high > low, (at - logs[low]) / width, 0.0)
            corners = [
                ([*index, end], weight * share)
                for index, weight in corners
                for end, share in ((low, 1.0 - part), (high, part))
            ]
        found = sum(self._rates[tuple(index)] * weight for index, weight in corners)
        return np.exp(found)


class TimeTable:
    """Seconds over bytes: linear between logarithms; the first point's time below it, its last rate above."""

    def __init__(self, name: str, points: Iterable[tuple[float, float]]) -> None:
        """Takes (bytes, seconds).

        Raises:
            ClusterError: without points, or with one that isn't above 0.
        """
        rows = sorted(dict(points).items())
        if not rows or min(min(row) for row in rows) <= 0:
            raise ClusterError(f"calibration: {name} holds no time, or one that isn't above 0; measure again")
        self._sizes = np.log([size for size, _ in rows])
        # A shorter message that took longer was disturbed: time never falls with bytes.
        self._times = np.log(np.minimum.accumulate([seconds for _, seconds in reversed(rows)])[::-1])

    def seconds(self, size: Any) -> Any:
        """Returns seconds for bytes, a number or an array."""
        at = np.log(np.maximum(np.asarray(size, dtype=float), 1.0))
        found = np.interp(at, self._sizes, self._times) + np.maximum(0.0, at - self._sizes[-1])
        return np.exp(found)


def grouped(rows: Iterable[Sequence[Any]], keys: int) -> dict[tuple[Any, ...], list[Sequence[Any]]]:
    """Groups rows by their first ``keys`` entries; the rest of each row is kept."""
    found: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[:keys]), []).append(row[keys:])
    return found
