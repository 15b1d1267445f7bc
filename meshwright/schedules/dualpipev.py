"""DualPipeV: two stages per rank in the shape of a V; in the middle a forward and a backward run as one action."""

from __future__ import annotations

from collections import deque

import numpy as np

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, backward, backward_input, backward_weight, forward, overlap
from meshwright.schedules.closed_form import Array, PassSums
from meshwright.schedules.spec import Placement, ScheduleSpec


class _Row:
    """A rank's actions so far: the next micro-batch of each stage, and the weights that wait."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[int, ActionKind], int] = {}
        self._waiting: deque[tuple[int, int]] = deque()

    def _turn(self, stage: int, way: ActionKind) -> int:
        turn = self._next.get((stage, way), 0)
        self._next[stage, way] = turn + 1
        return turn

    def forward(self, *stages: int) -> None:
        self.actions += [forward(stage, self._turn(stage, ActionKind.FORWARD)) for stage in stages]

    def backward(self, stage: int, split: bool = False) -> None:
        turn = self._turn(stage, ActionKind.BACKWARD)
        self.actions.append(backward_input(stage, turn) if split else backward(stage, turn))
        if split:
            self._waiting.append((stage, turn))

    def weight(self) -> None:
        if self._waiting:
            self.actions.append(backward_weight(*self._waiting.popleft()))

    def both(self, ahead: int, back: int) -> None:
        first = forward(ahead, self._turn(ahead, ActionKind.FORWARD))
        self.actions.append(overlap(first, backward(back, self._turn(back, ActionKind.BACKWARD))))


def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """Returns the actions of a rank.

    Source: DeepSeek-AI, DeepSeek-V3 (2024), section 3.2.1, cut in half to a V by Sea AI Lab; the eight steps are those
    of https://github.com/deepseek-ai/DualPipe, dualpipev.py.
    """
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank
    below = ranks - 1 - rank
    row.forward(*[down] * (2 * below))
    row.forward(*[down, up] * (rank + 1))
    for _ in range(below):
        row.backward(up, split=True)
        row.weight()
        row.forward(up)
    for place in range(microbatches - 2 * ranks + rank + 1):
        if place == 0 and below == 0:
            # Apart, not as one: the stage before waits for this backward.
            row.forward(down)
            row.backward(up)
        else:
            row.both(down, up)
        row.both(up, down)
    for _ in range(below):
        row.backward(up)
        row.both(up, down)
    _drain(row, down, up, rank, below)
    return row.actions


def _drain(row: _Row, down: int, up: int, rank: int, below: int) -> None:
    """The second half of the last backwards is split, so that weights fill what would be idle."""
    half, odd = (rank + 1) // 2, rank % 2
    for place in range(rank + 1):
        row.backward(up, split=place > half or (place == half and odd == 1))
        row.backward(down, split=place >= half)
    for _ in range(below):
        row.weight()
        row.backward(down, split=True)
    for _ in range(rank + 1):
        row.weight()


def _enough(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """The rule: as many micro-batches as stages, or more."""
    if microbatches < 2 * ranks:
        raise PlanError(
            f"schedule dualpipev on {ranks} ranks needs as many micro-batches as stages, not {microbatches}; "
            f"take {2 * ranks} or more"
        )


def step_s(ranks: int, stages_per_rank: Array, microbatches: Array, sums: PassSums) -> Array:
    """Returns seconds of a step: a sixth of filling and draining is left."""
    return microbatches * sums.dearest + (sums.whole - sums.dearest) / 6.0


SCHEDULE = ScheduleSpec(
    name="dualpipev",
    purpose="hides the sends of mixtures of experts behind compute, where the runtime overlaps the pairs",
    source="DeepSeek-AI, DeepSeek-V3 (2024), arXiv:2412.19437; V form by Sea AI Lab, github.com/deepseek-ai/DualPipe",
    order=order,
    least_stages=2,
    most_stages=2,
    placement=Placement.V,
    splits_backward=True,
    rule=_enough,
    bubble=lambda ranks, stages_per_rank, microbatches: (ranks - 1) / (3 * microbatches + ranks - 1),
    bubble_text="(p-1) / (3m+p-1), pairs run in turn",
    peak_live=lambda ranks, stages_per_rank, microbatches: 2 * ranks + 1,
    peak_text="2p + 1",
    step_s=step_s,
    held=lambda ranks, stages_per_rank, microbatches, rank: np.minimum((2 * ranks + 1) / 2.0, microbatches) + 0 * rank,
)
