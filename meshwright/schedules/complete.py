"""Is a schedule whole: every forward and backward once, on one rank, each in an order that a rank can run?"""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule, backward, backward_weight, forward

OTHER_BACKWARD = {ActionKind.BACKWARD: ActionKind.INPUT, ActionKind.INPUT: ActionKind.BACKWARD}
"""What can't stand beside a backward of the same stage and micro-batch."""
_Key = tuple[int, ActionKind, int]


def check_complete(schedule: Schedule) -> None:
    """Checks each row on its own; whether the rows fit together is for `simulate` to say.

    Args:
        schedule: any schedule, also a user's own.

    Raises:
        PlanError: an action is missing, stands twice, stands before what it needs on its own rank, or names a stage or
            micro-batch that isn't there; or a stage stands on two ranks.
    """
    seen: dict[_Key, int] = {}
    owner: dict[int, int] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for part in action.parts:
                _add(part, rank, schedule, seen, owner)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_pair(stage, microbatch, schedule, seen)
    _check_losses(schedule)


def _add(part: Action, rank: int, schedule: Schedule, seen: dict[_Key, int], owner: dict[int, int]) -> None:
    stage, kind, microbatch = part.stage, part.kind, part.microbatch
    if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
        raise PlanError(
            f"{_where(schedule, rank, part)} is outside the {schedule.stages} stages and {schedule.microbatches} "
            "micro-batches; numbers start at 0"
        )
    if owner.setdefault(stage, rank) != rank:
        raise PlanError(
            f"{_where(schedule, rank, part)}: stage {stage} runs on rank {owner[stage]} already; a stage has one rank, "
            "move the action"
        )
    key = (stage, kind, microbatch)
    same = OTHER_BACKWARD.get(kind)
    if key in seen or (same is not None and (stage, same, microbatch) in seen):
        raise PlanError(f"{_where(schedule, rank, part)}: this was computed before on the rank; leave one of the two")
    if kind is not ActionKind.FORWARD:
        needs = (stage, ActionKind.INPUT if kind is ActionKind.WEIGHT else ActionKind.FORWARD, microbatch)
        if needs not in seen:
            raise PlanError(
                f"{_where(schedule, rank, part)} waits for {Action(*needs)}, which the rank doesn't run before it; "
                f"put {Action(*needs)} in front"
            )
    seen[key] = rank


def _where(schedule: Schedule, rank: int, part: Action) -> str:
    return f"schedule {schedule.name}, rank {rank}: {part}"


def _check_pair(stage: int, microbatch: int, schedule: Schedule, seen: dict[_Key, int]) -> None:
    missing = None
    if (stage, ActionKind.FORWARD, microbatch) not in seen:
        missing, waits = forward(stage, microbatch), forward(stage + 1, microbatch)
        if stage == schedule.stages - 1:
            waits = backward(stage, microbatch)
    elif (stage, ActionKind.INPUT, microbatch) in seen and (stage, ActionKind.WEIGHT, microbatch) not in seen:
        missing, waits = backward_weight(stage, microbatch), None
    elif not {(stage, ActionKind.BACKWARD, microbatch), (stage, ActionKind.INPUT, microbatch)} & seen.keys():
        missing, waits = backward(stage, microbatch), backward(stage - 1, microbatch) if stage else None
    if missing is not None:
        sizes = f"{schedule.stages} stages x {schedule.microbatches} micro-batches"
        waiter = str(waits) if waits is not None else "the optimizer step"
        raise PlanError(
            f"schedule {schedule.name}: {missing} is on no rank, and {waiter} waits for it; each of {sizes} needs one "
            "forward, and one B or one I and W"
        )


def _check_losses(schedule: Schedule) -> None:
    """Torch's runtime stores losses as the last stage makes them, and takes the k-th for micro-batch k."""
    expected = 0
    for row in schedule.actions:
        for part in (part for action in row for part in action.parts):
            if part.stage == schedule.stages - 1 and part.kind is ActionKind.FORWARD:
                if part.microbatch != expected:
                    raise PlanError(
                        f"schedule {schedule.name}: the last stage runs {part} where "
                        f"{forward(part.stage, expected)} is due; its forwards go in order of micro-batches, as "
                        "torch's runtime finds the loss of a micro-batch by that order"
                    )
                expected += 1
