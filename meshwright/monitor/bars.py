"""Bars as inline SVG text: cut into parts, in pairs, or plain; colours are CSS classes of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from meshwright.monitor.charts import COLOURS, legend, svg


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], title: str, text: Callable[[float], str]) -> str:
    """Draws one horizontal bar a row, cut into parts, all on one scale; the row's sum stands at its end."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if not longest > 0:
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    drawn, left, width = [], 150.0, 790.0
    for place, (label, parts) in enumerate(rows):
        y, x, total = 8 + 34 * place, left, sum(parts.values())
        drawn.append(f'<text class="label" x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        for name, value in parts.items():
            size = value / longest * width
            note = f"<title>{escape(name)}: {text(value)}, {value / total:.0%}</title>" if total else ""
            colour = f"f{names.index(name) % COLOURS}"
            drawn.append(f'<rect class="{colour}" x="{x:.1f}" y="{y}" width="{size:.1f}" height="24">{note}</rect>')
            if size > 44:
                place_text = f'x="{x + size / 2:.1f}" y="{y + 16}" text-anchor="middle"'
                drawn.append(f'<text class="inbar" {place_text}>{value / total:.0%}</text>')
            x += size
        drawn.append(f'<text class="tick" x="{x + 7:.1f}" y="{y + 16}">{text(total)}</text>')
    keys = [(names.index(name), name) for name in names]
    return f"<figure>{legend(title, keys)}{svg(1046, 14 + 34 * len(rows), title, ''.join(drawn))}</figure>"


def paired_bars(
    rows: Sequence[tuple[str, float | None, float | None]], names: tuple[str, str], title: str,
    text: Callable[[float], str],
) -> str:  # fmt: skip
    """Draws two thin bars a row, as planned and measured; a value that isn't known has no bar and says so."""
    longest = max((value for row in rows for value in row[1:] if value is not None), default=0.0)
    if not longest > 0:
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    drawn, left, width = [], 150.0, 740.0
    for place, (label, *values) in enumerate(rows):
        top = 6 + 40 * place
        drawn.append(f'<text class="label" x="{left - 8}" y="{top + 19}" text-anchor="end">{escape(label)}</text>')
        for which, value in enumerate(values):
            y, size = top + 15 * which, (value or 0.0) / longest * width
            drawn.append(f'<rect class="f{5 if which == 0 else 0}" x="{left}" y="{y}" width="{size:.1f}" height="12"/>')
            shown = text(value) if value is not None else f"not {names[which]}"
            drawn.append(f'<text class="tick" x="{left + size + 7:.1f}" y="{y + 10}">{escape(shown)}</text>')
    keys = [(5, names[0]), (0, names[1])]
    return f"<figure>{legend(title, keys)}{svg(1046, 8 + 40 * len(rows), title, ''.join(drawn))}</figure>"


def bars(rows: Sequence[tuple[str, float]], title: str, text: Callable[[float], str]) -> str:
    """Draws one bar a row; the first row, which is ours, in the first colour and the others in grey."""
    longest = max((value for _, value in rows), default=0.0) or 1.0
    drawn, left, width = [], 150.0, 740.0
    for place, (label, value) in enumerate(rows):
        y, size = 4 + 28 * place, value / longest * width
        drawn.append(f'<text class="label" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        drawn.append(f'<rect class="f{5 if place else 0}" x="{left}" y="{y}" width="{size:.1f}" height="20"/>')
        drawn.append(f'<text class="tick" x="{left + size + 7:.1f}" y="{y + 14}">{text(value)}</text>')
    return f"<figure>{legend(title, [])}{svg(1046, 6 + 28 * len(rows), title, ''.join(drawn))}</figure>"
