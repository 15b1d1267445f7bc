"""The parts of the report that draw numbers: course, compression, time, memory, traffic, drift."""

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
    """Returns the curves: loss, gradient norm, learning rate, throughput, accuracy."""
    if not run.steps:
        return '<p class="none">No step was recorded.</p>'
    x = column(run.steps, "step")
    resumed = [step for step in column(run.of_kind("resumed"), "step") if math.isfinite(step)]
    word = "resumed" if len(resumed) < 4 else f"resumed {len(resumed)} times"
    # Labels of many marks would cover each other: then the first one speaks for all.
    marks = [Mark(x=step, label=word if len(resumed) < 4 or not at else "") for at, step in enumerate(resumed)]
    skipped = [step["step"] for step in run.steps if step.get("skipped")]
    evaluated = [event for event in run.of_kind("evaluated") if math.isfinite(number(event.get("step")))]
    evaluated.sort(key=lambda event: event["step"])

    def chart(name: str, title: str, unit: str, extra: Sequence[Series] = (), from_zero: bool = False) -> str:
        own = Series(label="training", x=x, y=column(run.steps, name), smooth=name != "lr")
        triangles = skipped if name in ("loss", "grad_norm") else ()
        return line_chart([own, *extra], title, unit, marks, triangles, from_zero, 1046 if name == "loss" else 504)

    def validation(name: str) -> list[Series]:
        y = column(evaluated, name)
        some = any(math.isfinite(value) for value in y)
        at = column(evaluated, "step")
        return [Series(label="validation", x=at, y=y, colour=1, dots=len(at) < 60)] if some else []

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
    """Returns the bits per byte of the compressors that an event names, whatever it calls them exactly."""
    inner = [value for value in final.values() if isinstance(value, Mapping)]
    pairs = [(str(key), value) for one in (final, *inner) for key, value in one.items()]
    found = []
    for name in _COMPRESSORS:
        values = [number(value) for key, value in pairs if name in key]
        found += [(name, value) for value in values[:1] if math.isfinite(value)]
    return found


def compression(run: RunFiles) -> str:
    """Returns the model's bits per byte beside those of compressors, where an evaluation gave them."""
    final = run.final()
    ours = number(final.get("bits_per_byte"))
    if not math.isfinite(ours):
        return ""
    rows = [("this model", ours), *compressors(final)]
    note = '<p class="small">Bits that each byte of the held-out text costs: fewer is better.</p>'
    return note + bars(rows, "Bits per byte", lambda value: f"{value:.3f}")


def time(run: RunFiles) -> str:
    """Returns the parts of a step's time as bars and a table."""
    warm = [step for step in run.steps[min(5, len(run.steps) // 2) :] if step.get("parts")]
    if not warm:
        return ""
    slow = sorted(warm, key=lambda step: number(step.get("step_s")))[-max(1, len(warm) // 100) :]
    rows = [("mean step", _mean_parts(warm))]
    planned = (run.plan.get("prediction") or {}).get("parts") or {}
    if planned:
        rows.insert(0, ("planned", {name: float(value) for name, value in planned.items()}))
    if len(warm) >= 100:
        rows.append(("slowest 1 %", _mean_parts(slow)))
    names = dict.fromkeys(name for _, parts in rows for name in parts)
    lines = [(name, *(format_seconds(parts[name]) if name in parts else "" for _, parts in rows)) for name in names]
    heads = ("part", *(label for label, _ in rows))
    return stacked_bars(rows, "Seconds of a step on rank 0", format_seconds) + table(heads, lines, range(1, len(heads)))


def _mean_parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in step["parts"].items():
            sums[name] = sums.get(name, 0.0) + (seconds or 0.0)
    return {name: total / len(steps) for name, total in sums.items()}


def memory(run: RunFiles, measured: Mapping[str, Any]) -> str:
    """Returns the parts of a rank's memory, planned and measured, with the formulas of the plan."""
    prediction = run.plan.get("prediction") or {}
    planned, formula = prediction.get("memory") or {}, prediction.get("formula") or {}
    found = measured["memory"]
    names = [*planned, *(name for name in found if name not in planned)]
    if not names:
        return ""
    order = ("parameters", "gradients", "optimizer")
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name == "peak"))
    rows = [(name, planned.get(name), found.get(name)) for name in names]
    drawn = paired_bars(rows, ("planned", "measured"), "Bytes per rank", format_bytes)
    lines = [
        (name, *("" if value is None else f"{value:,}" for value in (plan, seen)), str(formula.get(name, "")))
        for name, plan, seen in rows
    ]
    note = '<p class="small">Planned: of the fullest rank. Measured: the most that rank 0 held in any step.</p>'
    return note + drawn + table(("part", "planned bytes", "measured bytes", "formula"), lines, (1, 2))


def traffic(run: RunFiles) -> str:
    """Returns what rank 0 sent, by axis and operation."""
    warm = run.steps[min(5, len(run.steps) // 2) :]
    sums: dict[tuple[str, str], list[float]] = {}
    for step in warm:
        for total in step.get("comm") or ():
            entry = sums.setdefault((str(total["axis"]), str(total["op"])), [0.0] * 4)
            for at, name in enumerate(("calls", "bytes", "seconds", "exposed_s")):
                entry[at] += total.get(name) or 0.0
    if not sums:
        return '<p class="none">One rank, or no traffic recorded: nothing was sent.</p>' if run.steps else ""
    lines, rows = [], []
    for (axis, op), values in sorted(sums.items()):
        calls, size, seconds, exposed = (value / len(warm) for value in values)
        speed = f"{format_bytes(size / seconds)}/s" if seconds > 0 else ""
        times = (format_seconds(seconds), format_seconds(exposed))
        lines.append((axis, op, f"{calls:.3g}", format_bytes(size), *times, speed))
        rows.append((f"{axis} {op}", {"stood still": exposed, "overlapped": max(0.0, seconds - exposed)}))
    heads = ("axis", "operation", "calls", "bytes", "time", "stood still", "bandwidth")
    note = '<p class="small">Per step, as rank 0 saw it. Bytes that it put on the wire.</p>'
    return note + stacked_bars(rows, "Seconds of a step", format_seconds) + table(heads, lines, range(2, 7))


def drift(run: RunFiles, measured: Mapping[str, Any], bound: float) -> str:
    """Returns the table of everything that was both planned and measured."""
    drifts = compare(run.plan, measured, bound)
    if not drifts:
        return ""
    lines = []
    for drift in drifts:
        text = format_bytes if drift.part.startswith(("memory", "traffic")) else format_seconds
        relative = f"{drift.relative:+.1%}" if math.isfinite(drift.relative) else "not planned"
        values = (text(drift.planned), text(drift.measured))
        lines.append((drift.part, *values, relative, "beyond" if drift.beyond else "within"))
    note = f'<p class="small">Marked where the difference exceeds {bound:.0%} of the plan. Times are medians.</p>'
    return note + table(("part", "planned", "measured", "difference", "bound"), lines, (1, 2, 3), bad="beyond")
