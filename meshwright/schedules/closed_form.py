"""Time and memory of a schedule for many layouts at once, where a search can't run every one's actions.

A schedule may state both as formulas over arrays (`ScheduleSpec.step_s`, `ScheduleSpec.held`), in the forms that stand
here. What it doesn't state is read off its actions (`schedules.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""Of float64."""


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
