"""The layout as a grid: every rank at its position in the mesh, with coordinates and device."""

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

_MAX_RANKS = 256
_MAX_COLUMNS = 16
_NARROW_WIDTH = 90.0
"""Width in pixels below which a cell shows its rank alone."""


def layout_grid(run: RunFiles) -> str:
    """Draws a run's layout: the innermost axis from left to right, all others downwards.

    Args:
        run: the run; the layout comes from its plan or step records, devices from its ``rank_started`` events.
    """
    layout = _parse_layout(run)
    if layout is None:
        return ""
    shape = {name: degree for name, degree in layout.shape().items() if degree > 1} or {row_axes(Holds.COPY)[0]: 1}
    # The innermost axis has consecutive ranks: it runs along a row.
    *outer_names, inner_name = shape
    columns = shape[inner_name] if shape[inner_name] <= _MAX_COLUMNS else _MAX_COLUMNS
    drawn_ranks = min(layout.world, _MAX_RANKS)
    start_events = {event.get("rank"): event for event in run.of_kind("rank_started")}
    cell_width = min(190.0, 990.0 / columns)
    cell_height = 32 + 15 * ((len(shape) + bool(start_events)) if cell_width >= _NARROW_WIDTH else 0)
    cells = []
    for rank in range(drawn_ranks):
        row, column = divmod(rank, columns)
        lines = layout.describe_rank(rank).partition(": ")[2].split(", ")
        cells.append(
            _draw_cell(
                46 + column * cell_width,
                26 + row * cell_height,
                cell_width,
                cell_height,
                rank,
                [*lines, _device_text(start_events.get(rank))],
            )
        )
    rows = math.ceil(drawn_ranks / columns)
    cells.append(f'<text class="label" x="46" y="16">{escape(inner_name)} ({shape[inner_name]}) →</text>')
    if outer_names:
        outer_axes = " x ".join(f"{name} ({shape[name]})" for name in outer_names) + " →"
        centre_y = 26 + rows * cell_height / 2
        rotation = f'transform="rotate(90 30 {centre_y:.0f})"'
        cells.append(
            f'<text class="label" x="30" y="{centre_y:.0f}" text-anchor="middle" {rotation}>{escape(outer_axes)}</text>'
        )
    title = f"{layout.world} rank{'s' if layout.world > 1 else ''}"
    remark = escape(f"the first {drawn_ranks} are drawn") if drawn_ranks < layout.world else ""
    figure = (
        f"<figure>{legend(title, [], remark)}{svg(1046, int(34 + rows * cell_height), title, ''.join(cells))}</figure>"
    )
    return f"<p><b>{escape(str(layout))}</b></p>{figure}"


def _parse_layout(run: RunFiles) -> Layout | None:
    try:
        return Layout.parse(run.layout) if run.layout else None
    except PlanError:
        return None


def _draw_cell(x: float, y: float, width: float, height: float, rank: int, lines: list[str]) -> str:
    """Draws the cell of one rank with its lines of text."""
    elements = [f'<rect class="cell" x="{x:.1f}" y="{y}" width="{width - 6:.1f}" height="{height - 6}" rx="5"/>']
    elements.append(
        f'<text class="rank" x="{x + 8:.1f}" y="{y + 17}">{rank if width < _NARROW_WIDTH else f"rank {rank}"}</text>'
    )
    for line_index, line in enumerate(line for line in lines if line and width >= _NARROW_WIDTH):
        elements.append(f'<text x="{x + 8:.1f}" y="{y + 33 + 15 * line_index}">{escape(line)}</text>')
    return "".join(elements)


def _device_text(event: Mapping[str, Any] | None) -> str:
    if event is None:
        return ""
    return " ".join(str(event[key]) for key in ("host", "device") if event.get(key))
