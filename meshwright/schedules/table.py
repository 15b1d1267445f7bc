"""Tabulates every known schedule at one size: stated and simulated bubble and memory."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import ScheduleSpec, known_schedules


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One schedule at one size, at unit costs: F = I = W = 1, B = 2, sends free."""

    name: str
    """Name in layouts and options."""
    purpose: str
    """When to use it."""
    source: str
    """The paper."""
    stages_per_rank: int
    """Stages per rank of the simulation."""
    stages_text: str
    """Stages per rank that it allows."""
    bubble_text: str
    """Stated bubble, as a formula."""
    bubble_stated: float | None
    """Stated bubble."""
    bubble: float | None
    """Simulated bubble; None when refused."""
    peak_text: str
    """Stated peak of live pairs on a rank, as a formula."""
    peak_live: int | None
    """Simulated peak of live (stage, micro-batch) pairs on a rank."""
    peak_share: float | None
    """The same in units of all stages of the rank: `peak_live` / `stages_per_rank`."""
    refused: str
    """The reason why it doesn't exist for this size; empty if it does."""


def rows(ranks: int, microbatches: int) -> list[Row]:
    """Returns a row for every known schedule, with the fewest stages per rank that it allows."""
    return [_row(spec, ranks, microbatches) for spec in known_schedules().values()]


def _row(spec: ScheduleSpec, ranks: int, microbatches: int) -> Row:
    stages = spec.least_stages
    stated = bubble = peak_live = None
    refused = ""
    try:
        schedule = spec.build(ranks, stages, microbatches)
    except PlanError as error:
        refused = str(error)
    else:
        simulation = simulate(schedule, ActionCosts.uniform(schedule.stages))
        stated, bubble, peak_live = (
            spec.bubble(ranks, stages, microbatches),
            simulation.bubble,
            max(simulation.peak_live_rank),
        )
    return Row(
        name=spec.name,
        purpose=spec.purpose,
        source=spec.source,
        stages_per_rank=stages,
        stages_text=spec.stages_text,
        bubble_text=spec.bubble_text,
        bubble_stated=stated,
        bubble=bubble,
        peak_text=spec.peak_text,
        peak_live=peak_live,
        peak_share=None if peak_live is None else peak_live / stages,
        refused=refused,
    )


def as_text(table_rows: list[Row]) -> str:
    """Returns the rows as lines for a terminal."""
    lines = [f"{'schedule':<12} {'stages/rank':<11} {'bubble':>7}  {'stated':<34} {'live':>5}  stated"]
    for row in table_rows:
        if row.refused:
            lines.append(f"{row.name:<12} {row.stages_text:<11} {'-':>7}  {row.refused}")
            continue
        lines.append(
            f"{row.name:<12} {row.stages_text:<11} {row.bubble:>7.2%}  {row.bubble_text:<34} {row.peak_live:>5}  "
            f"{row.peak_text}"
        )
    return "\n".join(lines) + "\n"
