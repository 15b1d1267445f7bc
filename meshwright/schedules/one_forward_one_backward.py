"""1F1B: GPipe's time, but each backward runs as early as possible, so that fewer micro-batches are in flight."""

from __future__ import annotations

import numpy as np

from meshwright.schedules.action import Action, backward, forward
from meshwright.schedules.closed_form import single_stage_step_s
from meshwright.schedules.spec import ScheduleSpec


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021), PipeDream-Flush; figure 4 top of
    Narayanan et al. (SC 2021). Torch's table of this schedule counts the forwards of the last rank from 1
    (``forward_mb`` starts at 0 there and is raised before its first use), so it never runs micro-batch 0 forward and
    runs one that doesn't exist; here they count from 0, as torch's own loop of the schedule runs them. Torch refuses
    fewer micro-batches than ranks; the order holds for these as well.
    """
    warmup = min(ranks - 1 - rank, microbatches)
    actions = [forward(rank, microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, microbatches):
        actions += (forward(rank, microbatch), backward(rank, microbatch - warmup))
    return actions + [backward(rank, microbatch) for microbatch in range(microbatches - warmup, microbatches)]


SCHEDULE = ScheduleSpec(
    name="1f1b",
    purpose="the default: one stage per rank, at most p micro-batches held",
    source="Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021), arXiv:2006.09503",
    order=order,
    least_stages=1,
    most_stages=1,
    bubble=lambda ranks, stages_per_rank, microbatches: (ranks - 1) / (microbatches + ranks - 1),
    bubble_text="(p-1) / (m+p-1)",
    peak_live=lambda ranks, stages_per_rank, microbatches: min(ranks, microbatches),
    peak_text="min(p, m)",
    step_s=single_stage_step_s,
    in_flight=lambda ranks, stages_per_rank, microbatches, rank: np.minimum(microbatches, ranks - rank),
)
