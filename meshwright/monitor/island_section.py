"""The report's section on islands: their losses, how far they were apart, and what their joins sent."""

from __future__ import annotations

import math

from markupsafe import Markup

from meshwright.json_types import JsonObject
from meshwright.monitor.charts import Series, line_chart
from meshwright.monitor.page import note, table, two_columns
from meshwright.monitor.rundir import RunFiles, column, number
from meshwright.units import format_bytes, format_seconds


def islands(run: RunFiles) -> list[Markup]:
    """Renders what joins of islands reported; empty for a run without islands."""
    steps = [step for step in run.steps if step.get("outer")]
    if not steps:
        return []
    x, joins = column(steps, "step"), [step["outer"] for step in steps]
    count = max(len(join.get("island_losses") or ()) for join in joins)
    losses = [
        Series(label=f"island {island}", x=x, y=[_loss(join, island) for join in joins], colour=island % 6)
        for island in range(count)
    ]
    distance = Series(label="apart", x=x, y=column(joins, "consensus_distance"))
    norm = Series(label="pseudo-gradient", x=x, y=column(joins, "pseudo_gradient_norm"), colour=1)
    sent, raw, waited = (_total(joins, name) for name in ("sent_bytes", "raw_bytes", "wait_s"))
    rows = [
        ("joins", str(len(joins))),
        ("sent by rank 0", f"{format_bytes(sent)}, {format_bytes(sent / len(joins))} a join"),
        ("its movements in their own type", f"{format_bytes(raw)}, {format_bytes(raw / len(joins))} a join"),
        ("stood still for joins", format_seconds(waited)),
    ]
    return [
        note("Islands train by themselves and join once in a round; losses are means over each island's round."),
        line_chart(losses, "Loss of each island", "nats per token", [], (), False, 1046),
        two_columns(
            [
                line_chart([distance], "Consensus distance", "2-norm", [], (), True, 504),
                line_chart([norm], "Pseudo-gradient", "2-norm", [], (), True, 504),
            ]
        ),
        table((), rows),
    ]


def _loss(join: JsonObject, island: int) -> float:
    losses = join.get("island_losses") or ()
    return number(losses[island]) if island < len(losses) else math.nan


def _total(joins: list[JsonObject], name: str) -> float:
    return sum(value for value in column(joins, name) if math.isfinite(value))
