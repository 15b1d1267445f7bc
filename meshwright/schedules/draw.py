"""Pictures of a simulated schedule: an SVG for pages, and lines of text for terminals."""

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
"""Light fills, for dark numbers on them."""
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward to the input",
    ActionKind.WEIGHT: "backward to the weights",
}
ROW_PX, LABEL_PX, TOP_PX, LEGEND_PX = 26, 58, 28, 26
DIGIT_PX = 7
LAPS = (1.0, 0.55, 0.8, 0.35)
"""Opacity of a rank's first, second, ... stage."""


def svg(simulation: Simulation, width_px: int = 960) -> str:
    """Draws the timeline: a row per rank, time to the right, micro-batch numbers in the boxes.

    Args:
        simulation: what `simulate` returned.
        width_px: width of the picture.

    Returns:
        A whole SVG element; paler boxes are later stages of the rank, half boxes the two parts of a pair.
    """
    schedule = simulation.schedule
    height_px = TOP_PX + ROW_PX * schedule.ranks + LEGEND_PX
    title = (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches, bubble "
        f"{simulation.bubble:.1%}, {format_seconds(simulation.makespan_s)}"
    )
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" role="img" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width_px}" height="{height_px}" fill="#fff"/>',
        f'<text x="4" y="17" font-size="13">{escape(title)}</text>',
    ]
    for rank in range(schedule.ranks):
        pieces.append(f'<text x="4" y="{TOP_PX + ROW_PX * rank + 17}">rank {rank}</text>')
    scale = (width_px - LABEL_PX - 4) / (simulation.makespan_s or 1.0)
    laps = {stage: lap for rank in range(schedule.ranks) for lap, stage in enumerate(schedule.rank_stages(rank))}
    for span in simulation.timeline:
        pieces += _boxes(span, scale, laps)
    pieces += _legend({part.kind for span in simulation.timeline for part in span.action.parts}, height_px)
    return "\n".join([*pieces, "</svg>"])


def _boxes(span: ActionSpan, scale: float, laps: dict[int, int]) -> list[str]:
    parts = span.action.parts
    high = (ROW_PX - 4) / len(parts)
    left, wide = LABEL_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
    pieces = []
    for place, part in enumerate(parts):
        top = TOP_PX + ROW_PX * span.rank + 2 + place * high
        opacity = LAPS[laps[part.stage] % len(LAPS)]
        tip = f"{span.action} on rank {span.rank}: {format_seconds(span.start_s)} to {format_seconds(span.end_s)}"
        pieces.append(
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="{COLOURS[part.kind]}" '
            f'fill-opacity="{opacity}" stroke="#555" stroke-width="0.4"><title>{escape(tip)}</title></rect>'
        )
        number = str(part.microbatch)
        if wide >= DIGIT_PX * len(number) + 2:
            pieces.append(
                f'<text x="{left + wide / 2:.2f}" y="{top + high / 2 + 4:.2f}" text-anchor="middle" '
                f'pointer-events="none" font-size="{11 if len(parts) == 1 else 9}">{number}</text>'
            )
    return pieces


def _legend(kinds: set[ActionKind], height_px: int) -> list[str]:
    pieces, left = [], LABEL_PX
    for kind in (kind for kind in COLOURS if kind in kinds):
        pieces.append(f'<rect x="{left}" y="{height_px - 18}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        pieces.append(f'<text x="{left + 16}" y="{height_px - 8}">{NAMES[kind]}</text>')
        left += 34 + DIGIT_PX * len(NAMES[kind])
    return pieces


def text(simulation: Simulation, columns: int = 132) -> str:
    """Writes the timeline as lines of text: a line per rank, dots where it waits.

    Args:
        simulation: what `simulate` returned.
        columns: width of a line.

    Returns:
        Lines such as ``rank 0 |F0-F1-..B0----|``: letter and micro-batch where there is room, X for a pair.
    """
    head = len(f"rank {simulation.schedule.ranks - 1} ")
    wide = max(1, columns - head - 2)
    scale = wide / (simulation.makespan_s or 1.0)
    rows = [["."] * wide for _ in range(simulation.schedule.ranks)]
    for span in simulation.timeline:
        start, end = round(span.start_s * scale), round(span.end_s * scale)
        if end > start:
            rows[span.rank][start:end] = _label(span.action)[: end - start].ljust(end - start, "-")
    return "\n".join(f"rank {rank} ".ljust(head) + f"|{''.join(row)}|" for rank, row in enumerate(rows)) + "\n"


def _label(action: Action) -> str:
    if action.pair is not None:
        return "X" + "/".join(str(part.microbatch) for part in action.pair)
    return f"{action.kind.value}{action.microbatch}"
