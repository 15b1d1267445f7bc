"""The fewest layers that must recompute in one way, where all others in another don't fit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.rank_bytes import MemoryByRecompute


def fewest_recomputed(
    memory: Iterable[tuple[Array, MemoryByRecompute]],
    memory_bytes: float,
    layers: int,
    rest_bytes: Array,
    whole_bytes: Array,
) -> Array:
    """Returns the fewest layers of `LayoutBatch.recompute` with which layouts fit that do so with all, (N,) int64.

    A peak is that of the fullest of several moments and ranks, so it falls with each further layer, not in
    proportion. Most are found as if it did, others by bisection. Of a pipeline's evenly spaced layers a stage may
    have one less when there is one more in all: then it is a number that fits where one less doesn't.

    Args:
        memory: indices and memory of N layouts that recompute all layers and fit, those with equally many pipeline
            ranks at once (`cost.price.memory_by_recompute`).
        memory_bytes: that a layout may fill on each device.
        layers: of the model.
        rest_bytes: peaks where all layers do what `LayoutBatch.recompute_rest` says, which don't fit, (N,).
        whole_bytes: the layouts' own peaks, (N,).
    """
    fewest = np.empty(len(whole_bytes), int)
    for index, of_run in memory:
        fewest[index] = _fewest_of_run(of_run, memory_bytes, layers, np.stack([rest_bytes[index], whole_bytes[index]]))
    return fewest


def _fewest_of_run(memory: MemoryByRecompute, limit: float, layers: int, peaks: Array) -> Array:
    """Returns `fewest_recomputed` of layouts with equally many pipeline ranks; ``peaks`` are both, (2, N)."""
    count = peaks.shape[1]
    # Numbers of layers: too few, and enough.
    bounds = np.stack([np.zeros(count, int), np.full(count, layers)])
    between, attempts = np.arange(count), 0
    while True:
        is_open = bounds[1, between] - bounds[0, between] > 1
        if not is_open.all():
            between, memory = between[is_open], memory.take(is_open)
        if not len(between):
            return bounds[1]
        (low, high), (above, below) = bounds[:, between], peaks[:, between]
        # The second attempt on the line is one layer below the first.
        on_line = low + np.ceil((above - limit) / (above - below) * (high - low)).astype(int)
        tried = np.clip(on_line, low + 1, high - 1) if attempts < 2 else (low + high) // 2
        tried_bytes = memory.at(tried / layers)["peak"].max(axis=1)
        side = (tried_bytes <= limit).astype(int)
        bounds[side, between], peaks[side, between] = tried, tried_bytes
        attempts += 1
