"""How a calibration is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.cluster.calibration import Calibration
from meshwright.units import format_bytes, format_count, format_seconds


def told(calibration: Calibration, path: Path) -> Iterator[str]:
    """Yields the lines of a table: what each part of the machine reaches, and where the figures lie."""
    machine = calibration.machine
    nodes = f" on {calibration.nodes} nodes" if calibration.nodes > 1 else ""
    yield f"{machine.get('device', 'machine')}: ranks {calibration.ranks}{nodes}, cores {machine.get('cores', 0)}"
    yield from _products(calibration)
    yield from _attention(calibration)
    yield from _operations(calibration)
    yield from _collectives(calibration)
    yield from _host(calibration)
    if calibration.overlap is not None:
        yield f"  all-reduce under products   {calibration.overlap:6.0%} of it hides"
    yield f"written in {calibration.taken_s:.0f} s to {path}"


def _products(calibration: Calibration) -> Iterator[str]:
    best: dict[tuple[str, str, bool], tuple[float, str]] = {}
    for dtype, form, busy, m, n, k, seconds in calibration.matmul:
        rate = 2.0 * m * n * k / seconds
        best[dtype, form, busy] = max(best.get((dtype, form, busy), (0.0, "")), (rate, f"{m} x {n} x {k}"))
    for (dtype, form, busy), (rate, shape) in sorted(best.items(), key=lambda item: (not item[0][2], item[0])):
        yield f"  matrix product {dtype:<8} {form}  {format_count(rate) + 'FLOP/s':>14}  at {shape}{_load(busy)}"


def _attention(calibration: Calibration) -> Iterator[str]:
    for dtype, busy, rows, sequence, size, ahead, back in calibration.attention:
        widest = max(row[2:5] for row in calibration.attention if row[:2] == (dtype, busy))
        if (rows, sequence, size) == widest:
            yield (
                f"  attention {dtype:<8}  forward {format_seconds(ahead)}, backward {format_seconds(back)}  at "
                f"{rows} heads of {sequence} x {size}{_load(busy)}"
            )


def _operations(calibration: Calibration) -> Iterator[str]:
    for name, dtype, busy, count, seconds in calibration.operations:
        most = max(row[3] for row in calibration.operations if row[:3] == (name, dtype, busy))
        if count == most and name in ("copy", "gelu", "layer_norm", "softmax", "cross_entropy") and busy:
            yield f"  {name:<14} {dtype:<8}  {format_count(count / seconds)} elements/s"
    for count, seconds in calibration.optimizer[-1:]:
        yield f"  optimizer                {format_count(count / seconds)} weights/s"
    yield f"  one small operation      {calibration.launch_s * 1e6:.1f} us"


def _collectives(calibration: Calibration) -> Iterator[str]:
    """Latency of the smallest message and rate of the largest, by placement."""
    places: dict[tuple[str, int, int, int], list[tuple[int, float]]] = {}
    for kind, ranks, nodes, before, size, seconds in calibration.collectives:
        places.setdefault((kind, ranks, nodes, before), []).append((size, seconds))
    for (kind, ranks, nodes, before), points in places.items():
        (_, least), (size, most) = min(points), max(points)
        yield (
            f"  {kind:<14} over {ranks} ranks, {before} apart{f', {nodes} nodes' if nodes > 1 else ''}:  "
            f"{least * 1e6:.0f} us, {format_bytes(size / most)}/s at {format_bytes(size)}"
        )


def _host(calibration: Calibration) -> Iterator[str]:
    """What the runtime takes itself, and how steady the machine was."""
    for what, seconds in calibration.host:
        yield f"  {what.replace('_', ' '):<24} {seconds * 1e6:.1f} us of the host"
    if calibration.pace_s:
        spread = calibration.pace_spread
        yield f"  pace                     {format_seconds(calibration.pace_s)}, {spread:.0%} slower in the median"


def _load(busy: bool) -> str:
    return "" if busy else ", one rank at work"
