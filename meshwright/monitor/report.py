"""``report.html``: what a run was, how it went, how far it was from its plan; from the run directory's files alone.

The report reads these values of events where they are present: ``run_started`` (all its data is listed),
``rank_started`` (rank, host, device), ``evaluated`` and ``run_finished`` (loss, accuracy, bits_per_byte, and any number
whose name holds gzip or xz, taken as that compressor's bits per byte), ``sampled`` (text, prompt), ``resumed`` (step).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from html import escape
from pathlib import Path

from meshwright.monitor.drift import measure
from meshwright.monitor.grid import layout_grid
from meshwright.monitor.page import page, table, tiles
from meshwright.monitor.progress import spans
from meshwright.monitor.rundir import RunFiles, column, number, read_run
from meshwright.monitor.sections import compression, compressors, course, drift, memory, time, traffic
from meshwright.units import format_bytes, format_count, format_seconds

REPORT = "report.html"
_MOST_EVENTS = 300


def _drawn(draw: Callable[[], str]) -> str:
    """Returns a part of the report; one whose files hold values of other kinds says so."""
    try:
        return draw()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return f"<p>The files that this is drawn from are damaged ({type(error).__name__}).</p>"


def write_report(run_dir: Path, bound: float = 0.25) -> Path:
    """Writes report.html into a run directory; parts whose files are missing are left out.

    Args:
        run_dir: the run directory.
        bound: relative difference between planned and measured that is marked.

    Returns:
        The path of the report, which appears whole or not at all.

    Raises:
        OSError: when it can't be written.
    """
    run = read_run(run_dir)
    measured = measure(run.steps)
    parts: list[tuple[str, Callable[[], str]]] = [
        ("", lambda: _head(run)),
        ("What ran", lambda: _what_ran(run)),
        ("Course", lambda: course(run)),
        ("Compression of the held-out text", lambda: compression(run)),
        ("Layout", lambda: layout_grid(run)),
        ("Time by part", lambda: time(run)),
        ("Memory by part", lambda: memory(run, measured)),
        ("Traffic", lambda: traffic(run)),
        ("Planned against measured", lambda: drift(run, measured, bound)),
        ("Samples", lambda: _samples(run)),
        ("Events", lambda: _events(run)),
    ]
    sections = [(name, _drawn(draw)) for name, draw in parts]
    body = "".join((f"<h2>{name}</h2>" if name else "") + part for name, part in sections if part)
    path = run_dir / REPORT
    beside = path.with_name(f"{REPORT}.{os.getpid()}.new")
    beside.write_text(page(f"{run.path.name} · meshwright", body), encoding="utf-8")
    beside.replace(path)
    return path


def _head(run: RunFiles) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    started = number(run.events[0].get("time")) if run.events else math.nan
    words = [run.state, f"{done} steps"]
    if run.layout:
        words.append(run.layout)
    if math.isfinite(started):
        words.append(datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M"))
    sub = f'<p class="sub">{escape(" · ".join(words))}</p>'
    return f"<h1>{escape(run.path.resolve().name)}</h1>{sub}{tiles(_numbers(run))}"


def _numbers(run: RunFiles) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    final, steps = run.final(), run.steps
    evaluations = [event for event in run.of_kind("evaluated") if math.isfinite(number(event.get("loss")))]
    if evaluations:
        best = min(evaluations, key=lambda event: event["loss"])
        remark = f"best {best['loss']:.4f} at step {best.get('step', '?')}"
        found.append(("Validation loss", f"{evaluations[-1]['loss']:.4f}", remark))
    if math.isfinite(number(final.get("bits_per_byte"))):
        others = ", ".join(f"{name} {value:.2f}" for name, value in compressors(final))
        found.append(("Bits per byte", f"{final['bits_per_byte']:.3f}", others))
    if not steps:
        return found
    losses = [value for value in column(steps[-50:], "loss") if math.isfinite(value)]
    if losses:
        found.append(("Training loss", f"{sum(losses) / len(losses):.4f}", f"mean of the last {len(losses)} steps"))
    speeds = sorted(value for value in column(steps, "tokens_per_s") if math.isfinite(value))
    if speeds:
        found.append(("Tokens/s", format_count(speeds[len(speeds) // 2]), "median over steps"))
    mfu = sorted(value for value in column(steps, "mfu") if math.isfinite(value))
    if mfu:
        found.append(("MFU", f"{mfu[len(mfu) // 2]:.1%}", "model FLOP/s over the ranks' matrix-product rate"))
    found.append(("Tokens", format_count(number(steps[-1].get("tokens_total"))), f"{len(steps)} steps recorded"))
    peak = max((number((step.get("memory") or {}).get("peak")) for step in steps), default=math.nan)
    if math.isfinite(peak):
        found.append(("Peak memory", format_bytes(peak), "on rank 0"))
    spent = sum(value for value in column(steps, "step_s") if math.isfinite(value))
    found.append(("Time in steps", format_seconds(spent), _wall(run)))
    return found


def _wall(run: RunFiles) -> str:
    times = [event["time"] for event in run.events if isinstance(event.get("time"), (int, float))]
    return f"{format_seconds(max(times) - min(times))} from first to last event" if times else ""


def _what_ran(run: RunFiles) -> str:
    rows: list[tuple[str, str]] = []
    for event in run.of_kind("run_started")[-1:]:
        hidden = ("kind", "rank", "pid", "time")
        rows += [(key, _flat(value)) for key, value in event.items() if key not in hidden and value not in (None, "")]
    for section in ("model", "data", "devices", "launch", "layout"):
        if section in run.config and section not in dict(rows):
            rows.append((section, _flat(run.config[section])))
    if run.layout:
        rows = [row for row in rows if row[0] != "layout"] + [("layout", run.layout)]
    if run.plan.get("reason"):
        rows.append(("why this layout", str(run.plan["reason"])))
    rows += [(f"not {name}", str(why)) for name, why in (run.plan.get("rejected") or {}).items()]
    parts = [table((), rows)] if rows else []
    if run.config_text:
        parts.append(f"<details><summary>config.toml</summary><pre>{escape(run.config_text)}</pre></details>")
    return "".join(parts)


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items() if item not in (None, ""))
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _samples(run: RunFiles) -> str:
    found = run.of_kind("sampled")
    shown = []
    for event in reversed(found[-6:]):
        where = f"step {event.get('step', '?')}" + (f", prompt {event['prompt']!r}" if event.get("prompt") else "")
        shown.append(f'<p class="small">{escape(where)}</p><pre>{escape(str(event.get("text", "")))}</pre>')
    if len(shown) > 1:
        shown[1:] = [f"<details><summary>earlier samples</summary>{''.join(shown[1:])}</details>"]
    return "".join(shown)


def _events(run: RunFiles) -> str:
    """Returns the table of events; ranks that start one after the other share a line."""
    if not run.events:
        return ""
    begin = number(run.events[0].get("time"))
    lines: list[tuple[str, ...]] = []
    for kind, group in itertools.groupby(run.events, key=lambda event: event["kind"]):
        events = list(group)
        if kind == "rank_started" and len(events) > 1:
            ranks = f"ranks {spans([event.get('rank', -1) for event in events])}"
            hosts = ", ".join(dict.fromkeys(str(event.get("host", "")) for event in events))
            lines.append((_after(events[0], begin), ranks, kind, "", hosts))
        else:
            lines += [_event(event, begin) for event in events]
    gone = len(lines) - _MOST_EVENTS
    if gone > 0:
        lines[100 : 100 + gone] = [("", "", f"{gone} more", "", "")]
    return table(("after", "who", "what", "data", "process"), lines, (0,))


def _event(event: Mapping[str, object], begin: float) -> tuple[str, ...]:
    hidden = ("kind", "rank", "pid", "host", "time", "text")
    data = ", ".join(f"{key} {_flat(value)}" for key, value in event.items() if key not in hidden)
    who = f"rank {event.get('rank', '?')}" if event.get("rank") != -1 else "launcher"
    return _after(event, begin), who, str(event["kind"]), data[:600], f"{event.get('host', '')}:{event.get('pid', '')}"


def _after(event: Mapping[str, object], begin: float) -> str:
    after = number(event.get("time")) - begin
    return format_seconds(after) if math.isfinite(after) else ""
