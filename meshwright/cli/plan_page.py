"""A plan as one self-contained page: the ranking, the parts of step and memory, the timeline, the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from meshwright.monitor.bars import stacked_bars
from meshwright.monitor.page import page, table, tiles
from meshwright.planner.choose import Choice, Question
from meshwright.planner.explain import NAMES, against, reason
from meshwright.planner.timeline import timeline
from meshwright.schedules import draw
from meshwright.units import format_bytes, format_count, format_seconds

MOST_BARS = 24
"""Stages that have a bar of their own; of more, every so many."""
MOST_SPANS = 20000
"""Actions up to which a timeline is drawn."""


def write_page(path: Path, question: Question, choice: Choice, compared: dict[str, str]) -> Path:
    """Writes the page and returns its path.

    Args:
        path: of the HTML file; its directory is made.
        question: what was planned.
        choice: the answer.
        compared: layouts that the user named, with why they lose.
    """
    job, best = question.job, choice.best[0]
    title = f"{job.shape.name} on {question.cluster}"
    told = f"{best.layout}: {reason(question, choice)}"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(told)}</p>']
    parts.append(_tiles(question, choice))
    parts.append("<h2>The best layouts</h2>" + _ranking(question, choice))
    if compared:
        parts.append("<h2>Your layouts</h2>" + table(("layout", "why"), list(compared.items())))
    rows = [
        (str(one.layout.degrees or "one device"), {NAMES[name]: value for name, value in one.price.parts.items()})
        for one in choice.shown[:6]
    ]
    parts.append("<h2>Parts of a step</h2>" + stacked_bars(_short(rows), "seconds of a step", format_seconds))
    stages = best.price.stages
    every = max(1, math.ceil(len(stages) / MOST_BARS))
    bars = [(f"stage {at}", dict(stages[at].memory)) for at in range(0, len(stages), every)]
    parts.append("<h2>Memory of a rank of each stage</h2>" + stacked_bars(bars, "bytes of a rank", format_bytes))
    run = timeline(job, best.layout, question.machine, question.runtime) if question.cluster.uniform else None
    if run is not None and len(run.timeline) <= MOST_SPANS:
        parts.append("<h2>The pipeline of one step</h2><figure>" + draw.svg(run, 1060) + "</figure>")
    parts.append("<h2>Time against memory</h2>" + _front(question, choice))
    parts += [f'<p class="small">{escape(note)}</p>' for note in choice.notes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, "".join(parts)), encoding="utf-8")
    return path


def _tiles(question: Question, choice: Choice) -> str:
    best = choice.best[0]
    free = question.cluster.memory_bytes - best.price.peak
    entries = [
        ("a step", format_seconds(best.price.step_s), f"{format_count(best.tokens_per_s)} tokens/s"),
        ("fullest rank", format_bytes(best.price.peak), f"{format_bytes(free)} free"),
        ("layouts", format_count(choice.considered), f"{choice.priced} priced in {format_seconds(choice.took_s)}"),
    ]
    if best.price.host:
        entries.append(("in host memory", format_bytes(best.price.host), "of a rank"))
    if best.cost_per_mtoken is not None:
        entries.append(("a million tokens", f"${best.cost_per_mtoken:.4f}", "at the catalogue's price"))
    if best.joules_per_token is not None:
        entries.append(("a token", f"{best.joules_per_token:.3f} J", "at the power under load"))
    return tiles(entries)


def _ranking(question: Question, choice: Choice) -> str:
    best = choice.best[0]
    rows = []
    for one in choice.shown:
        told = against(one, best, question.same) if one is not best else ""
        cells = (str(one.layout), format_seconds(one.price.step_s), format_count(one.tokens_per_s))
        rows.append((*cells, format_bytes(one.price.peak), told))
    return table(("layout", "step", "tokens/s", "fullest rank", "against the first"), rows, (1, 2, 3))


def _short(rows: Sequence[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """Numbers instead of names, and no parts that can't be seen."""
    longest = max(sum(parts.values()) for _, parts in rows)
    return [
        (f"{place}.", {name: value for name, value in parts.items() if value > 0.002 * longest})
        for place, (_, parts) in enumerate(rows, start=1)
    ]


def _front(question: Question, choice: Choice) -> str:
    """A scatter of the layouts than which none is both faster and leaner."""
    points = choice.front
    room = question.cluster.memory_bytes
    slow = max(step for step, _, _ in points) * 1.05
    fast = min(step for step, _, _ in points) * 0.97
    left, right, top, bottom = 70.0, 1030.0, 12.0, 240.0

    def place(step: float, peak: float) -> tuple[float, float]:
        along = (step - fast) / ((slow - fast) or 1.0)
        return left + along * (right - left), bottom - peak / room * (bottom - top)

    marks = []
    for step, peak, text in points:
        x, y = place(step, peak)
        note = f"{text}: {format_seconds(step)}, {format_bytes(peak)}"
        marks.append(f'<circle class="dot f0" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(note)}</title></circle>')
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        marks.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(share * room)}</text>')
    for share in (0.0, 0.5, 1.0):
        x = left + share * (right - left)
        label = format_seconds(fast + share * (slow - fast))
        marks.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    drawn = f'<svg viewBox="0 0 1046 264" role="img" aria-label="time against memory">{"".join(marks)}</svg>'
    rows = [(text, format_seconds(step), format_bytes(peak)) for step, peak, text in points]
    return f"<figure>{drawn}</figure>" + table(("layout", "step", "fullest rank"), rows, (1, 2))
