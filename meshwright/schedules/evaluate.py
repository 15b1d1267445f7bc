"""Step time and in-flight micro-batches of a schedule for N layouts: by its formulas, or else by simulation.

A schedule without a formula is simulated at unit costs, once for each size: for the peak of each rank, and for the idle
time, which is scaled by the stages' real times.
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
    """Returns seconds of all micro-batches of N layouts of one schedule, (N,) float64.

    Args:
        spec: the schedule.
        ranks: P.
        stages_per_rank: (N,).
        microbatches: (N,).
        sums: of the layouts.
    """
    # A formula prices thousands of layouts at once; a simulation prices one size.
    if spec.step_s is not None:
        return np.asarray(spec.step_s(ranks, stages_per_rank, microbatches, sums))
    idle_share = _for_each_size(
        stages_per_rank,
        microbatches,
        lambda stages, microbatch_count: _idle_share(spec, ranks, stages, microbatch_count),
    )
    return np.asarray(microbatches * sums.slowest_rank + idle_share * (sums.all_ranks - sums.slowest_rank))


def held_microbatches(spec: ScheduleSpec, ranks: int, stages_per_rank: Array, microbatches: Array) -> Array:
    """Returns the most in-flight micro-batches of each rank, (N, P) float64, in units of all its stages.

    Args:
        spec: the schedule.
        ranks: P.
        stages_per_rank: (N,).
        microbatches: (N,).
    """
    stages = np.maximum(stages_per_rank, 1)
    if spec.in_flight is not None:
        index = np.arange(ranks)[None, :]
        in_flight = spec.in_flight(ranks, stages[:, None], microbatches[:, None], index)
        return np.asarray(np.broadcast_to(in_flight, (len(microbatches), ranks)))
    return _for_each_size(stages, microbatches, lambda v, m: np.array(_peak_live_pairs(spec, ranks, v, m)) / v)


def _for_each_size(stages_per_rank: Array, microbatches: Array, figure: Callable[[int, int], Any]) -> Array:
    """Calls ``figure`` once for each distinct (stages, micro-batches), and returns every layout's result, (N, ...)."""
    pairs = np.stack([np.maximum(stages_per_rank, 1), microbatches], axis=1)
    distinct_sizes, size_index = np.unique(pairs, axis=0, return_inverse=True)
    return np.stack(
        [np.asarray(figure(int(stages), int(microbatch_count))) for stages, microbatch_count in distinct_sizes]
    )[size_index.reshape(-1)]


@lru_cache(maxsize=4096)
def _peak_live_pairs(spec: ScheduleSpec, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[int, ...]:
    schedule = spec.build(ranks, stages_per_rank, microbatches)
    return simulate(schedule, ActionCosts.uniform(schedule.stages)).peak_live_rank


@lru_cache(maxsize=4096)
def _idle_share(spec: ScheduleSpec, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Returns a step's idle time over the time of a micro-batch on all ranks but one, at unit costs."""
    if ranks == 1:
        return 0.0
    schedule = spec.build(ranks, stages_per_rank, microbatches)
    busy_s = UNIT_BACKWARD * stages_per_rank
    makespan_s = simulate(schedule, ActionCosts.uniform(schedule.stages)).makespan_s
    return (makespan_s - microbatches * busy_s) / ((ranks - 1) * busy_s)
