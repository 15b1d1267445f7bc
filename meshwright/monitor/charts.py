"""Curves with axes as inline SVG text; colours are CSS classes of the page."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 7
_MOST_POINTS = 360


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
    """Draw the values light, and their moving mean over them."""
    dots: bool = False
    """Draw a dot at every value: for few values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A step at which something happened, drawn as a vertical line."""

    x: float
    label: str


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
    """Returns about ``count`` round values from low to high: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    size = 10.0 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """Returns a tick's label with as many digits as its distance to the next one needs."""
    if value == 0:
        return "0"
    size = max(abs(value), abs(step))
    if size < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
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
        title: what is drawn, for readers that can't see it.
        y_label: quantity and unit.
        marks: vertical lines.
        skipped: steps marked by a small triangle at the lower edge.
        from_zero: whether the y axis begins at zero.
        width: width of the drawing in CSS pixels.

    Returns:
        A ``<figure>`` with legend and SVG, or a sentence when there is nothing to draw.
    """
    drawn = [one for one in series if any(math.isfinite(value) for value in one.y)]
    if not drawn:
        return f'<figure><p class="none">No values for {escape(title)}.</p></figure>'
    frame, above = _frame(drawn, from_zero, width)
    parts = [_axes(frame, "step", y_label)]
    inside = [_mark(frame, mark) for mark in marks if frame.x0 <= mark.x <= frame.x1]
    parts += [line for line, _ in inside] + [label for _, label in inside]
    parts += [_triangle(frame, x) for x in skipped if frame.x0 <= x <= frame.x1]
    body = "".join(_curve(frame, one) for one in drawn)
    clip = f"clip{zlib.crc32(title.encode())}"
    size = f'width="{frame.right - frame.left + 4}" height="{frame.bottom - frame.top + 8}"'
    rect = f'<rect x="{frame.left}" y="{frame.top - 4}" {size}/>'
    parts.append(f'<clipPath id="{clip}">{rect}</clipPath><g clip-path="url(#{clip})">{body}</g>')
    if above:
        note = f"{above} value{'s' if above > 1 else ''} above the frame"
        parts.append(f'<text class="note" x="{frame.right}" y="{frame.top - 5}" text-anchor="end">{note}</text>')
    keys = [(one.colour, one.label) for one in drawn] if len(drawn) > 1 else []
    extra = f'<span class="tri">▲</span> skipped step ({len(skipped)})' if skipped else ""
    return f"<figure>{legend(title, keys, extra)}{svg(width, 282, title, ''.join(parts))}</figure>"


def _frame(series: Sequence[Series], from_zero: bool, width: int) -> tuple[_Frame, int]:
    """Returns the frame and how many values lie above it: single spikes must not flatten the whole curve."""
    values = sorted(value for one in series for value in one.y if math.isfinite(value))
    steps = [x for one in series for x in one.x]
    high = values[-1]
    usual = values[min(len(values) - 1, int(len(values) * 0.99))]
    if len(values) > 200 and high > values[0] + 3 * (usual - values[0]):
        high = values[0] + 1.15 * (usual - values[0])
    low = min(0.0, values[0]) if from_zero else values[0]
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    x0, x1 = min(steps), max(steps)
    bottom = low if from_zero else low - room
    frame = _Frame(x0, x1 if x1 > x0 else x0 + 1, bottom, high + room, right=width - 16.0)
    return frame, sum(value > frame.y1 for value in values)


def _axes(frame: _Frame, x_label: str, y_label: str) -> str:
    parts = []
    marks = ticks(frame.y0, frame.y1)
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    for value in marks:
        y = frame.at_y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = tick_text(value, step)
        parts.append(f'<text class="tick" x="{frame.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    whole = [value for value in ticks(frame.x0, frame.x1, 6 if frame.right < 600 else 11) if value == int(value)]
    step = whole[1] - whole[0] if len(whole) > 1 else 1.0
    for value in whole:
        x, text = frame.at_x(value), tick_text(value, step)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 17}" text-anchor="middle">{text}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    middle, centre = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    parts.append(f'<text class="label" x="{middle}" y="274" text-anchor="middle">{escape(x_label)}</text>')
    turn = f'transform="rotate(-90 14 {centre})"'
    parts.append(f'<text class="label" x="14" y="{centre}" text-anchor="middle" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def _mark(frame: _Frame, mark: Mark) -> tuple[str, str]:
    """Returns the line and its label; labels go over the lines of other marks."""
    x = frame.at_x(mark.x)
    # A label near the right edge is written to the left of its line, or it would leave the drawing.
    anchor, shift = ("end", -4) if x > frame.right - 80 else ("start", 4)
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{frame.bottom}"/>'
    place = f'x="{x + shift:.1f}" y="{frame.top + 9}" text-anchor="{anchor}"'
    return line, f'<text class="note halo" {place}>{escape(mark.label)}</text>' if mark.label else ""


def _triangle(frame: _Frame, step: float) -> str:
    x, y = frame.at_x(step), frame.bottom
    return f'<path class="skip" d="M{x:.1f} {y - 8:.1f}l4 7h-8z"><title>step {step:g} skipped</title></path>'


def _curve(frame: _Frame, one: Series) -> str:
    colour = f"s{one.colour % COLOURS}"
    if one.smooth and len(one.y) >= 30:
        # A spike counts as the frame's edge, or it would lift the mean over its whole window.
        mean = smoothed([min(value, frame.y1) if math.isfinite(value) else math.nan for value in one.y])
        raw = f'<path class="raw {colour}" d="{_path(frame, *envelope(one.x, one.y))}"/>'
        return raw + f'<path class="line {colour}" d="{_path(frame, *thinned(one.x, mean))}"/>'
    path = f'<path class="line {colour}" d="{_path(frame, *envelope(one.x, one.y))}"/>'
    if one.dots:
        for x, y in zip(one.x, one.y):
            if math.isfinite(y):
                place = f'cx="{frame.at_x(x):.1f}" cy="{frame.at_y(y):.1f}"'
                path += f'<circle class="dot {colour}" {place} r="3"><title>step {x:g}: {y:.5g}</title></circle>'
    return path


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float]) -> str:
    words, pen = [], "M"
    for one, value in zip(x, y):
        if not math.isfinite(value):
            pen = "M"
            continue
        words.append(f"{pen}{frame.at_x(one):.1f} {frame.at_y(value):.1f}")
        pen = "L"
    return "".join(words)


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean over a centred window of a fortieth of the values; gaps are passed over.

    The window shrinks towards both ends so that it stays centred: the ends are not bent.
    """
    most = max(2, len(values) // 80)
    sums, counts = [0.0], [0]
    for value in values:
        good = math.isfinite(value)
        sums.append(sums[-1] + (value if good else 0.0))
        counts.append(counts[-1] + good)
    found = []
    for at in range(len(values)):
        half = min(most, at, len(values) - 1 - at)
        low, high = at - half, at + half + 1
        count = counts[high] - counts[low]
        found.append((sums[high] - sums[low]) / count if count else math.nan)
    return found


def thinned(x: Sequence[float], y: Sequence[float], most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Returns at most about ``most`` evenly spaced points, the last one among them."""
    stride = max(1, math.ceil(len(x) / most))
    kept = list(range(0, len(x), stride))
    if kept and kept[-1] != len(x) - 1:
        kept.append(len(x) - 1)
    return [x[at] for at in kept], [y[at] for at in kept]


def envelope(x: Sequence[float], y: Sequence[float], most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Returns the lowest and highest point of each of ``most`` spans, so that no spike is lost to thinning."""
    if len(x) <= 2 * most:
        return list(x), list(y)
    kept: set[int] = {0, len(x) - 1}
    for span in range(most):
        finite = [at for at in range(len(x) * span // most, len(x) * (span + 1) // most) if math.isfinite(y[at])]
        if finite:
            kept |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    order = sorted(kept)
    return [x[at] for at in order], [y[at] for at in order]


def legend(title: str, entries: Sequence[tuple[int, str]], extra: str = "") -> str:
    """Returns a figure's caption: its title, its colours with their names, and a remark given as HTML."""
    boxes = [f'<i class="b{colour % COLOURS}"></i>{escape(name)}' for colour, name in entries]
    keys = "".join(f'<span class="key">{inside}</span>' for inside in [*boxes, *([extra] if extra else [])])
    return f"<figcaption><b>{escape(title)}</b>{keys}</figcaption>"


def svg(width: int, height: int, title: str, body: str) -> str:
    """Returns the drawing around its parts; it shrinks where the page is narrower."""
    head = f'viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="{escape(title)}"'
    return f"<svg {head}>{body}</svg>"
