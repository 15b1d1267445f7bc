"""Sections of the report with figures: training curves, compression, layout, time, memory, traffic, drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.json_types import JsonObject
from meshwright.monitor.charts import Mark, Series, bar_chart, cell_grid, line_chart, stacked_bars
from meshwright.monitor.drift import compare, measure
from meshwright.monitor.page import note, strong, table, two_columns
from meshwright.monitor.rundir import RunFiles, column, number
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.units import format_bytes, format_seconds

_COMPRESSORS = ("gzip", "xz", "bzip2", "zstd")
_MAX_RANKS = 256
_MAX_SCALARS = 24
"""Charts of scalars on a page."""
_MAX_COLUMNS = 16
_GREY = 5
"""The colour of what a run is compared with."""


def course(run: RunFiles) -> list[Markup]:
    """Renders the training curves: loss, gradient norm, learning rate, throughput, accuracy."""
    if not run.steps:
        return [note("No step was recorded.", "none")]
    x = column(run.steps, "step")
    resumed = [step for step in column(run.of_kind("resumed"), "step") if math.isfinite(step)]
    resumed_text = "resumed" if len(resumed) < 4 else f"resumed {len(resumed)} times"
    # Labels of many marks would cover each other: the first one counts them all instead.
    marks = [
        Mark(x=step, label=resumed_text if len(resumed) < 4 or not index else "") for index, step in enumerate(resumed)
    ]
    skipped = [step["step"] for step in run.steps if step.get("skipped")]
    evaluated = [event for event in run.of_kind("evaluated") if math.isfinite(number(event.get("step")))]
    evaluated.sort(key=lambda event: event["step"])

    def chart(name: str, title: str, unit: str, more_series: Sequence[Series] = (), from_zero: bool = False) -> Markup:
        training_series = Series(label="training", x=x, y=column(run.steps, name), smooth=name != "lr")
        skipped_steps = skipped if name in ("loss", "grad_norm") else ()
        return line_chart(
            [training_series, *more_series],
            title,
            unit,
            marks,
            skipped_steps,
            from_zero,
            1046 if name == "loss" else 504,
        )

    def validation(name: str) -> list[Series]:
        y = column(evaluated, name)
        has_values = any(math.isfinite(value) for value in y)
        steps = column(evaluated, "step")
        return [Series(label="validation", x=steps, y=y, colour=1, dots=len(steps) < 60)] if has_values else []

    charts = [
        chart("grad_norm", "Gradient norm", "2-norm before clipping"),
        chart("lr", "Learning rate", "learning rate", from_zero=True),
        chart("tokens_per_s", "Throughput", "tokens/s", from_zero=True),
    ]
    if any(value > 0 for value in column(run.steps, "mfu")):
        charts.append(chart("mfu", "MFU", "share of the dense peak", from_zero=True))
    peaks = [number((step.get("memory") or {}).get("peak")) / 2**30 for step in run.steps]
    if any(math.isfinite(peak) for peak in peaks):
        charts.append(line_chart([Series(label="peak", x=x, y=peaks)], "Peak memory", "GiB on rank 0", from_zero=True))
    if any(value > 0 for value in column(run.steps, "accuracy")):
        charts.append(chart("accuracy", "Accuracy", "share of tokens", validation("accuracy"), True))
    charts += _own_charts(run, x)
    loss = chart("loss", "Loss", "nats per token", validation("loss"))
    return [loss, two_columns(charts)]


def _own_charts(run: RunFiles, x: Sequence[float]) -> list[Markup]:
    """Renders a chart for each scalar of hooks or of a custom loop."""
    own = [scalars if isinstance(scalars := step.get("scalars"), Mapping) else {} for step in run.steps]
    names = list(dict.fromkeys(name for scalars in own for name in scalars))[:_MAX_SCALARS]
    return [
        line_chart(
            [Series(label=name, x=x, y=[number(scalars.get(name)) for scalars in own], smooth=True, dots=len(x) < 60)],
            name, "scalar of the loop",
        )
        for name in names
    ]  # fmt: skip


def compressors(final: JsonObject) -> list[tuple[str, float]]:
    """Finds compressors' bits per byte in an event by substrings of its field names, also in nested fields."""
    # An event may have the figures one level down, in a table of compressors.
    nested = [value for value in final.values() if isinstance(value, Mapping)]
    pairs = [(str(key), value) for mapping in (final, *nested) for key, value in mapping.items()]
    bits_per_byte = []
    for name in _COMPRESSORS:
        values = [number(value) for key, value in pairs if name in key]
        bits_per_byte += [(name, value) for value in values[:1] if math.isfinite(value)]
    return bits_per_byte


