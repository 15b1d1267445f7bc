"""Tables of measured times over sizes, interpolated linearly between the logarithms of size and rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.array_types import Values
from meshwright.errors import ClusterError

Row: TypeAlias = Sequence[Any]
"""A measurement: names, flags and numbers, whose columns its table gives."""
Key: TypeAlias = tuple[Any, ...]
"""The leading columns of a row."""


class RateTable:
    """Work per second on a full grid of sizes.

    Between sizes the logarithm of the rate is linear in the logarithm of each size. Beyond the grid the rate is that of
    its edge, so time grows with the work.
    """

    def __init__(self, name: str, points: Mapping[tuple[int, ...], float]) -> None:
        """Builds the grid from measured rates.

        Args:
            name: of the table, for messages.
            points: sizes to work per second.

        Raises:
            ClusterError: when the sizes form no full grid, or a rate isn't above 0.
        """
        sizes = list(points)
        self._axes = [sorted({size[axis] for size in sizes}) for axis in range(len(sizes[0]) if sizes else 0)]
        # A full grid has every combination of the sizes of its axes.
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

    def rate(self, *sizes: Values) -> Values:
        """Interpolates work per second.

        Args:
            sizes: one for each axis of the grid: numbers, or float arrays that broadcast.

        Returns:
            A float array of the shape to which the sizes broadcast.
        """
        size_arrays = np.broadcast_arrays(*(np.asarray(size, dtype=float) for size in sizes))
        shape = size_arrays[0].shape
        # Multilinear interpolation: the 2^d corners of the cell, each with its weight.
        corners: list[tuple[list[NDArray[np.intp]], NDArray[np.float64]]] = [([], np.ones(shape))]
        for values, logs in zip(size_arrays, self._logs):
            log_size = np.clip(np.log(np.maximum(values, 1.0)), logs[0], logs[-1])
            # Index of the grid size below, so that its neighbour above exists; a grid of one size has none.
            lower = np.clip(np.searchsorted(logs, log_size, side="right") - 1, 0, max(0, len(logs) - 2))
            upper = np.minimum(lower + 1, len(logs) - 1)
            width = np.where(upper > lower, logs[upper] - logs[lower], 1.0)
            # Position between the neighbours, in logarithms; 0 where the grid has one size.
            fraction = np.where(upper > lower, (log_size - logs[lower]) / width, 0.0)
            corners = [
                ([*index, neighbour], weight * share)
                for index, weight in corners
                for neighbour, share in ((lower, 1.0 - fraction), (upper, fraction))
            ]
        log_rate = sum(self._rates[tuple(index)] * weight for index, weight in corners)
        return np.exp(log_rate)


class TimeTable:
    """Seconds over bytes: linear between logarithms, constant below the first point, constant rate above the last."""

    def __init__(self, name: str, points: Iterable[tuple[float, float]]) -> None:
        """Builds the table from (bytes, seconds).

        Raises:
            ClusterError: without points, or with one that isn't above 0.
        """
        rows = sorted(dict(points).items())
        if not rows or min(min(row) for row in rows) <= 0:
            raise ClusterError(f"calibration: {name} holds no time, or one that isn't above 0; measure again")
        self._sizes = np.log([size for size, _ in rows])
        # A shorter message that took longer was disturbed: time never falls with bytes.
        self._times = np.log(np.minimum.accumulate([seconds for _, seconds in reversed(rows)])[::-1])

    def seconds(self, size: Values) -> Values:
        """Interpolates seconds by bytes (a number or a float array)."""
        log_size = np.log(np.maximum(np.asarray(size, dtype=float), 1.0))
        # np.interp is constant beyond its ends; above the last size a slope of 1 keeps the rate.
        log_seconds = np.interp(log_size, self._sizes, self._times) + np.maximum(0.0, log_size - self._sizes[-1])
        return np.exp(log_seconds)


def grouped(rows: Iterable[Row], key_columns: int) -> dict[Key, list[Row]]:
    """Groups rows by their first ``key_columns`` entries, which are removed from them."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[:key_columns]), []).append(row[key_columns:])
    return groups
