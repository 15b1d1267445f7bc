"""The HTML frame of report.html: style, tables and tiles, without any external file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Okabe-Ito hues, distinct for readers with any colour vision. Source: Okabe and Ito, Color Universal Design (2008).
_LIGHT = ("#0067b0", "#d1600a", "#00805c", "#b0478c", "#9a7b00", "#8b929c", "#3b9fd6")
_DARK = ("#5eb3f2", "#f59b51", "#3cc49b", "#e391c2", "#e3c452", "#7d8590", "#9fd6f7")
_UNBROKEN_CHARACTERS = 24
"""Characters up to which a table's cell isn't broken into lines."""

_STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;margin:0 auto;
 max-width:1120px;padding:28px 24px 64px;background:var(--page);color:var(--ink)}
h1{font-size:26px;line-height:1.25;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px;padding-bottom:5px;border-bottom:1px solid var(--line)}
h3{font-size:15px;margin:22px 0 6px}
p{margin:6px 0 10px;max-width:80ch}p.sub{max-width:none}.sub,.none,.small{color:var(--soft)}.small{font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:9px 13px}
.tile span{display:block;font-size:12.5px;color:var(--soft)}
.tile b{font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.tile small{color:var(--soft);display:block;font-size:12px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:14px}
.two figure{margin:0}
@media(max-width:520px){.two{grid-template-columns:1fr}}
figure{margin:0 0 14px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px 6px;
 min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin-bottom:4px;align-items:baseline}
.key{color:var(--soft)}.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;
 vertical-align:-1px}
.tri{color:var(--bad)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .label{font-size:12px;fill:var(--ink)}svg .inbar{fill:var(--card);font-weight:600}
svg .cell{fill:var(--page);stroke:var(--line)}svg .rank{font-size:12.5px;font-weight:600;fill:var(--ink)}
svg .halo{paint-order:stroke;stroke:var(--card);stroke-width:3px}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3}.skip{fill:var(--bad)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.raw{fill:none;stroke-width:1;opacity:.28}
.dot{stroke:var(--card);stroke-width:1}
table{border-collapse:collapse;font-size:13.5px;width:100%}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:0 0 14px}
th,td{text-align:left;padding:5px 12px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}th{font-weight:600;color:var(--soft);font-size:12.5px;white-space:nowrap}
td{overflow-wrap:anywhere}.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.word{white-space:nowrap}td.bad{color:var(--bad);font-weight:600}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;white-space:pre-wrap;
 overflow-wrap:anywhere;font:13px/1.5 ui-monospace,Menlo,Consolas,"Liberation Mono",monospace;margin:6px 0 14px}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
"""
_LIGHT_TONES = "--page:#f7f8fa;--card:#ffffff;--ink:#1b1f24;--soft:#5b6470;--line:#e1e5ea;--bad:#c2261c;"
_DARK_TONES = "--page:#0f1216;--card:#181c22;--ink:#e7eaee;--soft:#a0a9b4;--line:#2b313a;--bad:#ff7b6e;"


def page(title: str, body: str) -> str:
    """Renders the HTML document."""
    light = _LIGHT_TONES + "".join(f"--c{index}:{colour};" for index, colour in enumerate(_LIGHT))
    dark = _DARK_TONES + "".join(f"--c{index}:{colour};" for index, colour in enumerate(_DARK))
    colours = "".join(
        f".s{index}{{stroke:var(--c{index})}}.f{index},.dot.s{index}{{fill:var(--c{index})}}.b{index}{{background:var(--c{index})}}"
        for index in range(len(_LIGHT))
    )
    style = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{meta}<title>{escape(title)}</title>'
        f"<style>{style}{_STYLE}{colours}</style></head><body>{body}</body></html>\n"
    )


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numeric_columns: Sequence[int] = (), warning_text: str = ""
) -> str:
    """Renders a table; all text is escaped.

    Args:
        headings: column titles; empty for a table of names and values.
        rows: cells.
        numeric_columns: indices of columns that are aligned to the right.
        warning_text: a cell with exactly this text gets the colour of warnings.
    """

    def cell(tag: str, column: int, text: str) -> str:
        classes = (
            ("num", column in numeric_columns),
            ("bad", bool(warning_text) and text == warning_text),
            ("word", len(text) <= _UNBROKEN_CHARACTERS),
        )
        names = [name for name, applies in classes if applies]
        kind = f' class="{" ".join(names)}"' if names else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    header_row = (
        "<tr>" + "".join(cell("th", column, text) for column, text in enumerate(headings)) + "</tr>" if headings else ""
    )
    body_rows = [
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows
    ]
    return f'<div class="wide"><table>{header_row}{"".join(body_rows)}</table></div>'


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Renders a row of tiles, each a name, a number and a remark."""
    tile_elements = []
    for name, value, remark in entries:
        small = f"<small>{escape(remark)}</small>" if remark else ""
        tile_elements.append(f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>{small}</div>')
    return f'<div class="tiles">{"".join(tile_elements)}</div>'