def compression(run: RunFiles) -> list[Markup]:
    """Renders the model's bits per byte beside those of compressors; empty where no evaluation has them."""
    final = run.final()
    ours = number(final.get("bits_per_byte"))
    if not math.isfinite(ours):
        return []
    rows = [("this model", ours), *compressors(final)]
    return [
        note("Bits that each byte of the held-out text costs: fewer is better."),
        bar_chart(
            [(name, [{name: value}]) for name, value in rows],
            "Bits per byte",
            lambda value: f"{value:.3f}",
            {name: _GREY if index else 0 for index, (name, _) in enumerate(rows)},
        ),
    ]


def layout_grid(run: RunFiles) -> list[Markup]:
    """Draws every rank at its position in the mesh: the innermost axis from left to right, all others downwards.

    Args:
        run: the run; the layout comes from its plan or step records, devices from its ``rank_started`` events.
    """
    try:
        layout = Layout.parse(run.layout) if run.layout else None
    except PlanError:
        layout = None
    if layout is None:
        return []
    shape = {name: degree for name, degree in layout.shape().items() if degree > 1} or {row_axes(Holds.COPY)[0]: 1}

    def format_degrees(names: Sequence[str]) -> str:
        return " x ".join(f"{name} ({shape[name]})" for name in names)

    # The innermost axes have consecutive ranks: they run along a row, as many as it has room for.
    outer_names = list(shape)
    inner_names = [outer_names.pop()]
    while outer_names and math.prod(shape[name] for name in (outer_names[-1], *inner_names)) <= _MAX_COLUMNS // 2:
        inner_names.insert(0, outer_names.pop())
    drawn_ranks = min(layout.world, _MAX_RANKS)
    devices = {
        event.get("rank"): " ".join(str(event[key]) for key in ("host", "device") if event.get(key))
        for event in run.of_kind("rank_started")
    }
    cells = []
    for rank in range(drawn_ranks):
        coordinates = layout.describe_rank(rank).partition(": ")[2].split(", ")
        cells.append((f"rank {rank}", [*coordinates, *([devices.get(rank, "")] if devices else [])]))
    figure = cell_grid(
        cells,
        min(math.prod(shape[name] for name in inner_names), _MAX_COLUMNS),
        f"{layout.world} rank{'s' if layout.world > 1 else ''}",
        f"the first {drawn_ranks} are drawn" if drawn_ranks < layout.world else "",
        (format_degrees(inner_names), format_degrees(outer_names)),
    )
    return [strong(str(layout)), figure]


