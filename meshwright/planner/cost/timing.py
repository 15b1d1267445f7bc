"""Closed forms of pipeline schedules: time of a step from the stages' times, micro-batches held by each rank.

They are exact for equal stages and for 1F1B with any; `schedules.simulate` runs the actions of the chosen layouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.cost.job import SCHEDULES, Array

ONE, GPIPE, INTERLEAVED, LOOPED, ZERO_BUBBLE, ZBV, DUALPIPEV = range(len(SCHEDULES))


def makespan(
    schedule: Array, forward: Array, backward: Array, weight: Array, microbatches: Array, chunks: Array
) -> Array:
    """Returns seconds from the first start to the last end.

    Args:
        schedule: codes, (N,).
        forward: of each rank on one micro-batch, all its stages together, sends included; (N, P).
        backward: likewise.
        weight: the part of a backward that nobody waits for; (N, P).
        microbatches: m, (N,).
        chunks: stages of a rank, (N,).

    Source: 1F1B and interleaved, Narayanan et al. (SC 2021), 2.2; zero bubble and ZBV, Qi et al. (2023), table 1.
    """
    both = forward + backward
    most, whole = both.max(axis=1), both.sum(axis=1)
    ranks = both.shape[1]
    steady = (microbatches - 1) * most
    plain = steady + whole
    loops = microbatches * most + (whole - most) / np.maximum(chunks, 1)
    longest = weight.max(axis=1)
    filled = np.maximum(whole - most - 2 * (ranks - 1) * longest, 0.0)
    split = microbatches * most + filled / np.maximum(chunks, 1)
    small = microbatches * most + filled / 6.0
    dual = microbatches * most + (whole - most) / 6.0
    options = [loops, loops, split, small, dual]
    codes = (INTERLEAVED, LOOPED, ZERO_BUBBLE, ZBV, DUALPIPEV)
    return np.select([schedule == code for code in codes], options, plain)


def held(schedule: Array, ranks: int, microbatches: Array, chunks: Array) -> Array:
    """Returns micro-batches of a whole rank's layers that each rank holds at most, (N, P).

    Source: the stated peaks of `schedules/*.py`, divided by the stages of a rank.
    """
    index = np.arange(ranks)[None, :]
    m, v, code = microbatches[:, None], np.maximum(chunks, 1)[:, None], schedule[:, None]
    ahead: Any = np.minimum(m, ranks - index)
    turn = m / np.maximum(1, np.floor(m / ranks))
    interleaved = np.minimum(((v - 1) * turn + 2 * (ranks - 1 - index) + 1) / v, m)
    flat = np.minimum(((v - 1) * turn + ranks) / v, m)
    everywhere = np.minimum(ranks, m) + 0 * index
    dual = np.minimum((2 * ranks + 1) / 2.0, m) + 0 * index
    cases = {GPIPE: m + 0 * index, LOOPED: m + 0 * index, INTERLEAVED: interleaved, ZBV: everywhere, DUALPIPEV: dual}
    cases[ZERO_BUBBLE] = np.where(v > 1, flat, everywhere) + 0 * index
    return np.select([code == key for key in cases], list(cases.values()), ahead + 0 * m)
