"""DualPipeV: two stages per rank in the shape of a V; in the steady phase a forward and a backward run as one action.

``down`` and ``up`` are a rank's stages on the V's way down (forward order) and up.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, backward, backward_input, backward_weight, forward, overlap
from meshwright.schedules.closed_form import Array, PassSums
from meshwright.schedules.spec import Placement, ScheduleSpec


class _RankActions:
    """A rank's actions so far, with the next micro-batch of each stage and the delayed weight gradients."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: dict[tuple[int, ActionKind], int] = {}
        self._delayed_weights: deque[tuple[int, int]] = deque()

    def _next_microbatch(self, stage: int, kind: ActionKind) -> int:
        """Returns and counts up the next micro-batch of a stage's forwards or backwards."""
        microbatch = self._counts.get((stage, kind), 0)
        self._counts[stage, kind] = microbatch + 1
        return microbatch

    def forward(self, *stages: int) -> None:
        """Adds a forward of each stage."""
        self.actions += [forward(stage, self._next_microbatch(stage, ActionKind.FORWARD)) for stage in stages]

    def backward(self, stage: int, split: bool = False) -> None:
        """Adds a backward of a stage; if ``split``, only its input half, and delays its weight half."""
        microbatch = self._next_microbatch(stage, ActionKind.BACKWARD)
        self.actions.append(backward_input(stage, microbatch) if split else backward(stage, microbatch))
        if split:
            self._delayed_weights.append((stage, microbatch))

    def weight(self) -> None:
        """Adds the oldest delayed weight half, if any."""
        if self._delayed_weights:
            self.actions.append(backward_weight(*self._delayed_weights.popleft()))

    def overlapped(self, forward_stage: int, backward_stage: int) -> None:
        """Adds a forward of one stage and a backward of the other as one action."""
        forward_action = forward(forward_stage, self._next_microbatch(forward_stage, ActionKind.FORWARD))
        backward_action = backward(backward_stage, self._next_microbatch(backward_stage, ActionKind.BACKWARD))
        self.actions.append(overlap(forward_action, backward_action))


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    Source: DeepSeek-AI, DeepSeek-V3 (2024), section 3.2.1, cut in half to a V by Sea AI Lab; the eight steps are those
    of https://github.com/deepseek-ai/DualPipe, dualpipev.py.
    """
    actions, down, up = _RankActions(), rank, 2 * ranks - 1 - rank
    later_ranks = ranks - 1 - rank
    actions.forward(*[down] * (2 * later_ranks))
    actions.forward(*[down, up] * (rank + 1))
    for _ in range(later_ranks):
        actions.backward(up, split=True)
        actions.weight()
        actions.forward(up)
    for step in range(microbatches - 2 * ranks + rank + 1):
        if step == 0 and later_ranks == 0:
            # Separate actions: the previous stage waits for this backward, and a pair would delay it.
            actions.forward(down)
            actions.backward(up)
        else:
            actions.overlapped(down, up)
        actions.overlapped(up, down)
    for _ in range(later_ranks):
        actions.backward(up)
        actions.overlapped(up, down)
    _drain(actions, down, up, rank, later_ranks)
    return actions.actions


def _drain(actions: _RankActions, down: int, up: int, rank: int, later_ranks: int) -> None:
    """Adds the last backwards; their second half is split, so that weight gradients fill the bubble."""
    half, is_odd = (rank + 1) // 2, rank % 2
    for step in range(rank + 1):
        actions.backward(up, split=step > half or (step == half and is_odd == 1))
        actions.backward(down, split=step >= half)
    for _ in range(later_ranks):
        actions.weight()
        actions.backward(down, split=True)
    for _ in range(rank + 1):
        actions.weight()


def _check_microbatches(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Checks the rule: at least as many micro-batches as stages."""
    if microbatches < 2 * ranks:
        raise PlanError(
            f"schedule dualpipev on {ranks} ranks needs as many micro-batches as stages, not {microbatches}; "
            f"take {2 * ranks} or more"
        )


def step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of a step, (N,): a rank waits (2F + I - W) / 2 for each other one, a third where all are equal.

    F, I and W are the seconds of a rank's two stages on a micro-batch; pairs run in turn. Read off the actions'
    simulated times, of which it is within a tenth of the waiting.
    """
    wait_share = (sums.slowest_rank + sums.forward - 2 * sums.weight) / 2.0 / np.maximum(sums.slowest_rank, 1e-30)
    return np.asarray(microbatches * sums.slowest_rank + (sums.all_ranks - sums.slowest_rank) * wait_share)


def paired_share(ranks: Array, microbatches: Array) -> Array:
    """Returns the share of rank 0's passes that run in pairs, (N,): 2 m - 3 p + 1 of 2 m; other ranks have more."""
    return np.maximum(0.0, (2 * microbatches - 3 * ranks + 1) / (2 * microbatches))


SCHEDULE = ScheduleSpec(
    name="dualpipev",
    purpose="hides what experts are sent under the other pass of a pair",
    source="DeepSeek-AI, DeepSeek-V3 (2024), arXiv:2412.19437; V form by Sea AI Lab, github.com/deepseek-ai/DualPipe",
    order=order,
    least_stages=2,
    most_stages=2,
    placement=Placement.V,
    splits_backward=True,
    rule=_check_microbatches,
    bubble=lambda ranks, stages_per_rank, microbatches: (ranks - 1) / (3 * microbatches + ranks - 1),
    bubble_text="(p-1) / (3m+p-1), pairs run in turn",
    peak_live=lambda ranks, stages_per_rank, microbatches: 2 * ranks + 1,
    peak_text="2p + 1",
    step_s=step_s,
    paired_share=paired_share,
    in_flight=lambda ranks, stages_per_rank, microbatches, rank: (
        np.minimum((2 * ranks + 1) / 2.0, microbatches) + 0 * rank
    ),
)