def time(run: RunFiles) -> list[Markup]:
    """Renders the parts of a step's time as bars and a table."""
    # The first steps fill caches and choose kernels.
    warm = [step for step in run.steps[min(5, len(run.steps) // 2) :] if step.get("parts")]
    if not warm:
        return []
    # The slowest hundredth, whose parts show what a slow step waits for.
    slow = sorted(warm, key=lambda step: number(step.get("step_s")))[-max(1, len(warm) // 100) :]
    rows = [(f"mean of {len(warm)}", _mean_parts(warm))]
    # A fixed layout has no plan: the bar of planned parts is left out then.
    planned = (run.plan.get("prediction") or {}).get("parts") or {}
    if planned:
        rows.insert(0, ("planned", {name: float(value) for name, value in planned.items()}))
    if len(warm) >= 100:
        rows.append(("slowest 1 %", _mean_parts(slow)))
    names = dict.fromkeys(name for _, part_seconds in rows for name in part_seconds)
    table_rows = [
        (name, *(format_seconds(part_seconds[name]) if name in part_seconds else "" for _, part_seconds in rows))
        for name in names
    ]
    headings = ("part", *(label for label, _ in rows))
    return [
        stacked_bars(rows, "Seconds of a step on rank 0", format_seconds),
        table(headings, table_rows, range(1, len(headings))),
    ]


def _mean_parts(steps: Sequence[JsonObject]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in step["parts"].items():
            sums[name] = sums.get(name, 0.0) + (seconds or 0.0)
    return {name: total / len(steps) for name, total in sums.items()}


def memory(run: RunFiles) -> list[Markup]:
    """Renders the parts of a rank's memory, planned and measured, with the plan's formulas."""
    prediction = run.plan.get("prediction") or {}
    planned, formula = prediction.get("memory") or {}, prediction.get("formula") or {}
    measured_bytes = measure(run.steps)["memory"]
    names = [*planned, *(name for name in measured_bytes if name not in planned)]
    if not names:
        return []
    group_order = ("parameters", "gradients", "optimizer")
    # State first, then activations and buffers; the peak sums them up and comes last.
    names.sort(key=lambda name: (group_order.index(name) if name in group_order else len(group_order), name == "peak"))
    rows = [(name, planned.get(name), measured_bytes.get(name)) for name in names]
    figure = bar_chart(
        [
            (name, [{"planned": planned_value}, {"measured": measured_value}])
            for name, planned_value, measured_value in rows
        ],
        "Bytes per rank",
        format_bytes,
        {"planned": _GREY, "measured": 0},
    )
    table_rows = [
        (
            name,
            *("" if value is None else f"{value:,.0f}" for value in (planned_value, measured_value)),
            str(formula.get(name, "")),
        )
        for name, planned_value, measured_value in rows
    ]
    return [
        note(f"Planned: of the fullest rank. Measured: the most that rank 0 held in any of {len(run.steps)} steps."),
        figure,
        table(("part", "planned bytes", "measured bytes", "formula"), table_rows, (1, 2)),
    ]


def traffic(run: RunFiles) -> list[Markup]:
    """Renders rank 0's traffic by axis and operation."""
    warm = run.steps[min(5, len(run.steps) // 2) :]
    sums: dict[tuple[str, str], list[float]] = {}
    for step in warm:
        for total in step.get("comm") or ():
            entry = sums.setdefault((str(total["axis"]), str(total["op"])), [0.0] * 6)
            for index, name in enumerate(("calls", "bytes", "seconds", "exposed_s", "raw_bytes", "rounding_error")):
                entry[index] += total.get(name) or 0.0
    if not sums:
        return [note("One rank, or no traffic recorded: nothing was sent.", "none")] if run.steps else []
    table_rows, rows = [], []
    latencies = _latencies(warm)
    for (axis, op), values in sorted(sums.items()):
        calls, size, seconds, exposed, raw, error = (value / len(warm) for value in values)
        speed = f"{format_bytes(size / seconds)}/s" if seconds > 0 else ""
        times = (format_seconds(seconds), format_seconds(exposed))
        rounded = (format_bytes(raw), f"{error:.1e}" if error else "") if raw > size or error else ("", "")
        table_rows.append([axis, op, f"{calls:.3g}", format_bytes(size), *rounded, *times, speed, *latencies[axis, op]])
        rows.append((f"{axis} {op}", {"stood still": exposed, "overlapped": max(0.0, seconds - exposed)}))
    headings = ["axis", "operation", "calls", "bytes", "exact bytes", "rounding", "time", "stood still", "bandwidth",
                *(("latency p50", "p99") if any(map(any, latencies.values())) else ())]  # fmt: skip
    table_rows = [row[: len(headings)] for row in table_rows]
    is_rounded = any(row[4] for row in table_rows)
    if not is_rounded:
        # Two columns are of layouts that compress.
        for row in (headings, *table_rows):
            del row[4:6]
    rounding_note = " Exact bytes are those without compression; rounding is relative to the sum." if is_rounded else ""
    return [
        note(f"Per step, the mean of {len(warm)}, as rank 0 saw it. Bytes that it put on the wire.{rounding_note}"),
        stacked_bars(rows, "Seconds of a step", format_seconds),
        table(headings, table_rows, range(2, len(headings))),
    ]


def _latencies(steps: Sequence[JsonObject]) -> dict[tuple[str, str], tuple[str, str]]:
    """Returns median and 99th percentile of a collective's time by axis and operation; empty where none is known.

    They are the median over steps of the steps' medians, and the time that 99 % of the steps' 99th percentiles stay
    below.
    """
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for step in steps:
        for total in step.get("comm") or ():
            times = number(total.get("latency_p50_s")), number(total.get("latency_p99_s"))
            known = pairs.setdefault((str(total["axis"]), str(total["op"])), [])
            if times[0] > 0 and math.isfinite(times[1]):
                known.append(times)
    texts = {}
    for key, known in pairs.items():
        medians, slow = sorted(pair[0] for pair in known), sorted(pair[1] for pair in known)
        last = math.ceil(0.99 * len(known)) - 1
        texts[key] = (format_seconds(medians[len(known) // 2]), format_seconds(slow[last])) if known else ("", "")
    return texts


def drift(run: RunFiles, bound: float) -> list[Markup]:
    """Renders the table of all quantities that were both planned and measured."""
    drifts = compare(run.plan, measure(run.steps), bound)
    if not drifts:
        return []
    table_rows = []
    for drift in drifts:
        format_value = format_bytes if drift.part.startswith(("memory", "traffic")) else format_seconds
        relative = f"{drift.relative:+.1%}" if math.isfinite(drift.relative) else "not planned"
        values = (format_value(drift.planned), format_value(drift.measured))
        table_rows.append((drift.part, *values, relative, "beyond" if drift.beyond else "within"))
    return [
        note(f"Marked where the difference exceeds {bound:.0%} of the plan. Times are medians."),
        table(("part", "planned", "measured", "difference", "bound"), table_rows, (1, 2, 3), "beyond"),
    ]
