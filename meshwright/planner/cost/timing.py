"""Time of a step and micro-batches held, for layouts of any schedules: each schedule's own forms, or its actions.

The forms are exact for equal stages and for 1F1B with any; `schedules.simulate` runs the actions of the chosen layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.schedules.closed_form import PassSums
from meshwright.schedules.evaluate import held_microbatches, step_seconds
from meshwright.schedules.spec import ScheduleSpec


def makespan(degrees: LayoutBatch, forward: Array, backward: Array, weight: Array) -> Array:
    """Returns seconds from the first start to the last end, (N,).

    Args:
        degrees: N layouts with P ranks along pp each.
        forward: of each rank on one micro-batch, all its stages together, sends included; (N, P).
        backward: of each rank on one micro-batch; (N, P).
        weight: the part of a backward that nobody waits for; (N, P).
    """
    both = forward + backward
    sums = PassSums(dearest=both.max(axis=1), whole=both.sum(axis=1), weight=weight.max(axis=1))
    ranks, found = both.shape[1], np.empty(degrees.count)
    for spec, index in _by_schedule(degrees.schedules, degrees.schedule):
        stages, micro = degrees.stages[index], degrees.microbatches[index]
        found[index] = step_seconds(spec, ranks, stages, micro, sums.take(index))
    return found


def held(degrees: LayoutBatch, ranks: int) -> Array:
    """Returns micro-batches of a whole rank's layers that each rank holds at most, (N, P).

    Args:
        degrees: N layouts.
        ranks: P, along pp of each.
    """
    found = np.empty((degrees.count, ranks))
    for spec, index in _by_schedule(degrees.schedules, degrees.schedule):
        found[index] = held_microbatches(spec, ranks, degrees.stages[index], degrees.microbatches[index])
    return found


def _by_schedule(specs: Sequence[ScheduleSpec], codes: Array) -> Iterator[tuple[ScheduleSpec, Array]]:
    """Yields each schedule that some layout has, and the index of these layouts."""
    for code in np.unique(codes):
        yield specs[int(code)], np.flatnonzero(codes == code)
