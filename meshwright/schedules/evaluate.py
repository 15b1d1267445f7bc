"""Step time and micro-batches in flight of a schedule for many layouts at once: its formulas, or else its actions.

What a schedule doesn't state as a formula is read off its actions: the peak of each rank, and the idle time at unit
costs, which is taken in proportion to the stages' real times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.schedules.closed_form import Array, PassSums
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import ScheduleSpec

UNIT_BACKWARD = 3.0
"""Forward and backward of a stage at unit costs: F = 1, B = 2."""


def step_seconds(spec: ScheduleSpec, ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of all micro-batches of N layouts of one schedule, (N,).

    Args:
        spec: the schedule.
        ranks: P.
        stages_per_rank: (N,).
        microbatches: (N,).
        sums: of the layouts.
    """
    if spec.step_s is not None:
        return np.asarray(spec.step_s(ranks, stages_per_rank, microbatches, sums))
    idle = _of_each(stages_per_rank, microbatches, lambda stages, micro: _idle_share(spec, ranks, stages, micro))
    return np.asarray(microbatches * sums.dearest + idle * (sums.whole - sums.dearest))


def held_microbatches(spec: ScheduleSpec, ranks: int, stages_per_rank: Array, microbatches: Array) -> Array:
    """Returns micro-batches of a rank's whole model part that each rank holds at most, (N, P).

    Args:
        spec: the schedule.
        ranks: P.
        stages_per_rank: (N,).
        microbatches: (N,).
    """
    stages, micro = np.maximum(stages_per_rank, 1), microbatches
    if spec.held is not None:
        index = np.arange(ranks)[None, :]
        found = spec.held(ranks, stages[:, None], micro[:, None], index)
        return np.asarray(np.broadcast_to(found, (len(micro), ranks)))
    return _of_each(stages, micro, lambda v, m: np.array(_peaks(spec, ranks, v, m)) / v)


def _of_each(stages_per_rank: Array, microbatches: Array, read: Callable[[int, int], Any]) -> Array:
    """Calls ``read`` once for each pair of (stages, micro-batches) and gives every layout its pair's."""
    pairs = np.stack([np.maximum(stages_per_rank, 1), microbatches], axis=1)
    known, which = np.unique(pairs, axis=0, return_inverse=True)
    return np.stack([np.asarray(read(int(stages), int(micro))) for stages, micro in known])[which.reshape(-1)]


@lru_cache(maxsize=4096)
def _peaks(spec: ScheduleSpec, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[int, ...]:
    schedule = spec.build(ranks, stages_per_rank, microbatches)
    return simulate(schedule, ActionCosts.uniform(schedule.stages)).peak_live_rank


@lru_cache(maxsize=4096)
def _idle_share(spec: ScheduleSpec, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Idle time of a step over what a micro-batch takes on all ranks but one, at unit costs."""
    if ranks == 1:
        return 0.0
    schedule = spec.build(ranks, stages_per_rank, microbatches)
    busy = UNIT_BACKWARD * stages_per_rank
    whole = simulate(schedule, ActionCosts.uniform(schedule.stages)).makespan_s
    return (whole - microbatches * busy) / ((ranks - 1) * busy)
