"""Sections of the report with numbers: training curves, compression, time, memory, traffic, drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.monitor.bars import bars, paired_bars, stacked_bars
from meshwright.monitor.charts import Mark, Series, line_chart
from meshwright.monitor.drift import compare
from meshwright.monitor.page import table
from meshwright.monitor.rundir import RunFiles, column, number
from meshwright.units import format_bytes, format_seconds

_COMPRESSORS = ("gzip", "xz", "bzip2", "zstd")


def course(run: RunFiles) -> str:
    """Renders the training curves: loss, gradient norm, learning rate, throughput, accuracy."""
    if not run.steps:
        return '<p class="none">No step was recorded.</p>'
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

    def chart(name: str, title: str, unit: str, more_series: Sequence[Series] = (), from_zero: bool = False) -> str:
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
    if any(value > 0 for value in column(run.steps, "accuracy")):
        charts.append(chart("accuracy", "Accuracy", "share of tokens", validation("accuracy"), True))
    loss = chart("loss", "Loss", "nats per token", validation("loss"))
    return f'{loss}<div class="two">{"".join(charts)}</div>'


def compressors(final: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Finds compressors' bits per byte in an event by substrings of its field names, also in nested fields."""
    # An event may have the figures one level down, in a table of compressors.
    nested = [value for value in final.values() if isinstance(value, Mapping)]
    pairs = [(str(key), value) for mapping in (final, *nested) for key, value in mapping.items()]
    bits_per_byte = []
    for name in _COMPRESSORS:
        values = [number(value) for key, value in pairs if name in key]
        bits_per_byte += [(name, value) for value in values[:1] if math.isfinite(value)]
    return bits_per_byte


def compression(run: RunFiles) -> str:
    """Renders the model's bits per byte beside those of compressors; empty where no evaluation has them."""
    final = run.final()
    ours = number(final.get("bits_per_byte"))
    if not math.isfinite(ours):
        return ""
    rows = [("this model", ours), *compressors(final)]
    note = '<p class="small">Bits that each byte of the held-out text costs: fewer is better.</p>'
    return note + bars(rows, "Bits per byte", lambda value: f"{value:.3f}")


def time(run: RunFiles) -> str:
    """Renders the parts of a step's time as bars and a table."""
    # The first steps fill caches and choose kernels.
    warm = [step for step in run.steps[min(5, len(run.steps) // 2) :] if step.get("parts")]
    if not warm:
        return ""
    # The slowest hundredth, whose parts show what a slow step waits for.
    slow = sorted(warm, key=lambda step: number(step.get("step_s")))[-max(1, len(warm) // 100) :]
    rows = [("mean step", _mean_parts(warm))]
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
    return stacked_bars(rows, "Seconds of a step on rank 0", format_seconds) + table(
        headings, table_rows, range(1, len(headings))
    )


def _mean_parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in step["parts"].items():
            sums[name] = sums.get(name, 0.0) + (seconds or 0.0)
    return {name: total / len(steps) for name, total in sums.items()}


def memory(run: RunFiles, measured: Mapping[str, Any]) -> str:
    """Renders the parts of a rank's memory, planned and measured, with the plan's formulas."""
    prediction = run.plan.get("prediction") or {}
    planned, formula = prediction.get("memory") or {}, prediction.get("formula") or {}
    measured_bytes = measured["memory"]
    names = [*planned, *(name for name in measured_bytes if name not in planned)]
    if not names:
        return ""
    group_order = ("parameters", "gradients", "optimizer")
    # State first, then activations and buffers; the peak sums them up and comes last.
    names.sort(key=lambda name: (group_order.index(name) if name in group_order else len(group_order), name == "peak"))
    rows = [(name, planned.get(name), measured_bytes.get(name)) for name in names]
    figure = paired_bars(rows, ("planned", "measured"), "Bytes per rank", format_bytes)
    table_rows = [
        (
            name,
            *("" if value is None else f"{value:,}" for value in (planned_value, measured_value)),
            str(formula.get(name, "")),
        )
        for name, planned_value, measured_value in rows
    ]
    note = '<p class="small">Planned: of the fullest rank. Measured: the most that rank 0 held in any step.</p>'
    return note + figure + table(("part", "planned bytes", "measured bytes", "formula"), table_rows, (1, 2))


def traffic(run: RunFiles) -> str:
    """Renders rank 0's traffic by axis and operation."""
    warm = run.steps[min(5, len(run.steps) // 2) :]
    sums: dict[tuple[str, str], list[float]] = {}
    for step in warm:
        for total in step.get("comm") or ():
            entry = sums.setdefault((str(total["axis"]), str(total["op"])), [0.0] * 4)
            for index, name in enumerate(("calls", "bytes", "seconds", "exposed_s")):
                entry[index] += total.get(name) or 0.0
    if not sums:
        return '<p class="none">One rank, or no traffic recorded: nothing was sent.</p>' if run.steps else ""
    table_rows, rows = [], []
    for (axis, op), values in sorted(sums.items()):
        calls, size, seconds, exposed = (value / len(warm) for value in values)
        speed = f"{format_bytes(size / seconds)}/s" if seconds > 0 else ""
        times = (format_seconds(seconds), format_seconds(exposed))
        table_rows.append((axis, op, f"{calls:.3g}", format_bytes(size), *times, speed))
        rows.append((f"{axis} {op}", {"stood still": exposed, "overlapped": max(0.0, seconds - exposed)}))
    headings = ("axis", "operation", "calls", "bytes", "time", "stood still", "bandwidth")
    note = '<p class="small">Per step, as rank 0 saw it. Bytes that it put on the wire.</p>'
    return note + stacked_bars(rows, "Seconds of a step", format_seconds) + table(headings, table_rows, range(2, 7))


def drift(run: RunFiles, measured: Mapping[str, Any], bound: float) -> str:
    """Renders the table of all quantities that were both planned and measured."""
    drifts = compare(run.plan, measured, bound)
    if not drifts:
        return ""
    table_rows = []
    for drift in drifts:
        format_value = format_bytes if drift.part.startswith(("memory", "traffic")) else format_seconds
        relative = f"{drift.relative:+.1%}" if math.isfinite(drift.relative) else "not planned"
        values = (format_value(drift.planned), format_value(drift.measured))
        table_rows.append((drift.part, *values, relative, "beyond" if drift.beyond else "within"))
    note = f'<p class="small">Marked where the difference exceeds {bound:.0%} of the plan. Times are medians.</p>'
    return note + table(
        ("part", "planned", "measured", "difference", "bound"), table_rows, (1, 2, 3), warning_text="beyond"
    )
