"""Draws a simulated schedule: as SVG for pages, and as lines of text for terminals."""

from __future__ import annotations

from xml.sax.saxutils import escape

from meshwright.schedules.action import Action, ActionKind
from meshwright.schedules.simulate import ActionSpan, Simulation
from meshwright.units import format_seconds

COLOURS = {
    ActionKind.FORWARD: "#9ecae1",
    ActionKind.BACKWARD: "#a1d99b",
    ActionKind.INPUT: "#fdd0a2",
    ActionKind.WEIGHT: "#cbc9e2",
}
"""Light fills, so that dark numbers are readable."""
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward to the input",
    ActionKind.WEIGHT: "backward to the weights",
}
ROW_PX, LABEL_PX, TOP_PX, LEGEND_PX = 26, 58, 28, 26
DIGIT_PX = 7
LAP_OPACITY = (1.0, 0.55, 0.8, 0.35)
"""Opacity of a rank's first, second, ... stage."""


def svg(simulation: Simulation, width_px: int = 960) -> str:
    """Draws the timeline: a row per rank, time to the right, micro-batch numbers in the boxes.

    Args:
        simulation: the result of `simulate`.
        width_px: width of the picture.

    Returns:
        A complete SVG element; paler boxes are later stages of the rank, half boxes the two actions of a pair.
    """
    schedule = simulation.schedule
    height_px = TOP_PX + ROW_PX * schedule.ranks + LEGEND_PX
    title = (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches, bubble "
        f"{simulation.bubble:.1%}, {format_seconds(simulation.makespan_s)}"
    )
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" role="img" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width_px}" height="{height_px}" fill="#fff"/>',
        f'<text x="4" y="17" font-size="13">{escape(title)}</text>',
    ]
    for rank in range(schedule.ranks):
        elements.append(f'<text x="4" y="{TOP_PX + ROW_PX * rank + 17}">rank {rank}</text>')
    scale = (width_px - LABEL_PX - 4) / (simulation.makespan_s or 1.0)
    lap_of_stage = {
        stage: lap for rank in range(schedule.ranks) for lap, stage in enumerate(schedule.rank_stages(rank))
    }
    for span in simulation.timeline:
        elements += _span_boxes(span, scale, lap_of_stage)
    elements += _legend({single.kind for span in simulation.timeline for single in span.action.parts}, height_px)
    return "\n".join([*elements, "</svg>"])


def _span_boxes(span: ActionSpan, scale: float, lap_of_stage: dict[int, int]) -> list[str]:
    singles = span.action.parts
    height = (ROW_PX - 4) / len(singles)
    left, width = LABEL_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
    elements = []
    for row, single in enumerate(singles):
        top = TOP_PX + ROW_PX * span.rank + 2 + row * height
        opacity = LAP_OPACITY[lap_of_stage[single.stage] % len(LAP_OPACITY)]
        tooltip = f"{span.action} on rank {span.rank}: {format_seconds(span.start_s)} to {format_seconds(span.end_s)}"
        elements.append(
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="{COLOURS[single.kind]}" fill-opacity="{opacity}" stroke="#555" stroke-width="0.4">'
            f"<title>{escape(tooltip)}</title></rect>"
        )
        microbatch_text = str(single.microbatch)
        if width >= DIGIT_PX * len(microbatch_text) + 2:
            elements.append(
                f'<text x="{left + width / 2:.2f}" y="{top + height / 2 + 4:.2f}" text-anchor="middle" '
                f'pointer-events="none" font-size="{11 if len(singles) == 1 else 9}">{microbatch_text}</text>'
            )
    return elements


def _legend(kinds: set[ActionKind], height_px: int) -> list[str]:
    elements, left = [], LABEL_PX
    for kind in (kind for kind in COLOURS if kind in kinds):
        elements.append(f'<rect x="{left}" y="{height_px - 18}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        elements.append(f'<text x="{left + 16}" y="{height_px - 8}">{NAMES[kind]}</text>')
        left += 34 + DIGIT_PX * len(NAMES[kind])
    return elements


def text(simulation: Simulation, columns: int = 132) -> str:
    """Writes the timeline as lines of text: a line per rank, dots where it waits.

    Args:
        simulation: the result of `simulate`.
        columns: width of a line.

    Returns:
        Lines such as ``rank 0 |F0-F1-..B0----|``: letter and micro-batch where there is room, X for a pair.
    """
    label_width = len(f"rank {simulation.schedule.ranks - 1} ")
    line_width = max(1, columns - label_width - 2)
    scale = line_width / (simulation.makespan_s or 1.0)
    rows = [["."] * line_width for _ in range(simulation.schedule.ranks)]
    for span in simulation.timeline:
        start, stop = round(span.start_s * scale), round(span.end_s * scale)
        if stop > start:
            rows[span.rank][start:stop] = _label(span.action)[: stop - start].ljust(stop - start, "-")
    return "\n".join(f"rank {rank} ".ljust(label_width) + f"|{''.join(row)}|" for rank, row in enumerate(rows)) + "\n"


def _label(action: Action) -> str:
    if action.pair is not None:
        return "X" + "/".join(str(single.microbatch) for single in action.pair)
    return f"{action.kind.value}{action.microbatch}"
