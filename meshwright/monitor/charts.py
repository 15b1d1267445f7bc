"""Curves with axes as inline SVG text; colours are CSS classes of the page."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 7
_MAX_POINTS = 360


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
    """The mapping from values to the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float
    right: float
    left: float = 62.0
    top: float = 18.0
    bottom: float = 236.0

    def at_x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def at_y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)


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
) -> str:
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
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    frame, clipped_count = _frame(drawn_series, from_zero, width)
    elements = [_axes(frame, "step", y_label)]
    mark_elements = [_mark(frame, mark) for mark in marks if frame.x0 <= mark.x <= frame.x1]
    elements += [line for line, _ in mark_elements] + [label for _, label in mark_elements]
    elements += [_triangle(frame, x) for x in skipped if frame.x0 <= x <= frame.x1]
    body = "".join(_curve(frame, curve) for curve in drawn_series)
    # Ids of clip paths share one page: a checksum of the title keeps them apart.
    clip = f"clip{zlib.crc32(title.encode())}"
    size = f'width="{frame.right - frame.left + 4}" height="{frame.bottom - frame.top + 8}"'
    rect = f'<rect x="{frame.left}" y="{frame.top - 4}" {size}/>'
    elements.append(f'<clipPath id="{clip}">{rect}</clipPath><g clip-path="url(#{clip})">{body}</g>')
    if clipped_count:
        note = f"{clipped_count} value{'s' if clipped_count > 1 else ''} above the frame"
        elements.append(f'<text class="note" x="{frame.right}" y="{frame.top - 5}" text-anchor="end">{note}</text>')
    legend_keys = [(curve.colour, curve.label) for curve in drawn_series] if len(drawn_series) > 1 else []
    remark = f'<span class="tri">▲</span> skipped step ({len(skipped)})' if skipped else ""
    return f"<figure>{legend(title, legend_keys, remark)}{svg(width, 282, title, ''.join(elements))}</figure>"


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
    bottom = low if from_zero else low - margin
    frame = _Frame(x0, x1 if x1 > x0 else x0 + 1, bottom, high + margin, right=width - 16.0)
    return frame, sum(value > frame.y1 for value in values)


def _axes(frame: _Frame, x_label: str, y_label: str) -> str:
    """Draws grid lines, ticks and labels of both axes."""
    elements = []
    y_ticks = ticks(frame.y0, frame.y1)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 1.0
    for value in y_ticks:
        y = frame.at_y(value)
        elements.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = tick_text(value, step)
        elements.append(f'<text class="tick" x="{frame.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    # Steps are whole numbers, so fractional ticks are dropped.
    step_ticks = [value for value in ticks(frame.x0, frame.x1, 6 if frame.right < 600 else 11) if value == int(value)]
    step = step_ticks[1] - step_ticks[0] if len(step_ticks) > 1 else 1.0
    for value in step_ticks:
        x, text = frame.at_x(value), tick_text(value, step)
        elements.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>')
        elements.append(f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 17}" text-anchor="middle">{text}</text>')
    elements.append(
        f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>'
    )
    centre_x, centre_y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    elements.append(f'<text class="label" x="{centre_x}" y="274" text-anchor="middle">{escape(x_label)}</text>')
    rotation = f'transform="rotate(-90 14 {centre_y})"'
    elements.append(
        f'<text class="label" x="14" y="{centre_y}" text-anchor="middle" {rotation}>{escape(y_label)}</text>'
    )
    return "".join(elements)


def _mark(frame: _Frame, mark: Mark) -> tuple[str, str]:
    """Draws a mark; returns line and label apart, since labels are drawn over all lines."""
    x = frame.at_x(mark.x)
    # A label near the right edge is written to the left of its line, or it would leave the drawing.
    anchor, shift = ("end", -4) if x > frame.right - 80 else ("start", 4)
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{frame.bottom}"/>'
    attributes = f'x="{x + shift:.1f}" y="{frame.top + 9}" text-anchor="{anchor}"'
    return line, f'<text class="note halo" {attributes}>{escape(mark.label)}</text>' if mark.label else ""


def _triangle(frame: _Frame, step: float) -> str:
    x, y = frame.at_x(step), frame.bottom
    return f'<path class="skip" d="M{x:.1f} {y - 8:.1f}l4 7h-8z"><title>step {step:g} skipped</title></path>'


def _curve(frame: _Frame, curve: Series) -> str:
    """Draws one series: raw values and mean where it is smoothed, else a line, with dots if wanted."""
    colour = f"s{curve.colour % COLOURS}"
    if curve.smooth and len(curve.y) >= 30:
        # A spike counts as the frame's edge, or it would lift the mean over its whole window.
        mean = smoothed([min(value, frame.y1) if math.isfinite(value) else math.nan for value in curve.y])
        # The raw values stay visible behind the mean, thinned by envelope so that spikes show.
        raw = f'<path class="raw {colour}" d="{_path(frame, *envelope(curve.x, curve.y))}"/>'
        return raw + f'<path class="line {colour}" d="{_path(frame, *thinned(curve.x, mean))}"/>'
    path = f'<path class="line {colour}" d="{_path(frame, *envelope(curve.x, curve.y))}"/>'
    if curve.dots:
        for x, y in zip(curve.x, curve.y):
            if math.isfinite(y):
                attributes = f'cx="{frame.at_x(x):.1f}" cy="{frame.at_y(y):.1f}"'
                path += f'<circle class="dot {colour}" {attributes} r="3"><title>step {x:g}: {y:.5g}</title></circle>'
    return path


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float]) -> str:
    """Returns the SVG path of a curve; a value that isn't finite lifts the pen."""
    commands, command = [], "M"
    for x_value, y_value in zip(x, y):
        if not math.isfinite(y_value):
            command = "M"
            continue
        commands.append(f"{command}{frame.at_x(x_value):.1f} {frame.at_y(y_value):.1f}")
        command = "L"
    return "".join(commands)


