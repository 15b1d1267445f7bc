"""A plan as one self-contained page: the ranking, the parts of step and memory, the timeline, the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from meshwright.monitor.charts import scatter_chart, stacked_bars
from meshwright.monitor.page import Section, drawing, note, page, table, tiles, title
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
    name = f"{job.shape.name} on {question.cluster}"
    sections: list[Section] = [
        ("", [title(name, f"{best.layout}: {reason(question, choice)}"), _summary_tiles(question, choice)]),
        ("The best layouts", [_ranking_table(question, choice)]),
        ("Your layouts", [table(("layout", "why"), list(compared.items()))] if compared else []),
    ]
    rows = [
        (
            str(candidate.layout.degrees or "one device"),
            {NAMES[part]: seconds for part, seconds in candidate.price.parts.items()},
        )
        for candidate in choice.shown[:6]
    ]
    seconds_figure = stacked_bars(_drop_invisible_parts(rows), "seconds of a step", format_seconds)
    sections.append(("Parts of a step", [seconds_figure]))
    stages = best.price.stages
    # Of more stages than fit, every so many has a bar.
    stage_stride = max(1, math.ceil(len(stages) / MOST_BARS))
    bars = [
        (f"stage {stage_index}", dict(stages[stage_index].memory))
        for stage_index in range(0, len(stages), stage_stride)
    ]
    sections.append(("Memory of a rank of each stage", [stacked_bars(bars, "bytes of a rank", format_bytes)]))
    simulated = timeline(job, best.layout, question.machine, question.runtime) if question.cluster.uniform else None
    # Browsers crawl over larger drawings.
    if simulated is not None and len(simulated.timeline) <= MOST_SPANS:
        # The schedules draw themselves, and escape what they write.
        sections.append(("The pipeline of one step", [drawing(Markup(draw.svg(simulated, 1060)))]))
    sections.append(("Time against memory", _front_figure(question, choice)))
    sections.append(("", [note(text) for text in choice.notes]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(name, sections), encoding="utf-8")
    return path


def _summary_tiles(question: Question, choice: Choice) -> Markup:
    best = choice.best[0]
    free = question.cluster.memory_bytes - best.price.peak
    entries = [
        ("a step", format_seconds(best.price.step_s), f"{format_count(best.tokens_per_s)} tokens/s"),
        ("fullest rank", format_bytes(best.price.peak), f"{format_bytes(free)} free"),
        ("layouts", format_count(choice.considered), f"{choice.priced} priced in {format_seconds(choice.search_s)}"),
    ]
    if best.price.host:
        entries.append(("in host memory", format_bytes(best.price.host), "of a rank"))
    if best.cost_per_mtoken is not None:
        entries.append(("a million tokens", f"${best.cost_per_mtoken:.4f}", "at the catalogue's price"))
    if best.joules_per_token is not None:
        entries.append(("a token", f"{best.joules_per_token:.3f} J", "at the power under load"))
    return tiles(entries)


def _ranking_table(question: Question, choice: Choice) -> Markup:
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


def _front_figure(question: Question, choice: Choice) -> list[Markup]:
    """Draws the Pareto front of the layouts: seconds of a step against bytes of the fullest rank."""
    texts = [(text, format_seconds(step), format_bytes(peak)) for step, peak, text in choice.front]
    points = [
        (step, float(peak), f"{text}: {seconds}, {memory}")
        for (step, peak, _), (text, seconds, memory) in zip(choice.front, texts)
    ]
    labels = ("seconds of a step", "bytes of the fullest rank")
    formats = (format_seconds, format_bytes)
    figure = scatter_chart(points, "Time against memory", labels, formats, question.cluster.memory_bytes)
    return [figure, table(("layout", "step", "fullest rank"), texts, (1, 2))]
