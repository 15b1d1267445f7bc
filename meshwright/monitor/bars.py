"""Bar charts as inline SVG text: stacked, paired or plain; colours are CSS classes of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from meshwright.monitor.charts import COLOURS, legend, svg


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], title: str, format_value: Callable[[float], str]
) -> str:
    """Draws one horizontal bar of stacked segments a row, all on one scale, with the row's sum at its end.

    Args:
        rows: label, and value of each segment by name.
        title: caption.
        format_value: formats a value.
    """
    names = list(dict.fromkeys(name for _, segments in rows for name in segments))
    longest = max((sum(segments.values()) for _, segments in rows), default=0.0)
    if not longest > 0:
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    elements, left_edge, width = [], 150.0, 790.0
    for row_index, (label, segments) in enumerate(rows):
        y, x, total = 8 + 34 * row_index, left_edge, sum(segments.values())
        elements.append(
            f'<text class="label" x="{left_edge - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>'
        )
        for name, value in segments.items():
            size = value / longest * width
            note = f"<title>{escape(name)}: {format_value(value)}, {value / total:.0%}</title>" if total else ""
            colour = f"f{names.index(name) % COLOURS}"
            elements.append(f'<rect class="{colour}" x="{x:.1f}" y="{y}" width="{size:.1f}" height="24">{note}</rect>')
            # A narrower segment has no room for its share.
            if size > 44:
                attributes = f'x="{x + size / 2:.1f}" y="{y + 16}" text-anchor="middle"'
                elements.append(f'<text class="inbar" {attributes}>{value / total:.0%}</text>')
            x += size
        elements.append(f'<text class="tick" x="{x + 7:.1f}" y="{y + 16}">{format_value(total)}</text>')
    legend_keys = [(names.index(name), name) for name in names]
    return f"<figure>{legend(title, legend_keys)}{svg(1046, 14 + 34 * len(rows), title, ''.join(elements))}</figure>"


def paired_bars(
    rows: Sequence[tuple[str, float | None, float | None]], names: tuple[str, str], title: str,
    format_value: Callable[[float], str],
) -> str:  # fmt: skip
    """Draws two thin bars a row, such as planned and measured; an unknown value has a remark instead of a bar.

    Args:
        rows: label, first and second value; None for an unknown one.
        names: of the two values.
        title: caption.
        format_value: formats a value.
    """
    longest = max((value for row in rows for value in row[1:] if value is not None), default=0.0)
    if not longest > 0:
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    elements, left_edge, width = [], 150.0, 740.0
    for row_index, (label, *values) in enumerate(rows):
        top = 6 + 40 * row_index
        elements.append(
            f'<text class="label" x="{left_edge - 8}" y="{top + 19}" text-anchor="end">{escape(label)}</text>'
        )
        for series_index, value in enumerate(values):
            y, size = top + 15 * series_index, (value or 0.0) / longest * width
            elements.append(
                f'<rect class="f{5 if series_index == 0 else 0}" x="{left_edge}" y="{y}" '
                f'width="{size:.1f}" height="12"/>'
            )
            value_text = format_value(value) if value is not None else f"not {names[series_index]}"
            elements.append(
                f'<text class="tick" x="{left_edge + size + 7:.1f}" y="{y + 10}">{escape(value_text)}</text>'
            )
    legend_keys = [(5, names[0]), (0, names[1])]
    return f"<figure>{legend(title, legend_keys)}{svg(1046, 8 + 40 * len(rows), title, ''.join(elements))}</figure>"


def bars(rows: Sequence[tuple[str, float]], title: str, format_value: Callable[[float], str]) -> str:
    """Draws one bar a row; the first row in the first colour, all others in grey.

    Args:
        rows: label and value.
        title: caption.
        format_value: formats a value.
    """
    longest = max((value for _, value in rows), default=0.0) or 1.0
    elements, left_edge, width = [], 150.0, 740.0
    for row_index, (label, value) in enumerate(rows):
        y, size = 4 + 28 * row_index, value / longest * width
        elements.append(
            f'<text class="label" x="{left_edge - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
        )
        elements.append(
            f'<rect class="f{5 if row_index else 0}" x="{left_edge}" y="{y}" width="{size:.1f}" height="20"/>'
        )
        elements.append(f'<text class="tick" x="{left_edge + size + 7:.1f}" y="{y + 14}">{format_value(value)}</text>')
    return f"<figure>{legend(title, [])}{svg(1046, 6 + 28 * len(rows), title, ''.join(elements))}</figure>"
