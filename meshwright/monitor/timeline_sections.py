"""Sections of the page about single ranks: what each did in a recorded step, and who waited for whom."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from meshwright.monitor.charts import tick_text, ticks
from meshwright.monitor.page import macro, note, table
from meshwright.monitor.timeline import StepTimeline
from meshwright.monitor.wait_history import WaitHistory
from meshwright.units import format_seconds

_COLOURS = {"data": 6, "forward": 0, "backward": 1, "reduce": 3, "optimizer": 2}
_OTHER = 5
"""Colour of any other phase."""
_WAIT_COLOUR = (209, 96, 10)
"""Red, green, blue of a rank that waits; how opaque it is says how long."""
_MOST_ROWS, _MOST_COLUMNS = 256, 512
_DRAWN_RANKS = 64
_LEFT_PX, _WIDTH_PX, _TOP_PX = 58.0, 976.0, 6
_MOST_BOXES = 6000
"""Boxes of a drawing; thinner ones are left out first."""

_gantt = macro("charts.html", "gantt")
_heat_map = macro("charts.html", "heat_map")

OFF = "No step's timeline was recorded: --monitor.timeline 50 records one in 50 steps."


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a row: x and width in pixels, colour, text inside, and its tooltip."""

    x: float
    width: float
    colour: int
    text: str
    note: str
    waits: bool = False


def pipeline(history: WaitHistory) -> list[Markup]:
    """Draws what each rank did in the newest recorded step: a row a rank, time to the right."""
    timelines = history.last_step()
    if not timelines:
        return []
    # Of more ranks than fit, every so many has a row.
    stride = math.ceil(len(timelines) / _DRAWN_RANKS)
    shown = timelines[::stride]
    origin = min(timeline.start for timeline in shown)
    offsets = [timeline.start - origin for timeline in shown]
    longest = max(timeline.seconds for timeline in shown)
    skewed = max(offsets) > longest
    if skewed:
        # Hosts' clocks differ by more than a step: rows are aligned at their own starts.
        offsets = [0.0] * len(shown)
    span_s = max(offset + timeline.seconds for offset, timeline in zip(offsets, shown)) or 1.0
    scale = _WIDTH_PX / span_s
    # Thin rows have no room for numbers.
    pitch = 22 if len(shown) <= 16 else 11
    rows = _limit([_boxes(timeline, offset, scale, pitch > 12) for timeline, offset in zip(shown, offsets)])
    colours = {box.colour for row in rows for box in row if not box.waits}
    keys = [(colour, name) for name, colour in {**_COLOURS, "other": _OTHER}.items() if colour in colours]
    tick_values = ticks(0.0, span_s * 1e3, 8)
    tick_step = tick_values[1] - tick_values[0] if len(tick_values) > 1 else 1.0
    figure = _gantt(
        title=f"Step {shown[0].step}, by rank",
        rows=[
            (_TOP_PX + pitch * index, f"rank {timeline.rank}" if pitch > 12 or index % 4 == 0 else "", row)
            for index, (timeline, row) in enumerate(zip(shown, rows))
        ],
        thickness=pitch - 3,
        bottom=_TOP_PX + pitch * len(shown),
        left=_LEFT_PX,
        x_ticks=[(_LEFT_PX + value / 1e3 * scale, f"{tick_text(value, tick_step)} ms") for value in tick_values],
        keys=keys,
        remark=f"every {stride}th of {len(timelines)} ranks" if stride > 1 else "",
    )
    words = "Pale: the rank waits for others. Times are those of the hosts."
    if skewed:
        words += " The hosts' clocks differ by more than a step, so each row begins at its own start."
    return [note(words), figure]


def _boxes(timeline: StepTimeline, offset: float, scale: float, numbered: bool) -> list[_Box]:
    boxes = []
    for span in timeline.phases:
        x, width = _LEFT_PX + (offset + span.start_s) * scale, span.seconds * scale
        micro = str(span.number) if numbered and span.name in ("forward", "backward") and width > 14 else ""
        text = f"{span.name}, micro-batch {span.number}: {format_seconds(span.seconds)}"
        boxes.append(_Box(x, width, _COLOURS.get(span.name, _OTHER), micro, text))
    for span in timeline.waits:
        x, width = _LEFT_PX + (offset + span.start_s) * scale, span.seconds * scale
        boxes.append(_Box(x, width, _OTHER, "", f"waits {format_seconds(span.seconds)} for {span.name}", True))
    return boxes


def _limit(rows: Sequence[list[_Box]]) -> list[list[_Box]]:
    """Returns the rows without boxes too thin to be seen, and with at most `_MOST_BOXES` in all."""
    widths = sorted((box.width for row in rows for box in row if box.width >= 0.4), reverse=True)
    least = widths[_MOST_BOXES] if len(widths) > _MOST_BOXES else 0.4
    return [[box for box in row if box.width >= least] for row in rows]


def waits(history: WaitHistory) -> list[Markup]:
    """Draws the ranks' shares of waiting over the recorded steps, and names who is waited for."""
    shares, steps = history.matrix(_MOST_COLUMNS, _MOST_ROWS)
    if len(shares) < 2:
        return []
    figure = _heat_map(
        title="Share of each recorded step in which a rank waits for others",
        image=_image(shares),
        ranks=1 + max(rank for by_rank in history.shares.values() for rank in by_rank),
        height=max(96, min(320, 8 * len(shares))),
        first=steps[0],
        last=max(history.shares),
    )
    awaited = [
        (f"rank {rank}", str(count), f"{own:.0%}", f"{others:.0%}")
        for rank, count, own, others in history.awaited()[:5]
    ]
    largest = float(np.nanmax(shares))
    elements = [
        note(f"Opaque: the rank waits for {largest:.0%} of a step. A pale row is a rank that others wait for."),
        figure,
    ]
    if awaited:
        headings = ("waited for", "recorded steps", "it waits", "the others wait")
        elements.append(table(headings, awaited, (1, 2, 3)))
    operation_rows = []
    for name, by_rank in sorted(history.operations.items()):
        slowest = max(by_rank, key=lambda rank: by_rank[rank][1])
        calls, seconds = (sum(entry[index] for entry in by_rank.values()) for index in (0, 1))
        mean = format_seconds(seconds / calls)
        operation_rows.append((name, f"{calls:.0f}", mean, f"rank {slowest}, {format_seconds(by_rank[slowest][1])}"))
    return [*elements, table(("wait for", "times", "mean", "longest in all"), operation_rows, (1, 2, 3))]


def _image(shares: NDArray[np.float64]) -> str:
    """Returns a PNG of a pixel a value as a data URI: the largest share is opaque, 0 and NaN are transparent."""
    rows, columns = shares.shape
    pixels = np.empty((rows, 1 + 4 * columns), dtype=np.uint8)
    pixels[:, 0] = 0  # filter "none" of each row
    rgba = pixels[:, 1:].reshape(rows, columns, 4)
    rgba[..., :3] = _WAIT_COLOUR
    rgba[..., 3] = np.nan_to_num(np.clip(shares / max(np.nanmax(shares), 1e-6), 0.0, 1.0) * 255).astype(np.uint8)
    pixels[:, 1:] = rgba.reshape(rows, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # PNG, 8 bits of red, green, blue and alpha. Source: W3C PNG (third edition), sections 11.2.1 and 11.2.3.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels.tobytes(), 6))
    return "data:image/png;base64," + base64.b64encode(png + chunk(b"IEND", b"")).decode()
