"""Charts as inline SVG: this module computes positions, ``templates/charts.html`` writes them as markup."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from meshwright.monitor.page import macro

COLOURS = 7
"""Colours of the page: s0 to s6 for lines, f0 to f6 for areas."""
_MAX_POINTS = 360
_WIDTH = 1046
"""CSS pixels of a chart as wide as the page."""
_NARROW_CELL = 90.0
"""Pixels of a cell's width below which it shows its name alone."""

_empty = macro("charts.html", "empty")
_render_lines = macro("charts.html", "line_chart")
_render_scatter = macro("charts.html", "scatter_chart")
_render_bars = macro("charts.html", "bar_chart")
_render_cells = macro("charts.html", "cell_grid")

Ticks = Sequence[tuple[float, str]]
"""Position or value, and text, of each tick of an axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve."""

    label: str
    """Name in the legend."""
    x: Sequence[float]
    """Ascending."""
    y: Sequence[float]
    """Same length as x; values that aren't finite leave gaps."""
    colour: int = 0
    """Index of the page's colours."""
    smooth: bool = False
    """Draw the values faintly, with their moving mean on top."""
    dots: bool = False
    """Draw a dot at every value, for short series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A step at which something happened, drawn as a vertical line."""

    x: float
    """Step."""
    label: str
    """Text beside the line; empty for none."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The mapping from values to the drawing, and the ticks of both axes in pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    left: float = 62.0
    top: float = 18.0
    bottom: float = 236.0
    x_values: Ticks = ()
    y_values: Ticks = ()

    @property
    def right(self) -> float:
        return self.width - 16.0

    def at_x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def at_y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)

    @property
    def x_ticks(self) -> Ticks:
        return [(self.at_x(value), text) for value, text in self.x_values]

    @property
    def y_ticks(self) -> Ticks:
        return [(self.at_y(value), text) for value, text in self.y_values]

    def path(self, x: Sequence[float], y: Sequence[float]) -> str:
        """Returns the SVG path of a curve; a value that isn't finite lifts the pen."""
        commands, command = [], "M"
        for x_value, y_value in zip(x, y):
            if not math.isfinite(y_value):
                command = "M"
                continue
            commands.append(f"{command}{self.at_x(x_value):.1f} {self.at_y(y_value):.1f}")
            command = "L"
        return "".join(commands)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Computes about ``count`` round tick values: multiples of 1, 2 or 5 times a power of ten."""
    # A constant or infinite range has one tick.
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    # The power of ten below the distance between two ticks.
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    # The smallest round step that needs no more than the wanted number of ticks.
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if span / (magnitude * factor) <= count)
    first_index = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first_index, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """Formats a tick's label with as many digits as the distance to the next tick needs."""
    if value == 0:
        return "0"
    size = max(abs(value), abs(step))
    if size < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    # Thousands only from 10k on: 1,500 reads better than 1.5k.
    for scale, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= scale:
            divisor = 1e3 if name == "k" else scale
            return f"{value / divisor:.{_digits(step / divisor)}f}{name}"
    return f"{value:.{_digits(step)}f}"


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0


def line_chart(
    series: Sequence[Series],
    title: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    skipped: Sequence[float] = (),
    from_zero: bool = False,
    width: int = 520,
) -> Markup:
    """Draws curves over steps.

    Args:
        series: the curves.
        title: caption, also for screen readers.
        y_label: quantity and unit.
        marks: vertical lines.
        skipped: steps marked by a small triangle at the lower edge.
        from_zero: whether the y axis starts at zero.
        width: width of the drawing in CSS pixels.

    Returns:
        A ``<figure>`` with legend and SVG, or with a sentence when no value is finite.
    """
    drawn_series = [curve for curve in series if any(math.isfinite(value) for value in curve.y)]
    if not drawn_series:
        return _empty(title)
    frame, clipped_count = _frame(drawn_series, from_zero, width)
    return _render_lines(
        title=title,
        frame=frame,
        curves=[_curve(frame, curve) for curve in drawn_series],
        marks=[(frame.at_x(mark.x), mark.label) for mark in marks if frame.x0 <= mark.x <= frame.x1],
        skipped=[(frame.at_x(step), f"{step:g}") for step in skipped if frame.x0 <= step <= frame.x1],
        x_label="step",
        y_label=y_label,
        keys=[(curve.colour, curve.label) for curve in drawn_series] if len(drawn_series) > 1 else [],
        remark=f"{clipped_count} value{'s' if clipped_count > 1 else ''} above the frame" if clipped_count else "",
        # Ids of clip paths share one page: a checksum of the title keeps them apart.
        clip=f"clip{zlib.crc32(title.encode())}",
    )


