"""Looped breadth-first: every micro-batch through one stage before the next stage of the rank."""

from __future__ import annotations

from meshwright.schedules.action import Action, backward, forward
from meshwright.schedules.closed_form import interleaved_step_s
from meshwright.schedules.spec import ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (2022). Backwards take the micro-batches last to
    first, as in torch: the newest activations are freed first.
    """
    stages = range(rank, ranks * stages_per_rank, ranks)
    actions = [forward(stage, microbatch) for stage in stages for microbatch in range(microbatches)]
    for stage in stages[::-1]:
        actions += [backward(stage, microbatch) for microbatch in range(microbatches)[::-1]]
    return actions


def bubble(ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
    """Returns the stated bubble for m >= p, which hides a lap over the ranks. Source: Lamy-Poirier (2022)."""
    if microbatches < ranks:
        return None
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)


SCHEDULE = ScheduleSpec(
    name="loopedbfs",
    purpose="each stage's weights are used once forward and once backward: cheapest with sharded weights; holds all",
    source="Lamy-Poirier, Breadth-First Pipeline Parallelism (2022), arXiv:2211.05953",
    order=order,
    least_stages=2,
    most_stages=None,
    bubble=bubble,
    bubble_text="(p-1) / (v m+p-1) when m >= p",
    peak_live=lambda ranks, stages_per_rank, microbatches: stages_per_rank * microbatches,
    peak_text="v m",
    step_s=interleaved_step_s,
    in_flight=lambda ranks, stages_per_rank, microbatches, rank: microbatches + 0 * rank,
    searched=False,  # interleaved 1F1B idles no more and holds less
)
