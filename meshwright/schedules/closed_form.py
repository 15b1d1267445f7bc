"""Time and memory of a schedule for many layouts at once, where a search can't run every one's actions.

A schedule may state both as formulas over arrays (`ScheduleSpec.step_s`, `ScheduleSpec.held`). What it doesn't state is
read off its actions: the peak of each rank, and the idle time at unit costs, which is taken in proportion to the
stages' real times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate

if TYPE_CHECKING:
    from meshwright.schedules.spec import ScheduleSpec

Array = NDArray[Any]
"""Of float64."""
UNIT_BACKWARD = 3.0
"""Forward and backward of a stage at unit costs: F = 1, B = 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSums:
    """Seconds of N layouts' ranks on one micro-batch, all stages of a rank together."""

    dearest: Array
    """Forward and backward of the dearest rank, (N,)."""
    whole: Array
    """Forward and backward of all ranks added up, (N,)."""
    weight: Array
    """The longest part of a rank's backward that nobody waits for, (N,)."""

    def take(self, index: Array) -> PassSums:
        """Returns those of some layouts."""
        return PassSums(dearest=self.dearest[index], whole=self.whole[index], weight=self.weight[index])


StepForm = Callable[[int, Array, Array, PassSums], Array]
"""(ranks, stages per rank (N,), micro-batches (N,), sums) to seconds from the first start to the last end, (N,)."""
HeldForm = Callable[[int, Array, Array, Array], Array]
"""(ranks, stages per rank (N, 1), micro-batches (N, 1), rank (1, P)) to (N, P) micro-batches of a rank's whole model
part that it holds at most."""


def filled_and_drained(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """The dearest rank runs without a gap once the pipeline is full. Source: Narayanan et al. (SC 2021), 2.2.1."""
    return (microbatches - 1) * sums.dearest + sums.whole


def filled_by_stages(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Filling and draining take as many times less as a rank has stages. Source: Narayanan et al. (SC 2021), 2.2.2."""
    return microbatches * sums.dearest + (sums.whole - sums.dearest) / np.maximum(stages_per_rank, 1)


def filled_with_weights(ranks: int, sums: PassSums) -> Array:
    """Filling and draining, less the weight gradients that fill them, (N,). Source: Qi et al. (2023), table 1."""
    return np.maximum(sums.whole - sums.dearest - 2 * (ranks - 1) * sums.weight, 0.0)


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
