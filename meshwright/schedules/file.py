"""The user's choice of a schedule: a name, or ``file:PATH`` for a CSV of their own."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import PlanError
from meshwright.schedules.action import Schedule
from meshwright.schedules.costs import Costs
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import find_schedule

PREFIX = "file:"


def build_schedule(choice: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Builds what the user chose.

    Args:
        choice: a name of `known_schedules`, or ``file:PATH``.
        ranks: degree of the pipeline.
        stages_per_rank: model parts on each rank.
        microbatches: micro-batches of one step.

    Raises:
        PlanError: there is no such schedule, or it doesn't fit the sizes.
    """
    if choice.startswith(PREFIX):
        return from_file(choice.removeprefix(PREFIX), ranks, stages_per_rank, microbatches)
    return find_schedule(choice).build(ranks, stages_per_rank, microbatches)


def from_file(path: str | Path, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Reads a schedule from a CSV: one row per rank, cells are actions (torch's compute-only format).

    Args:
        path: the file.
        ranks: as many rows as it must have.
        stages_per_rank: as many stages as each row must run.
        microbatches: as many as it must run.

    Returns:
        The schedule, which is whole and runs to its end.

    Raises:
        PlanError: the file can't be read, is of other sizes, misses an action, or deadlocks.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise PlanError(f"schedule = {PREFIX}{path} can't be read ({fault}); give the path of a CSV file") from None
    schedule = Schedule.from_csv(text, name=f"{PREFIX}{path}")
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
    simulate(schedule, Costs.uniform(schedule.stages))
    for rank in range(ranks):
        if len(schedule.rank_stages(rank)) != stages_per_rank:
            raise PlanError(
                f"schedule {schedule.name}: rank {rank} runs the stages {schedule.rank_stages(rank)}, and "
                f"{stages_per_rank} per rank are asked for; take {len(schedule.rank_stages(rank))} stages per rank, "
                "the same on every rank"
            )
    return schedule
