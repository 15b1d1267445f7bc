"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from meshwright.schedules.action import Action, backward, forward
from meshwright.schedules.closed_form import single_stage_step_s
from meshwright.schedules.spec import ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank. Source: Huang et al., GPipe (2019), figure 2c."""
    forwards = [forward(rank, microbatch) for microbatch in range(microbatches)]
    return forwards + [backward(rank, microbatch) for microbatch in range(microbatches)]


SCHEDULE = ScheduleSpec(
    name="gpipe",
    purpose="the plainest; holds every micro-batch, so only for few of them",
    source="Huang et al., GPipe (2019), arXiv:1811.06965",
    order=order,
    least_stages=1,
    most_stages=1,
    bubble=lambda ranks, stages_per_rank, microbatches: (ranks - 1) / (microbatches + ranks - 1),
    bubble_text="(p-1) / (m+p-1)",
    peak_live=lambda ranks, stages_per_rank, microbatches: microbatches,
    peak_text="m",
    step_s=single_stage_step_s,
    in_flight=lambda ranks, stages_per_rank, microbatches, rank: microbatches + 0 * rank,
    searched=False,  # 1F1B idles no more and holds less
)