def _frame(series: Sequence[Series], from_zero: bool, width: int) -> tuple[_Frame, int]:
    """Computes the frame and the number of values above it: single spikes must not flatten the whole curve."""
    values = sorted(value for curve in series for value in curve.y if math.isfinite(value))
    steps = [x for curve in series for x in curve.x]
    high = values[-1]
    percentile_99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    # Clip at the 99th percentile only where values beyond it are far out.
    if len(values) > 200 and high > values[0] + 3 * (percentile_99 - values[0]):
        high = values[0] + 1.15 * (percentile_99 - values[0])
    low = min(0.0, values[0]) if from_zero else values[0]
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    x0, x1 = min(steps), max(steps)
    x1, y0, y1 = x1 if x1 > x0 else x0 + 1, low if from_zero else low - margin, high + margin
    # Steps are whole numbers, so fractional ticks are dropped.
    step_ticks = [value for value in ticks(x0, x1, 6 if width < 616 else 11) if value == int(value)]
    frame = _Frame(x0, x1, y0, y1, width, x_values=_with_text(step_ticks), y_values=_with_text(ticks(y0, y1)))
    return frame, sum(value > y1 for value in values)


def _with_text(values: Sequence[float]) -> Ticks:
    distance = values[1] - values[0] if len(values) > 1 else 1.0
    return [(value, tick_text(value, distance)) for value in values]


def _curve(frame: _Frame, curve: Series) -> dict[str, object]:
    """Returns a curve's colour, its paths by CSS class, and its dots in pixels with their text."""
    paths, dots = [("line", frame.path(*envelope(curve.x, curve.y)))], []
    if curve.smooth and len(curve.y) >= 30:
        # A spike counts as the frame's edge, or it would lift the mean over its whole window.
        mean = smoothed([min(value, frame.y1) if math.isfinite(value) else math.nan for value in curve.y])
        # The raw values stay visible behind the mean, thinned by envelope so that spikes show.
        paths = [("raw", paths[0][1]), ("line", frame.path(*_thinned(curve.x, mean)))]
    elif curve.dots:
        dots = [
            (frame.at_x(x), frame.at_y(y), f"step {x:g}: {y:.5g}") for x, y in zip(curve.x, curve.y) if math.isfinite(y)
        ]
    return {"colour": curve.colour % COLOURS, "paths": paths, "dots": dots}


