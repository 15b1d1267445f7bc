"""Charts of a plan: bars by kind of work or of memory, with intervals, and the pipeline's actions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup

from meshwright.monitor.charts import COLOURS, tick_text, ticks
from meshwright.monitor.page import breakable, macro
from meshwright.planner.cost.prices import LAYER_TRAFFIC, MEMORY
from meshwright.planner.explain import NAMES
from meshwright.schedules.action import ActionKind
from meshwright.schedules.simulate import Simulation
from meshwright.units import format_bytes, format_seconds

TEXTURES = ("", "hatched", "dotted")
"""CSS classes of a segment: solid, and two that set kinds of one colour apart."""
ACTION_COLOURS = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 2, ActionKind.INPUT: 4, ActionKind.WEIGHT: 3}
ACTION_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward to the input",
    ActionKind.WEIGHT: "backward to the weights",
}
MOST_BOXES = 6000
"""Boxes of a pipeline's drawing; of more only every so many ranks are drawn."""
_LEAST_TEXT = 0.07
"""Share of the track from which a segment's share is written into it."""
_LEFT_PX, _WIDTH_PX, _TOP_PX = 58.0, 976.0, 6.0
_DIGIT_PX = 7

_stacks = macro("plan.html", "stacks")
_pipeline = macro("plan.html", "pipeline")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a kind of work, or of memory, is drawn: the same in every chart."""

    colour: int
    """Index of the page's colours."""
    texture: str = ""
    """One of `TEXTURES`."""


STEP_KINDS = {
    "matmul": Kind(0),
    "attention": Kind(6),
    "elementwise": Kind(2),
    "recompute": Kind(4),
    **{name: Kind(colour, "hatched") for name, colour in zip(LAYER_TRAFFIC, (1, 3, 4), strict=True)},
    "host": Kind(5, "dotted"),
    "engine": Kind(2, "dotted"),
    "send": Kind(6, "hatched"),
    "bubble": Kind(5),
    "gather": Kind(2, "hatched"),
    "reduce": Kind(0, "hatched"),
    "traffic_work": Kind(4, "dotted"),
    "offload": Kind(5, "hatched"),
    "optimizer": Kind(3),
    "step": Kind(1),
    "join": Kind(1, "dotted"),
}
"""Parts of a step: work is solid, traffic hatched, what the device waits for dotted or grey."""
MEMORY_KINDS = {name: Kind(colour) for name, colour in zip(MEMORY, (0, 6, 3, 2, 4, 1, 5))}
"""Parts of a rank's memory."""


