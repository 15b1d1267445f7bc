"""Checks that a schedule is complete: every forward and backward once, on one rank, in an order that it can run."""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule, backward, backward_weight, forward

OTHER_BACKWARD = {ActionKind.BACKWARD: ActionKind.INPUT, ActionKind.INPUT: ActionKind.BACKWARD}
"""The kind that excludes a backward of the same stage and micro-batch: a full one excludes a split one."""
_Key = tuple[int, ActionKind, int]


def check_complete(schedule: Schedule) -> None:
    """Checks each rank's row by itself; `simulate` finds deadlocks between rows.

    Args:
        schedule: any schedule, also a user's own.

    Raises:
        PlanError: an action is missing, appears twice or before its input on its own rank, or has a stage or
            micro-batch out of range; or a stage is on two ranks.
    """
    computed: dict[_Key, int] = {}
    stage_rank: dict[int, int] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for single in action.parts:
                _record(single, rank, schedule, computed, stage_rank)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_pair(stage, microbatch, schedule, computed)
    _check_losses(schedule)


def _record(
    action: Action, rank: int, schedule: Schedule, computed: dict[_Key, int], stage_rank: dict[int, int]
) -> None:
    """Checks one action against its rank's earlier ones, and adds it to ``computed`` and ``stage_rank``."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
        raise PlanError(
            f"{_position(schedule, rank, action)} is outside the {schedule.stages} stages and "
            f"{schedule.microbatches} micro-batches; numbers start at 0"
        )
    if stage_rank.setdefault(stage, rank) != rank:
        raise PlanError(
            f"{_position(schedule, rank, action)}: stage {stage} runs on rank {stage_rank[stage]} already; a stage has "
            "one rank, move the action"
        )
    key = (stage, kind, microbatch)
    other_backward = OTHER_BACKWARD.get(kind)
    if key in computed or (other_backward is not None and (stage, other_backward, microbatch) in computed):
        raise PlanError(
            f"{_position(schedule, rank, action)}: this was computed before on the rank; leave one of the two"
        )
    if kind is not ActionKind.FORWARD:
        needed = (stage, ActionKind.INPUT if kind is ActionKind.WEIGHT else ActionKind.FORWARD, microbatch)
        if needed not in computed:
            raise PlanError(
                f"{_position(schedule, rank, action)} waits for {Action(*needed)}, which the rank doesn't run before "
                f"it; put {Action(*needed)} in front"
            )
    computed[key] = rank


def _position(schedule: Schedule, rank: int, action: Action) -> str:
    return f"schedule {schedule.name}, rank {rank}: {action}"


def _check_pair(stage: int, microbatch: int, schedule: Schedule, computed: dict[_Key, int]) -> None:
    """Checks that a stage has a forward and a backward, or both of its halves, of a micro-batch."""
    missing = None
    if (stage, ActionKind.FORWARD, microbatch) not in computed:
        missing, waiting_action = forward(stage, microbatch), forward(stage + 1, microbatch)
        if stage == schedule.stages - 1:
            waiting_action = backward(stage, microbatch)
    elif (stage, ActionKind.INPUT, microbatch) in computed and (stage, ActionKind.WEIGHT, microbatch) not in computed:
        missing, waiting_action = backward_weight(stage, microbatch), None
    elif not {(stage, ActionKind.BACKWARD, microbatch), (stage, ActionKind.INPUT, microbatch)} & computed.keys():
        missing, waiting_action = backward(stage, microbatch), backward(stage - 1, microbatch) if stage else None
    if missing is not None:
        sizes = f"{schedule.stages} stages x {schedule.microbatches} micro-batches"
        waiter = str(waiting_action) if waiting_action is not None else "the optimizer step"
        raise PlanError(
            f"schedule {schedule.name}: {missing} is on no rank, and {waiter} waits for it; each of {sizes} needs one "
            "forward, and one B or one I and W"
        )


def _check_losses(schedule: Schedule) -> None:
    """Checks that the last stage's forwards run in order: torch's runtime takes its k-th loss for micro-batch k."""
    expected = 0
    for row in schedule.actions:
        for single in (single for action in row for single in action.parts):
            if single.stage == schedule.stages - 1 and single.kind is ActionKind.FORWARD:
                if single.microbatch != expected:
                    raise PlanError(
                        f"schedule {schedule.name}: the last stage runs {single} where "
                        f"{forward(single.stage, expected)} is due; its forwards go in order of micro-batches, as "
                        "torch's runtime finds the loss of a micro-batch by that order"
                    )
                expected += 1
