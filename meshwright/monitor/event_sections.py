"""Sections of the page about a mixture's experts, devices and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from meshwright.monitor.charts import bar_chart
from meshwright.monitor.page import note, table
from meshwright.monitor.rundir import RunFiles, number
from meshwright.units import format_bytes, format_seconds

HEALTH = ("slow_rank", "damaged", "damage_repaired", "left_out", "rank_lost", "plan_dropped", "node_lost",
          "snapshots_off", "drifted", "device_slowed", "device_errors", "drained", "drain_refused")  # fmt: skip
"""Kinds of events that say something about a device or its host."""
_CHECKPOINTS = ("checkpoint_saved", "checkpoint_failed", "checkpoint_refused", "checkpoint_fetched", "mirror_failed")
_MOST_ROWS = 12
_MOST_EXPERTS = 64
_WINDOW = 100


def experts(run: RunFiles) -> list[Markup]:
    """Draws which share of the router's choices went to each expert; empty for a model without experts."""
    recent = [step["experts"] for step in run.steps[-_WINDOW:] if step.get("experts")]
    if not recent:
        return []
    count = len(recent[-1])
    recent = [shares for shares in recent if len(shares) == count]
    means = [sum(float(shares[expert]) for shares in recent) / len(recent) for expert in range(count)]
    fullest = max(range(count), key=means.__getitem__)
    idle = sum(mean == 0 for mean in means)
    shown = sorted(range(count), key=lambda expert: -means[expert])[:_MOST_EXPERTS]
    return [
        note(
            f"Mean over the last {len(recent)} steps; an even share is {1 / count:.2%}. Expert {fullest} has "
            f"{means[fullest] * count:.2f} times as much; {idle} of {count} idle."
        ),
        bar_chart(
            [(f"expert {expert}", [{"share": means[expert]}]) for expert in sorted(shown)],
            "Share of the router's choices" + (f", the fullest {len(shown)}" if len(shown) < count else ""),
            lambda value: f"{value:.2%}",
            {"share": 0},
        ),
    ]


def devices(run: RunFiles) -> list[Markup]:
    """Lists what happened to devices and hosts, the newest first; empty where nothing did."""
    happened = run.of_kind(*HEALTH)
    rows = [
        (f"{event.get('slow', event.get('lost', event.get('device', event.get('rank', ''))))}", str(event["kind"]),
         _facts(event))
        for event in reversed(happened[-_MOST_ROWS:])
    ]  # fmt: skip
    return [table(("rank or device", "what", ""), rows)] if rows else []


def checkpoints(run: RunFiles) -> list[Markup]:
    """Lists the newest checkpoints, written, refused or failed."""
    rows = []
    for event in reversed(run.of_kind(*_CHECKPOINTS)[-_MOST_ROWS:]):
        size, seconds = number(event.get("bytes")), number(event.get("seconds"))
        rows.append(
            (
                str(event.get("step", "")),
                str(event["kind"]).replace("checkpoint_", ""),
                format_bytes(size) if size == size else "",
                format_seconds(seconds) if seconds == seconds else "",
                str(event.get("reason") or event.get("path", "")),
            )
        )
    return [table(("step", "", "size", "time", "where"), rows, (0, 2, 3))] if rows else []


def _facts(event: Mapping[str, object]) -> str:
    hidden = ("kind", "rank", "pid", "host", "time")
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in hidden)[:300]
