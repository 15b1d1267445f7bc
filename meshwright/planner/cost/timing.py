"""Makespan and in-flight micro-batches of layouts with mixed schedules: by each schedule's formula, or its actions.

The formulas are exact for equal stages, and for 1F1B with any stages; `schedules.simulate` runs the finalists' actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.schedules.closed_form import PassSums
from meshwright.schedules.evaluate import held_microbatches, step_seconds
from meshwright.schedules.spec import ScheduleSpec


def makespan(layouts: LayoutBatch, forward: Array, backward: Array, weight: Array) -> Array:
    """Returns seconds from the first start to the last end of the pipeline, (N,) float64.

    Args:
        layouts: N layouts with P ranks along pp each.
        forward: of each rank on one micro-batch, all its stages together, sends included; (N, P).
        backward: of each rank on one micro-batch; (N, P).
        weight: weight gradients of a backward, which no other rank waits for; (N, P).
    """
    # Which rank is slow matters, not in which pass: the formulas know sums of forward and backward alone.
    both_passes = forward + backward
    ranks, seconds = both_passes.shape[1], np.empty(layouts.count)
    slowest_rank = np.argmax(both_passes, axis=1)[:, None]
    sums = PassSums(
        slowest_rank=both_passes.max(axis=1),
        all_ranks=both_passes.sum(axis=1),
        forward=np.take_along_axis(forward, slowest_rank, 1)[:, 0],
        weight=weight.max(axis=1),
    )
    for spec, index in _by_schedule(layouts.schedules, layouts.schedule):
        stages, microbatches = layouts.stages[index], layouts.microbatches[index]
        seconds[index] = step_seconds(spec, ranks, stages, microbatches, sums.take(index))
    return seconds


def in_flight_microbatches(layouts: LayoutBatch, ranks: int) -> Array:
    """Returns the most in-flight micro-batches of each rank, in units of all its stages, (N, P) float64.

    Args:
        layouts: N layouts.
        ranks: P, along pp of each.
    """
    in_flight = np.empty((layouts.count, ranks))
    for spec, index in _by_schedule(layouts.schedules, layouts.schedule):
        in_flight[index] = held_microbatches(spec, ranks, layouts.stages[index], layouts.microbatches[index])
    return in_flight


def _by_schedule(specs: Sequence[ScheduleSpec], codes: Array) -> Iterator[tuple[ScheduleSpec, Array]]:
    """Yields (schedule, indices of its layouts) for each schedule in ``codes``, (N,)."""
    for code in np.unique(codes):
        yield specs[int(code)], np.flatnonzero(codes == code)
