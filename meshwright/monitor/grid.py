"""The layout drawn as a grid: every rank in its place on the mesh, with its coordinates and its device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from meshwright.errors import PlanError
from meshwright.monitor.charts import legend, svg
from meshwright.monitor.rundir import RunFiles
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout

_MOST_RANKS = 256
_MOST_COLUMNS = 16
_NARROW = 90.0
"""Width below which a cell holds its number alone."""


def layout_grid(run: RunFiles) -> str:
    """Returns the figure of a run's layout: the innermost axis from left to right, the others downwards.

    Args:
        run: the run; its plan or its step records name the layout, its ``rank_started`` events the devices.
    """
    layout = _layout(run)
    if layout is None:
        return ""
    shape = {name: degree for name, degree in layout.shape().items() if degree > 1} or {row_axes(Holds.COPY)[0]: 1}
    *outer, inner = shape
    columns = shape[inner] if shape[inner] <= _MOST_COLUMNS else _MOST_COLUMNS
    shown = min(layout.world, _MOST_RANKS)
    seen = {event.get("rank"): event for event in run.of_kind("rank_started")}
    wide = min(190.0, 990.0 / columns)
    tall = 32 + 15 * ((len(shape) + bool(seen)) if wide >= _NARROW else 0)
    cells = []
    for rank in range(shown):
        row, column = divmod(rank, columns)
        lines = layout.describe_rank(rank).partition(": ")[2].split(", ")
        cells.append(_cell(46 + column * wide, 26 + row * tall, wide, tall, rank, [*lines, _device(seen.get(rank))]))
    rows = math.ceil(shown / columns)
    cells.append(f'<text class="label" x="46" y="16">{escape(inner)} ({shape[inner]}) →</text>')
    if outer:
        words = " x ".join(f"{name} ({shape[name]})" for name in outer) + " →"
        middle = 26 + rows * tall / 2
        turn = f'transform="rotate(90 30 {middle:.0f})"'
        cells.append(f'<text class="label" x="30" y="{middle:.0f}" text-anchor="middle" {turn}>{escape(words)}</text>')
    title = f"{layout.world} rank{'s' if layout.world > 1 else ''}"
    rest = escape(f"the first {shown} are drawn") if shown < layout.world else ""
    figure = f"<figure>{legend(title, [], rest)}{svg(1046, int(34 + rows * tall), title, ''.join(cells))}</figure>"
    return f"<p><b>{escape(str(layout))}</b></p>{figure}"


def _layout(run: RunFiles) -> Layout | None:
    try:
        return Layout.parse(run.layout) if run.layout else None
    except PlanError:
        return None


def _cell(x: float, y: float, wide: float, tall: float, rank: int, lines: list[str]) -> str:
    parts = [f'<rect class="cell" x="{x:.1f}" y="{y}" width="{wide - 6:.1f}" height="{tall - 6}" rx="5"/>']
    parts.append(f'<text class="rank" x="{x + 8:.1f}" y="{y + 17}">{rank if wide < _NARROW else f"rank {rank}"}</text>')
    for place, line in enumerate(line for line in lines if line and wide >= _NARROW):
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 33 + 15 * place}">{escape(line)}</text>')
    return "".join(parts)


def _device(event: Mapping[str, Any] | None) -> str:
    if event is None:
        return ""
    return " ".join(str(event[key]) for key in ("host", "device") if event.get(key))
