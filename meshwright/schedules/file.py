"""Resolves the user's choice of a schedule: a name, or ``file:PATH`` for a custom CSV."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, Schedule
from meshwright.schedules.closed_form import PairedForm
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import ScheduleSpec, find_schedule

PREFIX = "file:"


def find_choice(choice: str) -> ScheduleSpec:
    """Returns the spec of the user's choice: a known schedule's, or one derived from a file's actions.

    Args:
        choice: a name of `known_schedules`, or ``file:PATH``.

    Raises:
        PlanError: there is no such schedule, or the file can't be read.
    """
    if not choice.startswith(PREFIX):
        return find_schedule(choice)
    text = _read_text(choice.removeprefix(PREFIX))
    return _spec_of_file(choice, text)


@lru_cache(maxsize=64)
def _spec_of_file(choice: str, text: str) -> ScheduleSpec:
    """Returns the spec of a file: it has one size, and every rank runs as many stages as the first."""
    schedule = Schedule.from_csv(text, name=choice)
    stages, peak_live = (
        len(schedule.rank_stages(0)),
        max(simulate(schedule, ActionCosts.uniform(schedule.stages)).peak_live_rank),
    )

    def order(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
        return list(schedule.actions[rank])

    def rule(ranks: int, stages_per_rank: int, microbatches: int) -> None:
        _check_sizes(schedule, ranks, stages_per_rank, microbatches)

    return ScheduleSpec(
        name=choice,
        purpose="a schedule of the user's",
        source=choice,
        order=order,
        least_stages=stages,
        most_stages=stages,
        splits_backward=schedule.splits_backward,
        rule=rule,
        peak_live=lambda ranks, stages_per_rank, microbatches: peak_live,
        peak_text="by its actions",
        searched=False,
        paired_share=_paired_form(schedule),
        owners=schedule.placement,
    )


def _paired_form(schedule: Schedule) -> PairedForm | None:
    """Returns the share of a rank's passes that run in pairs of different stages, of the rank with the fewest."""
    pairs = [[action.parts for action in actions if len(action.parts) == 2] for actions in schedule.actions]
    fewest = min(sum(first.stage != second.stage for first, second in rank_pairs) for rank_pairs in pairs)
    share = fewest / (len(schedule.rank_stages(0)) * schedule.microbatches)
    return (lambda ranks, microbatches: np.full(len(ranks), share)) if fewest else None


def build_schedule(choice: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Builds the schedule of the user's choice.

    Args:
        choice: a name of `known_schedules`, or ``file:PATH``.
        ranks: degree of the pipeline.
        stages_per_rank: stages of each rank; 0 for the fewest that the schedule allows.
        microbatches: micro-batches of one step.

    Raises:
        PlanError: there is no such schedule, or it doesn't fit the sizes; a file can't be read, lacks an action, or
            deadlocks.
    """
    spec = find_choice(choice)
    return spec.build(ranks, stages_per_rank or spec.least_stages, microbatches)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise PlanError(f"schedule = {PREFIX}{path} can't be read ({fault}); give the path of a CSV file") from None


def _check_sizes(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    if schedule.ranks != ranks:
        raise PlanError(
            f"schedule {schedule.name} has {schedule.ranks} rows, the pipeline {ranks} ranks; write one row per rank, "
            f"or take a pipeline of {schedule.ranks}"
        )
    if schedule.microbatches != microbatches:
        raise PlanError(
            f"schedule {schedule.name} runs {schedule.microbatches} micro-batches, the step has {microbatches}; take "
            f"{schedule.microbatches}, or write the other rows"
        )
    for rank in range(ranks):
        if len(schedule.rank_stages(rank)) != stages_per_rank:
            raise PlanError(
                f"schedule {schedule.name}: rank {rank} runs the stages {schedule.rank_stages(rank)}, and "
                f"{stages_per_rank} per rank are asked for; take {len(schedule.rank_stages(rank))} stages per rank, "
                "the same on every rank"
            )
