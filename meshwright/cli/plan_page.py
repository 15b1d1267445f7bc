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
    summary = f"{best.layout}: {reason(question, choice)}"
    sections = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(summary)}</p>']
    sections.append(_summary_tiles(question, choice))
    sections.append("<h2>The best layouts</h2>" + _ranking_table(question, choice))
    if compared:
        sections.append("<h2>Your layouts</h2>" + table(("layout", "why"), list(compared.items())))
    rows = [
        (
            str(candidate.layout.degrees or "one device"),
            {NAMES[name]: value for name, value in candidate.price.parts.items()},
        )
        for candidate in choice.shown[:6]
    ]
    sections.append(
        "<h2>Parts of a step</h2>" + stacked_bars(_drop_invisible_parts(rows), "seconds of a step", format_seconds)
    )
    stages = best.price.stages
    # Of more stages than fit, every so many has a bar.
    stage_stride = max(1, math.ceil(len(stages) / MOST_BARS))
    bars = [
        (f"stage {stage_index}", dict(stages[stage_index].memory))
        for stage_index in range(0, len(stages), stage_stride)
    ]
    sections.append("<h2>Memory of a rank of each stage</h2>" + stacked_bars(bars, "bytes of a rank", format_bytes))
    simulated = timeline(job, best.layout, question.machine, question.runtime) if question.cluster.uniform else None
    if simulated is not None and len(simulated.timeline) <= MOST_SPANS:
        sections.append("<h2>The pipeline of one step</h2><figure>" + draw.svg(simulated, 1060) + "</figure>")
    sections.append("<h2>Time against memory</h2>" + _front_figure(question, choice))
    sections += [f'<p class="small">{escape(note)}</p>' for note in choice.notes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, "".join(sections)), encoding="utf-8")
    return path


def _summary_tiles(question: Question, choice: Choice) -> str:
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


def _ranking_table(question: Question, choice: Choice) -> str:
    best = choice.best[0]
    rows = []
    for candidate in choice.shown:
        comparison = against(candidate, best, question.same) if candidate is not best else ""
        cells = (str(candidate.layout), format_seconds(candidate.price.step_s), format_count(candidate.tokens_per_s))
        rows.append((*cells, format_bytes(candidate.price.peak), comparison))
    return table(("layout", "step", "tokens/s", "fullest rank", "against the first"), rows, (1, 2, 3))


def _drop_invisible_parts(rows: Sequence[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """Returns the rows numbered instead of named, without the parts too short to be seen."""
    longest = max(sum(seconds_by_part.values()) for _, seconds_by_part in rows)
    return [
        (f"{position}.", {name: value for name, value in seconds_by_part.items() if value > 0.002 * longest})
        for position, (_, seconds_by_part) in enumerate(rows, start=1)
    ]


def _front_figure(question: Question, choice: Choice) -> str:
    """Draws the Pareto front of the layouts: seconds of a step against bytes of the fullest rank."""
    points = choice.front
    memory_bytes = question.cluster.memory_bytes
    # A margin on either side, so that no point lies on the edge.
    slow = max(step for step, _, _ in points) * 1.05
    fast = min(step for step, _, _ in points) * 0.97
    left_px, right_px, top_px, bottom_px = 70.0, 1030.0, 12.0, 240.0

    def to_pixels(step: float, peak: float) -> tuple[float, float]:
        fraction = (step - fast) / ((slow - fast) or 1.0)
        return left_px + fraction * (right_px - left_px), bottom_px - peak / memory_bytes * (bottom_px - top_px)

    marks = []
    for step, peak, text in points:
        x, y = to_pixels(step, peak)
        note = f"{text}: {format_seconds(step)}, {format_bytes(peak)}"
        marks.append(f'<circle class="dot f0" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(note)}</title></circle>')
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom_px - share * (bottom_px - top_px)
        marks.append(f'<line class="grid" x1="{left_px}" x2="{right_px}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(
            f'<text x="{left_px - 6}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(share * memory_bytes)}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        x = left_px + share * (right_px - left_px)
        label = format_seconds(fast + share * (slow - fast))
        marks.append(f'<text x="{x:.1f}" y="{bottom_px + 18}" text-anchor="middle">{label}</text>')
    drawn = f'<svg viewBox="0 0 1046 264" role="img" aria-label="time against memory">{"".join(marks)}</svg>'
    rows = [(text, format_seconds(step), format_bytes(peak)) for step, peak, text in points]
    return f"<figure>{drawn}</figure>" + table(("layout", "step", "fullest rank"), rows, (1, 2))
