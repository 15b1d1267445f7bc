"""ZBV: two stages per rank in the shape of a V with split backwards: balanced memory, almost no bubble.

``down`` and ``up`` are a rank's stages on the V's way down (forward order) and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from meshwright.schedules.action import Action, backward_input, backward_weight, forward
from meshwright.schedules.closed_form import Array, PassSums, unfilled_bubble_s
from meshwright.schedules.spec import Placement, ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    The order is for 2p - 1 micro-batches or more; with fewer, actions of the missing ones are left out.
    Source: Qi et al., Pipeline Parallelism with Controllable Memory (2024), V-ZB; Zero Bubble (2023), section 6.
    """
    all_actions = _all_actions(rank, ranks, max(2 * ranks - 1, microbatches))
    return [action for action in all_actions if action.microbatch < microbatches]


def _all_actions(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    warmup = 2 * (ranks - rank) - 1
    yield from (forward(down, step) for step in range(warmup))
    for step in range(rank):
        yield forward(up, step)
        yield forward(down, warmup + step)
    warmup += rank
    splits = ranks - rank
    for step in range(splits):
        yield from (
            forward(up, rank + step),
            backward_input(up, step),
            backward_weight(up, step),
        )
    # Steady phase: a forward and a backward on each stage; the forwards of the way down run out first.
    for step in range(microbatches - ranks):
        if warmup + step < microbatches:
            yield forward(down, warmup + step)
        yield from (backward_input(down, step), backward_weight(down, step))
        yield forward(up, ranks + step)
        yield from (backward_input(up, splits + step), backward_weight(up, splits + step))
    yield from _drain(down, up, rank, ranks, microbatches)


def _drain(down: int, up: int, rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yields input gradients first, since the previous rank waits for them; weight gradients fill the gaps."""
    down_start, up_start = microbatches - ranks, microbatches - rank
    yield from chain.from_iterable(
        (backward_input(down, down_start + step), backward_input(up, up_start + step)) for step in range(rank)
    )
    for step in range(ranks - rank):
        yield backward_input(down, down_start + rank + step)
        yield backward_weight(down, down_start + step)
    yield from (backward_weight(up, step) for step in range(up_start, microbatches))
    yield from (backward_weight(down, step) for step in range(microbatches - rank, microbatches))


def bubble(ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the stated bubble, for enough micro-batches to reach the steady phase."""
    if microbatches < 2 * ranks - 1:
        return None
    return (ranks - 1) / (6 * microbatches + ranks - 1)


def step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of a step, (N,): a sixth of the remaining filling and draining.

    Source: Qi et al. (2023), table 1.
    """
    return microbatches * sums.slowest_rank + unfilled_bubble_s(ranks, sums) / 6.0


SCHEDULE = ScheduleSpec(
    name="zbv",
    purpose="the smallest bubble when F, I and W take as long; as much memory on every rank, as 1f1b on its first",
    source="Qi et al., Pipeline Parallelism with Controllable Memory (2024), arXiv:2405.15362",
    order=order,
    least_stages=2,
    most_stages=2,
    placement=Placement.V,
    splits_backward=True,
    bubble=bubble,
    bubble_text="(p-1) / (6m+p-1) when m >= 2p-1",
    peak_live=lambda ranks, stages_per_rank, microbatches: 2 * min(ranks, microbatches),
    peak_text="2 min(p, m)",
    step_s=step_s,
    held=lambda ranks, stages_per_rank, microbatches, rank: np.minimum(ranks, microbatches) + 0 * rank,
)
