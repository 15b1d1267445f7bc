"""Interleaved 1F1B: several stages per rank, so that the pipeline fills and drains in smaller steps."""

from __future__ import annotations

import numpy as np

from meshwright.schedules.action import Action, backward, forward
from meshwright.schedules.closed_form import Array, interleaved_step_s
from meshwright.schedules.rounds import backward_turns, equal_rounds, forward_turns, round_size
from meshwright.schedules.spec import ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank. Source: Narayanan et al. (SC 2021), section 2.2, figure 4 bottom."""
    sizes = (rank, ranks, stages_per_rank, microbatches)
    forwards = [forward(*turn) for turn in forward_turns(*sizes)]
    backwards = [backward(*turn) for turn in backward_turns(*sizes)]
    warmup = (stages_per_rank - 1) * round_size(ranks, microbatches) + 2 * (ranks - 1 - rank)
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards):
        actions += pair
    return actions + backwards[len(forwards) - warmup :]


def bubble(ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the stated bubble, where m is a multiple of p. Source: Narayanan et al. (SC 2021), section 2.2.2."""
    if microbatches % ranks:
        return None
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)


def peak_live(ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """Returns the most live pairs on a rank: rank 0's warm-up forwards, and one more."""
    warmup = (stages_per_rank - 1) * round_size(ranks, microbatches) + 2 * (ranks - 1)
    return min(warmup + 1, stages_per_rank * microbatches)


def in_flight(ranks: int, stages_per_rank: Array, microbatches: Array, rank: Array) -> Array:
    """Returns in-flight micro-batches by rank, (N, P): as `peak_live`; later ranks have fewer warm-up forwards."""
    round_microbatches = microbatches / np.maximum(1, np.floor(microbatches / ranks))
    warmup = (stages_per_rank - 1) * round_microbatches + 2 * (ranks - 1 - rank)
    return np.minimum((warmup + 1) / stages_per_rank, microbatches)


SCHEDULE = ScheduleSpec(
    name="interleaved",
    purpose="a bubble v times smaller than 1f1b, for v times the sends and more held",
    source="Narayanan et al., Efficient Large-Scale Language Model Training (SC 2021), arXiv:2104.04473",
    order=order,
    least_stages=2,
    most_stages=None,
    rule=equal_rounds,
    bubble=bubble,
    bubble_text="(p-1) / (v m+p-1) when p divides m",
    peak_live=peak_live,
    peak_text="min(v m, (v-1) r + 2p - 1), r = m / max(1, m // p)",
    step_s=interleaved_step_s,
    in_flight=in_flight,
)
