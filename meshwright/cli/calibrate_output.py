"""How a calibration is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.cluster.calibration import Calibration
from meshwright.units import format_bytes, format_count, format_seconds


def calibration_lines(calibration: Calibration, path: Path) -> Iterator[str]:
    """Yields the lines of a table: the best measured rate of each kind of work, and the path of the figures."""
    machine = calibration.machine
    nodes = f" on {calibration.nodes} nodes" if calibration.nodes > 1 else ""
    yield f"{machine.get('device', 'machine')}: ranks {calibration.ranks}{nodes}, cores {machine.get('cores', 0)}"
    yield from _matmul_lines(calibration)
    yield from _attention_lines(calibration)
    yield from _operation_lines(calibration)
    yield from _collective_lines(calibration)
    yield from _host_lines(calibration)
    if calibration.overlap is not None:
        yield f"  all-reduce under products   {calibration.overlap:6.0%} of it hides"
    yield f"written in {calibration.taken_s:.0f} s to {path}"


def _matmul_lines(calibration: Calibration) -> Iterator[str]:
    best: dict[tuple[str, str, bool], tuple[float, str]] = {}
    for dtype, form, busy, m, n, k, seconds in calibration.matmul:
        rate = 2.0 * m * n * k / seconds
        best[dtype, form, busy] = max(best.get((dtype, form, busy), (0.0, "")), (rate, f"{m} x {n} x {k}"))
    for (dtype, form, busy), (rate, shape) in sorted(best.items(), key=lambda item: (not item[0][2], item[0])):
        yield f"  matrix product {dtype:<8} {form}  {format_count(rate) + 'FLOP/s':>14}  at {shape}{_load_suffix(busy)}"


def _attention_lines(calibration: Calibration) -> Iterator[str]:
    for dtype, busy, rows, sequence, head_size, forward_s, backward_s in calibration.attention:
        widest = max(row[2:5] for row in calibration.attention if row[:2] == (dtype, busy))
        if (rows, sequence, head_size) == widest:
            yield (
                f"  attention {dtype:<8}  forward {format_seconds(forward_s)}, backward {format_seconds(backward_s)}"
                f"  at {rows} heads of {sequence} x {head_size}{_load_suffix(busy)}"
            )


def _operation_lines(calibration: Calibration) -> Iterator[str]:
    for name, dtype, busy, count, seconds in calibration.operations:
        largest_count = max(row[3] for row in calibration.operations if row[:3] == (name, dtype, busy))
        if count == largest_count and name in ("copy", "gelu", "layer_norm", "softmax", "cross_entropy") and busy:
            yield f"  {name:<14} {dtype:<8}  {format_count(count / seconds)} elements/s"
    for count, seconds in calibration.optimizer[-1:]:
        yield f"  optimizer                {format_count(count / seconds)} weights/s"
    yield f"  one small operation      {calibration.launch_s * 1e6:.1f} us"


def _collective_lines(calibration: Calibration) -> Iterator[str]:
    """Yields each collective's latency at the smallest message and rate at the largest, by placement of its ranks."""
    points_by_placement: dict[tuple[str, int, int, int], list[tuple[int, float]]] = {}
    for kind, ranks, nodes, rank_stride, size, seconds in calibration.collectives:
        points_by_placement.setdefault((kind, ranks, nodes, rank_stride), []).append((size, seconds))
    for (kind, ranks, nodes, rank_stride), points in points_by_placement.items():
        (_, smallest_s), (size, largest_s) = min(points), max(points)
        yield (
            f"  {kind:<14} over {ranks} ranks, {rank_stride} apart{f', {nodes} nodes' if nodes > 1 else ''}:  "
            f"{smallest_s * 1e6:.0f} us, {format_bytes(size / largest_s)}/s at {format_bytes(size)}"
        )


def _host_lines(calibration: Calibration) -> Iterator[str]:
    """Yields the host's seconds for each activity of the runtime, and the spread of the machine's pace."""
    for activity, seconds in calibration.host:
        yield f"  {activity.replace('_', ' '):<24} {seconds * 1e6:.1f} us of the host"
    if calibration.pace_s:
        spread = calibration.pace_spread
        yield f"  pace                     {format_seconds(calibration.pace_s)}, {spread:.0%} slower in the median"


def _load_suffix(busy: bool) -> str:
    return "" if busy else ", one rank at work"