def smoothed(values: Sequence[float]) -> list[float]:
    """Computes the mean over a centred window of a fortieth of the values; it skips values that aren't finite.

    The window shrinks towards both ends to stay centred, so that the ends are not bent.
    """
    y = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(y)
    # Prefix sums make each window two look-ups.
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    index = np.arange(len(y))
    # Half of a fortieth on each side.
    half_width = np.minimum(max(2, len(y) // 80), np.minimum(index, len(y) - 1 - index))
    low, high = index - half_width, index + half_width + 1
    # A window without a finite value is 0 / 0.
    with np.errstate(invalid="ignore"):
        means: list[float] = ((sums[high] - sums[low]) / (counts[high] - counts[low])).tolist()
    return means


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Selects at most about `_MAX_POINTS` evenly spaced points, and the last one, which is the current value."""
    stride = max(1, math.ceil(len(x) / _MAX_POINTS))
    return _select(x, y, np.append(np.arange(0, len(x), stride), len(x) - 1))


def envelope(x: Sequence[float], y: Sequence[float], span_count: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """Selects the lowest and highest point of each of ``span_count`` spans, so that thinning loses no spike."""
    if len(x) <= 2 * span_count:
        return list(x), list(y)
    values = np.asarray(y, dtype=np.float64)
    starts = np.arange(span_count + 1) * len(x) // span_count
    # (spans, widest span): a shorter span repeats its last point.
    spans = np.minimum(starts[:-1, None] + np.arange(np.diff(starts).max()), starts[1:, None] - 1)
    finite = np.isfinite(values)[spans]
    lowest = np.where(finite, values[spans], np.inf).argmin(axis=1)
    highest = np.where(finite, values[spans], -np.inf).argmax(axis=1)
    rows = np.flatnonzero(finite.any(axis=1))
    extremes = np.concatenate([spans[rows, lowest[rows]], spans[rows, highest[rows]]])
    return _select(x, y, np.append(extremes, [0, len(x) - 1]))


def _select(x: Sequence[float], y: Sequence[float], indices: ArrayLike) -> tuple[list[float], list[float]]:
    order: NDArray[np.int64] = np.unique(indices)
    return np.asarray(x, dtype=np.float64)[order].tolist(), np.asarray(y, dtype=np.float64)[order].tolist()


def scatter_chart(
    points: Sequence[tuple[float, float, str]],
    title: str,
    labels: tuple[str, str],
    formats: tuple[Callable[[float], str], Callable[[float], str]],
    y_end: float,
) -> Markup:
    """Draws points; the y axis goes from zero to a given value.

    Args:
        points: x, y and text of each.
        title: caption.
        labels: quantity of each axis.
        formats: format a value of x, and one of y.
        y_end: upper end of the y axis.
    """
    # A margin on either side, so that no point lies on the edge.
    x1 = max(x for x, _, _ in points) * 1.05
    x0 = min(x for x, _, _ in points) * 0.97
    x_values = [(value, formats[0](value)) for value in (x0, (x0 + x1) / 2, x1)]
    y_values = [(share * y_end, formats[1](share * y_end)) for share in (0.25, 0.5, 0.75, 1.0)]
    # The left edge leaves room for ticks such as "512.0 GiB".
    frame = _Frame(x0, x1, 0.0, y_end, _WIDTH, left=92.0, x_values=x_values, y_values=y_values)
    return _render_scatter(title, frame, [(frame.at_x(x), frame.at_y(y), text) for x, y, text in points], *labels)


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], title: str, format_value: Callable[[float], str]
) -> Markup:
    """Draws one bar of stacked segments a row, a colour for each name; arguments as of `bar_chart`."""
    names = dict.fromkeys(name for _, segments in rows for name in segments)
    colours = {name: index for index, name in enumerate(names)}
    return bar_chart([(label, [segments]) for label, segments in rows], title, format_value, colours)


def bar_chart(
    rows: Sequence[tuple[str, Sequence[Mapping[str, float | None]]]],
    title: str,
    format_value: Callable[[float], str],
    colours: Mapping[str, int],
) -> Markup:
    """Draws horizontal bars of stacked segments on one scale, each with its sum behind it.

    Args:
        rows: label of each row, and its bars: value of each segment by name; None is written as not known.
        title: caption.
        format_value: formats a value.
        colours: colour of each segment's name; the legend lists them where a row has several values.
    """
    longest = max((sum(value or 0.0 for value in bar.values()) for _, bars in rows for bar in bars), default=0.0)
    if not longest > 0:
        return _empty(title)
    drawn_rows = []
    for label, bars in rows:
        drawn_bars = []
        for bar in bars:
            total, segments = sum(value or 0.0 for value in bar.values()), []
            for name, value in bar.items():
                share = f"{(value or 0.0) / total:.0%}" if total and len(bar) > 1 else ""
                note = f"{name}: {format_value(value or 0.0)}, {share}" if share else ""
                segments.append(((value or 0.0) / longest, colours[name] % COLOURS, share, note))
            unknown = [name for name, value in bar.items() if value is None]
            drawn_bars.append((segments, f"not {unknown[0]}" if unknown else format_value(total)))
        drawn_rows.append((label, drawn_bars))
    has_legend = any(len(bars) > 1 or len(bar) > 1 for _, bars in rows for bar in bars)
    keys = [(colour % COLOURS, name) for name, colour in colours.items()] if has_legend else []
    return _render_bars(title, drawn_rows, keys)


def cell_grid(
    cells: Sequence[tuple[str, Sequence[str]]], columns: int, title: str, remark: str, axes: tuple[str, str]
) -> Markup:
    """Draws cells with text in rows from left to right.

    Args:
        cells: name of each, and its lines of text, all as many; where cells are narrow, names alone are drawn.
        columns: cells of a row.
        title: caption.
        remark: text beside it.
        axes: what runs to the right and what downwards; empty for nothing.
    """
    cell_width = min(190.0, 990.0 / columns)
    is_narrow = cell_width < _NARROW_CELL
    cell_height = 32 + (0 if is_narrow else 15 * max(len(lines) for _, lines in cells))
    drawn_cells = [
        (
            46 + index % columns * cell_width,
            26 + index // columns * cell_height,
            name.rpartition(" ")[2] if is_narrow else name,
            () if is_narrow else lines,
        )
        for index, (name, lines) in enumerate(cells)
    ]
    height = 34 + math.ceil(len(cells) / columns) * cell_height
    return _render_cells(title, remark, drawn_cells, _WIDTH, height, cell_width, cell_height, *axes)
