"""ZBV: two stages per rank in the shape of a V, the backward split: balanced in memory, almost without bubble."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from meshwright.schedules.action import Action, backward_input, backward_weight, forward
from meshwright.schedules.closed_form import Array, PassSums, filled_with_weights
from meshwright.schedules.spec import Placement, ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    The order is laid out for 2p - 1 micro-batches or more; with fewer, those that don't exist are left out.
    Source: Qi et al., Pipeline Parallelism with Controllable Memory (2024), V-ZB; Zero Bubble (2023), section 6.
    """
    turns = _turns(rank, ranks, max(2 * ranks - 1, microbatches))
    return [action for action in turns if action.microbatch < microbatches]


def _turns(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    ahead = 2 * (ranks - rank) - 1
    yield from (forward(down, place) for place in range(ahead))
    for place in range(rank):
        yield forward(up, place)
        yield forward(down, ahead + place)
    ahead += rank
    split = ranks - rank
    for place in range(split):
        yield from (forward(up, rank + place), backward_input(up, place), backward_weight(up, place))
    # Steady: a forward and a backward on either stage; the forwards of the way down end first.
    for place in range(microbatches - ranks):
        if ahead + place < microbatches:
            yield forward(down, ahead + place)
        yield from (backward_input(down, place), backward_weight(down, place))
        yield forward(up, ranks + place)
        yield from (backward_input(up, split + place), backward_weight(up, split + place))
    yield from _drain(down, up, rank, ranks, microbatches)


def _drain(down: int, up: int, rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The inputs first, since the rank before waits for them; the weights fill the rest."""
    down_from, up_from = microbatches - ranks, microbatches - rank
    yield from chain.from_iterable(
        (backward_input(down, down_from + place), backward_input(up, up_from + place)) for place in range(rank)
    )
    for place in range(ranks - rank):
        yield backward_input(down, down_from + rank + place)
        yield backward_weight(down, down_from + place)
    yield from (backward_weight(up, place) for place in range(up_from, microbatches))
    yield from (backward_weight(down, place) for place in range(microbatches - rank, microbatches))


def bubble(ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the stated bubble, where the steady part is reached: a rank starts one forward after the one before."""
    if microbatches < 2 * ranks - 1:
        return None
    return (ranks - 1) / (6 * microbatches + ranks - 1)


def step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of a step: the stated bubble's sixth. Source: Qi et al. (2023), table 1."""
    return microbatches * sums.dearest + filled_with_weights(ranks, sums) / 6.0


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