def assign_kinds(names: Iterable[str], kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Returns a kind for each name; one that has none gets the first that no other has.

    Args:
        names: as many as colours times textures, at most.
        kinds: those that are fixed.
    """
    taken = set(kinds.values())
    all_kinds = (Kind(colour, texture) for texture in TEXTURES for colour in range(COLOURS))
    free = (kind for kind in all_kinds if kind not in taken)
    return {name: kinds[name] if name in kinds else next(free) for name in names}


@cache
def step_kinds() -> dict[str, Kind]:
    """Returns the kind of every part of a step."""
    return assign_kinds(NAMES, STEP_KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    """What it is of."""
    values: Mapping[str, float]
    """Value of each segment by name."""
    total: str
    """Its sum, in words."""
    interval: tuple[float, float] | None = None
    """Ends of the interval within which the sum is expected, in the values' unit."""


def bars(
    rows: Sequence[Bar],
    title: str,
    kinds: Mapping[str, Kind],
    format_value: Callable[[float], str],
    names: Mapping[str, str] | None = None,
    full: float | None = None,
    limit: float | None = None,
    remark: str = "",
) -> Markup:
    """Draws a bar a row on one scale, each segment in the colour of its name.

    Args:
        rows: the bars.
        title: caption.
        kinds: kind of each segment's name.
        format_value: formats a value.
        names: segments' names in words, where they differ.
        full: value of a bar as long as the track; the longest bar or interval by default.
        limit: value at which a limit is drawn.
        remark: text beside the caption.
    """
    sums = [sum(row.values.values()) for row in rows]
    ends = [row.interval[1] for row in rows if row.interval is not None]
    scale = max(full or 0.0, *sums, *ends) or 1.0
    words = dict(names or {})
    drawn_rows = [_drawn_bar(row, scale, kinds, format_value, words) | {"limit": None} for row in rows]
    if limit is not None:
        drawn_rows = [row | {"limit": limit / scale} for row in drawn_rows]
    # In the order of the kinds, and without what is zero everywhere.
    present = {name for row in rows for name, value in row.values.items() if value > 0}
    keys = [(kind, words.get(name, name)) for name, kind in kinds.items() if name in present]
    return _stacks(title, drawn_rows, keys if len(keys) > 1 else [], remark)


def _drawn_bar(
    row: Bar, scale: float, kinds: Mapping[str, Kind], format_value: Callable[[float], str], words: Mapping[str, str]
) -> dict[str, object]:
    """Returns what the template writes of a bar; shares of the track, and of the bar for its segments."""
    whole = sum(row.values.values()) or 1.0
    parts = [(name, value) for name, value in row.values.items() if value > 0]
    notes = {name: f"{words.get(name, name)} {format_value(value)}, {value / whole:.1%}" for name, value in parts}
    interval = None
    if row.interval is not None:
        low, high = row.interval
        interval = (low / scale, (high - low) / scale, f"{format_value(low)} to {format_value(high)}")
    return {
        "label": breakable(row.label),
        "total": row.total,
        "spoken": "; ".join((f"{row.label}: {row.total}", *notes.values())),
        "share": whole / scale,
        "segments": [
            (
                value / whole,
                kinds[name],
                f"{value / whole:.0%}" if value / scale >= _LEAST_TEXT and len(parts) > 1 else "",
                notes[name],
            )
            for name, value in parts
        ],
        "interval": interval,
    }


def memory_bars(rows: Sequence[tuple[str, Mapping[str, float], float]], device_bytes: float, usable: float) -> Markup:
    """Draws the memory of ranks by part; a track is a device.

    Args:
        rows: what a bar is of, bytes by part, and bytes of its device.
        device_bytes: of the largest device.
        usable: share of a device that a plan may fill.
    """
    names = dict.fromkeys(name for _, parts, _ in rows for name in parts)
    kinds = assign_kinds(names, MEMORY_KINDS)
    filled = [
        Bar(
            label=label,
            values={name: float(value) for name, value in parts.items()},
            total=f"{format_bytes(sum(parts.values()))} of {format_bytes(room)}",
        )
        for label, parts, room in rows
    ]
    alike = len({room for _, _, room in rows}) == 1
    return bars(
        filled,
        "Bytes of a rank" if alike else "Bytes of a rank; the largest device fills the track",
        kinds,
        format_bytes,
        full=device_bytes,
        limit=usable * device_bytes if alike else None,
        remark=f"dashed: {usable:.0%} of the device, which a plan may fill" if alike else "",
    )


@dataclass(frozen=True, slots=True)
class _SpanBox:
    x: float
    y: float
    width: float
    height: float
    colour: int
    text: str
    note: str


def pipeline(simulation: Simulation) -> Markup:
    """Draws the actions of a simulated pipeline: a row a rank, time to the right, micro-batches in the boxes."""
    schedule, spans = simulation.schedule, simulation.timeline
    boxes_per_rank = math.ceil(len(spans) / schedule.ranks)
    stride = math.ceil(schedule.ranks / max(1, MOST_BOXES // boxes_per_rank))
    pitch = 22 if schedule.ranks / stride <= 16 else 14
    shown_ranks = range(0, schedule.ranks, stride)
    scale = _WIDTH_PX / (simulation.makespan_s or 1.0)
    boxes = []
    for span in (span for span in spans if span.rank % stride == 0):
        # The two actions of a pair share the time, and each has half of the height.
        singles = span.action.parts
        height = (pitch - 3) / len(singles)
        x, width = _LEFT_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
        for index, single in enumerate(singles):
            y = _TOP_PX + pitch * (span.rank // stride) + index * height
            text = str(single.microbatch)
            is_roomy = width >= _DIGIT_PX * len(text) + 3 and height >= 12
            name = f"{ACTION_NAMES[single.kind]}, micro-batch {single.microbatch}, stage {single.stage}"
            note = f"{name}: {format_seconds(span.start_s)} to {format_seconds(span.end_s)}"
            # A hairline between boxes.
            boxes.append(
                _SpanBox(
                    x, y, max(0.1, width - 0.6), height, ACTION_COLOURS[single.kind], text if is_roomy else "", note
                )
            )
    present = {single.kind for span in spans for single in span.action.parts}
    tick_values = ticks(0.0, simulation.makespan_s * 1e3, 8)
    tick_step = tick_values[1] - tick_values[0] if len(tick_values) > 1 else 1.0
    # Thin rows have no room for every label.
    label_stride = 1 if pitch > 16 else 4
    return _pipeline(
        title=f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches, "
        f"{simulation.bubble:.1%} idle",
        rows=[
            (_TOP_PX + pitch * index, f"rank {rank}")
            for index, rank in enumerate(shown_ranks)
            if index % label_stride == 0
        ],
        boxes=boxes,
        pitch=pitch,
        bottom=_TOP_PX + pitch * len(shown_ranks),
        left=_LEFT_PX,
        x_ticks=[(_LEFT_PX + value / 1e3 * scale, f"{tick_text(value, tick_step)} ms") for value in tick_values],
        keys=[(colour, ACTION_NAMES[kind]) for kind, colour in ACTION_COLOURS.items() if kind in present],
        remark=f"every {stride}th of {schedule.ranks} ranks" if stride > 1 else "",
    )


def equal_runs(rows: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Returns the runs of equal neighbouring rows as (first index, last index)."""
    indices = (list(group) for _, group in itertools.groupby(range(len(rows)), key=lambda index: tuple(rows[index])))
    return [(run[0], run[-1]) for run in indices]
