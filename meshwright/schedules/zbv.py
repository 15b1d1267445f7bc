"""ZBV: two stages per rank in the shape of a V with split backwards: balanced memory, almost no bubble.

``down`` and ``up`` are a rank's stages on the V's way down (forward order) and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from meshwright.schedules.action import Action, backward_input, backward_weight, forward
from meshwright.schedules.closed_form import Array, PassSums
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
    """Returns seconds of a step, (N,), with F, I and W the seconds of a rank's two stages on a micro-batch.

    From m = 2p - 1 on a rank waits max(I / 2, I - W) for each other one, a sixth of F + I + W where they are equal.
    With fewer, the way down and up of the first micro-batch counts, and m - 1 further ones that follow it: I + W each
    until p are in flight, F + I from then on. Read off the actions' simulated times for many F, I and W, of which it
    is exact; tests hold it against them.
    """
    others = np.maximum(sums.all_ranks - sums.slowest_rank, 0.0)
    input_s = np.maximum(sums.slowest_rank - sums.forward - sums.weight, 0.0)
    wait_share = np.maximum(input_s / 2.0, input_s - sums.weight) / np.maximum(sums.slowest_rank, 1e-30)
    steady_s = microbatches * sums.slowest_rank + others * wait_share
    followers = np.minimum(microbatches, ranks) - 1.0
    # Followers pass all ranks alike, so the mean one sets their pace.
    pace = sums.all_ranks / ranks / np.maximum(sums.slowest_rank, 1e-30)
    lone_s = sums.all_ranks - (ranks - 1) * sums.weight * pace
    lone_s = lone_s + followers * pace * (sums.slowest_rank - sums.forward)
    lone_s = lone_s + np.maximum(microbatches - ranks, 0.0) * pace * (sums.slowest_rank - sums.weight)
    return np.asarray(np.maximum(steady_s, lone_s))


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
    in_flight=lambda ranks, stages_per_rank, microbatches, rank: np.minimum(ranks, microbatches) + 0 * rank,
)