def smoothed(values: Sequence[float]) -> list[float]:
    """Computes the mean over a centred window of a fortieth of the values; it skips values that aren't finite.

    The window shrinks towards both ends to stay centred, so that the ends are not bent.
    """
    # Half of a fortieth on each side.
    max_half = max(2, len(values) // 80)
    # Prefix sums make each window two look-ups.
    sums, counts = [0.0], [0]
    for value in values:
        is_finite = math.isfinite(value)
        sums.append(sums[-1] + (value if is_finite else 0.0))
        counts.append(counts[-1] + is_finite)
    means = []
    for index in range(len(values)):
        half_width = min(max_half, index, len(values) - 1 - index)
        low, high = index - half_width, index + half_width + 1
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / count if count else math.nan)
    return means


def thinned(x: Sequence[float], y: Sequence[float], max_points: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """Selects at most about ``max_points`` evenly spaced points, including the last one."""
    stride = max(1, math.ceil(len(x) / max_points))
    indices = list(range(0, len(x), stride))
    if indices and indices[-1] != len(x) - 1:
        # The last point is the current value.
        indices.append(len(x) - 1)
    return [x[index] for index in indices], [y[index] for index in indices]


def envelope(x: Sequence[float], y: Sequence[float], span_count: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """Selects the lowest and highest point of each of ``span_count`` spans, so that thinning loses no spike."""
    if len(x) <= 2 * span_count:
        return list(x), list(y)
    indices: set[int] = {0, len(x) - 1}
    for span in range(span_count):
        finite = [
            index
            for index in range(len(x) * span // span_count, len(x) * (span + 1) // span_count)
            if math.isfinite(y[index])
        ]
        if finite:
            indices |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    order = sorted(indices)
    return [x[index] for index in order], [y[index] for index in order]


def legend(title: str, entries: Sequence[tuple[int, str]], extra: str = "") -> str:
    """Renders a figure's caption: title, colours with their names, and a remark as HTML."""
    colour_keys = [f'<i class="b{colour % COLOURS}"></i>{escape(name)}' for colour, name in entries]
    key_spans = "".join(f'<span class="key">{entry}</span>' for entry in [*colour_keys, *([extra] if extra else [])])
    return f"<figcaption><b>{escape(title)}</b>{key_spans}</figcaption>"


def svg(width: int, height: int, title: str, body: str) -> str:
    """Wraps elements into an SVG drawing that shrinks where the page is narrower."""
    attributes = f'viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="{escape(title)}"'
    return f"<svg {attributes}>{body}</svg>"
