"""Formulas of a schedule's time and in-flight micro-batches over arrays of layouts, for searches.

A schedule may state both (`ScheduleSpec.step_s`, `ScheduleSpec.in_flight`), often as one of the functions below. What
it doesn't state is simulated from its actions (`schedules.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSums:
    """Seconds of N layouts' ranks on one micro-batch, all stages of a rank together; arrays are (N,) float64."""

    slowest_rank: Array
    """Forward and backward of the slowest rank, (N,)."""
    all_ranks: Array
    """Sum of forward and backward over all ranks, (N,)."""
    forward: Array
    """Forward of the slowest rank, (N,)."""
    weight: Array
    """Weight gradients of the rank with the longest, (N,): no other rank waits for them."""

    def take(self, index: Array) -> PassSums:
        """Returns the sums of the layouts at an index."""
        return PassSums(
            slowest_rank=self.slowest_rank[index],
            all_ranks=self.all_ranks[index],
            forward=self.forward[index],
            weight=self.weight[index],
        )


StepForm = Callable[[int, Array, Array, PassSums], Array]
"""Maps (ranks, stages per rank (N,), micro-batches (N,), sums) to seconds from first start to last end, (N,)."""
PairedForm = Callable[[Array, Array], Array]
"""Maps (ranks (N,), micro-batches (N,)) to a share of passes, (N,)."""
InFlightForm = Callable[[int, Array, Array, Array], Array]
"""Maps (ranks, stages per rank (N, 1), micro-batches (N, 1), rank (1, P)) to the most in-flight micro-batches of each
rank, (N, P), in units of all its stages."""


def single_stage_step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns (m - 1) slowest + sum of all ranks, (N,). Source: Narayanan et al. (SC 2021), 2.2.1."""
    # Once the pipeline is full the slowest rank never waits; filling and draining cost one pass of the others.
    return (microbatches - 1) * sums.slowest_rank + sums.all_ranks


def interleaved_step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns m slowest + (sum of the other ranks) / v, (N,). Source: Narayanan et al. (SC 2021), 2.2.2.

    With m < p a rank also waits for the first micro-batch before it begins each further stage.
    """
    # With v stages on a rank, filling and draining go in steps that are v times smaller.
    filling_s = (sums.all_ranks - sums.slowest_rank) / np.maximum(stages_per_rank, 1)
    return microbatches * sums.slowest_rank + filling_s + round_waits_s(ranks, stages_per_rank, microbatches, sums)


def round_waits_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns (p - m) (v - 1) / v of the slowest rank, (N,): fewer micro-batches than ranks don't fill a round."""
    stages = np.maximum(stages_per_rank, 1)
    return np.asarray(np.maximum(ranks - microbatches, 0) * (stages - 1) / stages * sums.slowest_rank)


def unfilled_bubble_s(ranks: int, sums: PassSums) -> Array:
    """Returns seconds of filling and draining less the weight gradients in them, (N,).

    Source: Qi et al. (2023), table 1.
    """
    return np.maximum(sums.all_ranks - sums.slowest_rank - 2 * (ranks - 1) * sums.weight, 0.0)
