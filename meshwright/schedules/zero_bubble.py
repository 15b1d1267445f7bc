"""Zero bubble, with one stage per rank (ZB-H1) or several: delayed weight gradients fill the bubble."""

from __future__ import annotations

import numpy as np

from meshwright.schedules.action import Action, backward_input, backward_weight, forward
from meshwright.schedules.closed_form import Array, PassSums, round_waits_s, unfilled_bubble_s
from meshwright.schedules.rounds import backward_turns, equal_rounds, forward_turns, round_size
from meshwright.schedules.spec import ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank: each weight half of a backward runs `rank` input halves later.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), ZB-H1, on the interleaved order of Narayanan et al.
    """
    sizes = (rank, ranks, stages_per_rank, microbatches)
    forwards = [forward(*turn) for turn in forward_turns(*sizes)]
    backward_order = list(backward_turns(*sizes))
    warmup = (stages_per_rank - 1) * round_size(ranks, microbatches) + ranks - 1 - rank
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for index, turn in enumerate(backward_order):
        if index < len(forwards) - warmup:
            actions.append(forwards[warmup + index])
        actions.append(backward_input(*turn))
        if index >= rank:
            actions.append(backward_weight(*backward_order[index - rank]))
    return actions + [backward_weight(*turn) for turn in backward_order[max(0, len(backward_order) - rank) :]]


def bubble(ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the stated bubble, where m is a multiple of p: (p-1) (F + I - W). Source: Qi et al. (2023), ZB-H1."""
    if microbatches % ranks:
        return None
    return (ranks - 1) / (3 * stages_per_rank * microbatches + ranks - 1)


def peak_live(ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """Returns the most live pairs on a rank: warm-up forwards, one more, and the delayed weight gradients."""
    return min((stages_per_rank - 1) * round_size(ranks, microbatches) + ranks, stages_per_rank * microbatches)


def in_flight(ranks: int, stages_per_rank: Array, microbatches: Array, rank: Array) -> Array:
    """Returns in-flight micro-batches by rank, (N, P): `peak_live` over the stages, equal on every rank."""
    round_microbatches = microbatches / np.maximum(1, np.floor(microbatches / ranks))
    interleaved = np.minimum(((stages_per_rank - 1) * round_microbatches + ranks) / stages_per_rank, microbatches)
    return np.where(stages_per_rank > 1, interleaved, np.minimum(ranks, microbatches)) + 0 * rank


def step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of a step, (N,): interleaved's filling and draining, less the weight gradients in them.

    With m < p fewer weight gradients are there to fill it with: those of m - 1 micro-batches.
    """
    waiting_s = unfilled_bubble_s(ranks, sums) / np.maximum(stages_per_rank, 1)
    waiting_s = waiting_s + round_waits_s(ranks, stages_per_rank, microbatches, sums)
    single = np.maximum(stages_per_rank, 1) == 1
    waiting_s = waiting_s + single * np.maximum(ranks - microbatches, 0) * sums.weight
    return np.asarray(microbatches * sums.slowest_rank + waiting_s)


SCHEDULE = ScheduleSpec(
    name="zerobubble",
    purpose="fills the bubble with weight gradients, at no more held than 1f1b or interleaved",
    source="Qi et al., Zero Bubble Pipeline Parallelism (2023), arXiv:2401.10241",
    order=order,
    least_stages=1,
    most_stages=None,
    splits_backward=True,
    rule=equal_rounds,
    bubble=bubble,
    bubble_text="(p-1) / (3 v m+p-1) when p divides m",
    peak_live=peak_live,
    peak_text="min(v m, (v-1) r + p), r = m / max(1, m // p)",
    step_s=step_s,
    in_flight=in_flight,
)
