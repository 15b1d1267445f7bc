"""Every known schedule beside the others, at one size: what it states, and what the simulator sees."""

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
    """What the user writes."""
    purpose: str
    """When to take it."""
    source: str
    """The paper."""
    stages_per_rank: int
    """Simulated with."""
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
    """The same in micro-batches of the rank's whole model part: `peak_live` / `stages_per_rank`."""
    refused: str
    """Why it can't be built for this size."""


def rows(ranks: int, microbatches: int) -> list[Row]:
    """Returns a row for every known schedule, with the fewest stages per rank that it allows."""
    return [_row(spec, ranks, microbatches) for spec in known_schedules().values()]


def _row(spec: ScheduleSpec, ranks: int, microbatches: int) -> Row:
    stages = spec.least_stages
    stated = bubble = peak = None
    refused = ""
    try:
        schedule = spec.build(ranks, stages, microbatches)
    except PlanError as error:
        refused = str(error)
    else:
        seen = simulate(schedule, ActionCosts.uniform(schedule.stages))
        stated, bubble, peak = spec.bubble(ranks, stages, microbatches), seen.bubble, max(seen.peak_live_rank)
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
        peak_live=peak,
        peak_share=None if peak is None else peak / stages,
        refused=refused,
    )


def as_text(found: list[Row]) -> str:
    """Returns the rows as lines for a terminal."""
    lines = [f"{'schedule':<12} {'stages/rank':<11} {'bubble':>7}  {'stated':<34} {'live':>5}  stated"]
    for row in found:
        if row.refused:
            lines.append(f"{row.name:<12} {row.stages_text:<11} {'-':>7}  {row.refused}")
            continue
        lines.append(
            f"{row.name:<12} {row.stages_text:<11} {row.bubble:>7.2%}  {row.bubble_text:<34} {row.peak_live:>5}  "
            f"{row.peak_text}"
        )
    return "\n".join(lines) + "\n"
