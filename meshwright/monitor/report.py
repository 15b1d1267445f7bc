"""A run's page, from the run directory's files alone: its setup, its course and its distance from the plan.

``report.html`` is the page as it stands at the run's end; while the run lasts, `meshwright.monitor.server` serves it.
The report reads these values of events where they are present: ``run_started`` (all its data is listed),
``rank_started`` (rank, host, device), ``evaluated`` and ``run_finished`` (loss, accuracy, bits_per_byte, and any number
whose name holds gzip or xz, taken as that compressor's bits per byte), ``sampled`` (text, prompt), ``resumed`` (step).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from meshwright.json_types import JsonObject
from meshwright.monitor.energy import token_energy
from meshwright.monitor.event_sections import checkpoints, devices, experts
from meshwright.monitor.health import health, read_health
from meshwright.monitor.island_section import islands
from meshwright.monitor.page import Section, folded, note, page, preformatted, table, tiles, title
from meshwright.monitor.progress import spans
from meshwright.monitor.rundir import RunFiles, RunReader, column, number, read_run
from meshwright.monitor.sections import compression, compressors, course, drift, layout_grid, memory, time, traffic
from meshwright.monitor.timeline_sections import pipeline, waits
from meshwright.monitor.wait_history import WaitHistory
from meshwright.units import format_bytes, format_count, format_seconds

REPORT = "report.html"
LAST_STEP, WAITS = "Last recorded step", "Who waits for whom"
"""Headings of the sections that are drawn from timelines alone."""
_MAX_EVENTS = 300
_LOSSES = 50
"""Newest steps whose mean loss a tile shows."""
_NEWEST_BYTES = 1 << 18
"""Bytes at the end of a run's files in which the newest steps are, some KB each."""


def render_safely(render: Callable[[], list[Markup]]) -> list[Markup]:
    """Renders a section; where its files hold values of other types, a sentence says so."""
    try:
        return render()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return [note(f"The files that this is drawn from are damaged ({type(error).__name__}).")]


def run_sections(
    run: RunFiles,
    history: WaitHistory,
    bound: float,
    window: int | None = None,
    reuse: Mapping[str, list[Markup]] | None = None,
) -> list[Section]:
    """Renders all sections of a run's page; those whose files are missing have no elements.

    Args:
        run: the run directory's contents.
        history: the ranks' recorded steps.
        bound: relative difference from plan to measurement above which a row is marked.
        window: newest steps of which times, memory and traffic are; None for all.
        reuse: sections that haven't changed, by heading, which are returned as they are.
    """
    recent = run if window is None else dataclasses.replace(run, steps=run.steps[-window:])
    renderers: list[tuple[str, Callable[[], list[Markup]]]] = [
        ("", lambda: _head(run)),
        ("Course", lambda: course(run)),
        ("Islands", lambda: islands(run)),
        ("Time by part", lambda: time(recent)),
        ("Traffic", lambda: traffic(recent)),
        (LAST_STEP, lambda: pipeline(history)),
        (WAITS, lambda: waits(history)),
        ("Memory by part", lambda: memory(recent)),
        ("Planned against measured", lambda: drift(recent, bound)),
        ("Experts", lambda: experts(run)),
        ("Compression of the held-out text", lambda: compression(run)),
        ("Devices", lambda: devices(run)),
        ("Health", lambda: health(run.path, run.plan)),
        ("Checkpoints", lambda: checkpoints(run)),
        ("Samples", lambda: _samples(run)),
        ("Events", lambda: _events(run)),
        ("Layout", lambda: layout_grid(run)),
        ("What ran", lambda: _what_ran(run)),
    ]
    reuse = reuse or {}
    # Sections are rendered one by one: damaged files spoil their own section alone.
    return [(heading, reuse[heading] if heading in reuse else render_safely(render)) for heading, render in renderers]


def write_report(run_dir: Path, bound: float = 0.25) -> Path:
    """Writes report.html into a run directory; sections whose files are missing are left out.

    Args:
        run_dir: the run directory.
        bound: relative difference from plan to measurement above which a row is marked.

    Returns:
        The path of the report, which is replaced atomically.

    Raises:
        OSError: when it can't be written.
    """
    run = read_run(run_dir)
    sections = run_sections(run, WaitHistory.read(run_dir), bound)
    path = run_dir / REPORT
    temporary = path.with_name(f"{REPORT}.{os.getpid()}.new")
    temporary.write_text(page(f"{run.path.name} · meshwright", sections), encoding="utf-8")
    # A browser that reloads never sees half a report.
    temporary.replace(path)
    return path


def newest_head(run_dir: Path) -> list[Markup]:
    """Renders title, state and the newest figures, from the last lines of a run's steps and events alone."""
    run = RunReader(run_dir, newest_bytes=_NEWEST_BYTES, newest_event_bytes=_NEWEST_BYTES).read()
    figures = _newest_loss(run.steps)
    if run.steps:
        figures.append(("Tokens", format_count(number(run.steps[-1].get("tokens_total"))), ""))
    return [title(run.path.resolve().name, " · ".join(_facts(run))), tiles(figures)]


def _facts(run: RunFiles) -> list[str]:
    return [run.state, f"{run.steps[-1]['step'] if run.steps else 0} steps", *([run.layout] if run.layout else [])]


def _head(run: RunFiles) -> list[Markup]:
    """Renders title, state and the tiles of main figures."""
    started = number(run.events[0].get("time")) if run.events else math.nan
    facts = _facts(run)
    if math.isfinite(started):
        facts.append(datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M"))
    return [title(run.path.resolve().name, " · ".join(facts)), tiles(main_figures(run))]


def _newest_loss(steps: Sequence[JsonObject]) -> list[tuple[str, str, str]]:
    losses = [value for value in column(steps[-_LOSSES:], "loss") if math.isfinite(value)]
    if not losses:
        return []
    return [("Training loss", f"{sum(losses) / len(losses):.4f}", f"mean of the last {len(losses)} steps")]


def main_figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """Returns name, value and remark of a run's main figures, as its page shows them."""
    tile_entries: list[tuple[str, str, str]] = []
    final, steps = run.final(), run.steps
    evaluations = [event for event in run.of_kind("evaluated") if math.isfinite(number(event.get("loss")))]
    if evaluations:
        best = min(evaluations, key=lambda event: event["loss"])
        remark = f"best {best['loss']:.4f} at step {best.get('step', '?')}"
        tile_entries.append(("Validation loss", f"{evaluations[-1]['loss']:.4f}", remark))
    if math.isfinite(number(final.get("bits_per_byte"))):
        compressor_text = ", ".join(f"{name} {value:.2f}" for name, value in compressors(final))
        tile_entries.append(("Bits per byte", f"{final['bits_per_byte']:.3f}", compressor_text))
    if not steps:
        return tile_entries
    tile_entries += _newest_loss(steps)
    # The median: pauses for checkpoints and evaluations would pull the mean down.
    throughputs = sorted(value for value in column(steps, "tokens_per_s") if math.isfinite(value))
    if throughputs:
        tile_entries.append(("Tokens/s", format_count(throughputs[len(throughputs) // 2]), "median over steps"))
    mfu = sorted(value for value in column(steps, "mfu") if math.isfinite(value))
    if mfu:
        measured = sorted(value for value in column(steps, "mfu_of_measured") if math.isfinite(value))
        share = f"; {measured[len(measured) // 2]:.1%} of the measured rate" if measured else ""
        tile_entries.append(("MFU", f"{mfu[len(mfu) // 2]:.1%}", f"of the data sheets' dense peak, where known{share}"))
    tile_entries.append(
        (
            "Tokens",
            format_count(number(steps[-1].get("tokens_total"))),
            f"{len(steps) + run.thinned_steps} steps recorded",
        )
    )
    peak = max((number((step.get("memory") or {}).get("peak")) for step in steps), default=math.nan)
    if math.isfinite(peak):
        tile_entries.append(("Peak memory", format_bytes(peak), "on rank 0"))
    energy = token_energy(read_health(run.path), run.plan)
    if math.isfinite(energy.measured):
        planned = f"; planned {energy.planned:.3g} J" if math.isfinite(energy.planned) else ""
        parts = [name for name in ("devices", "processors") if math.isfinite(getattr(energy, name))]
        tile_entries.append(("Energy", f"{energy.measured:.3g} J a token", f"of {' and '.join(parts)}{planned}"))
    spent = run.thinned_s + sum(value for value in column(steps, "step_s") if math.isfinite(value))
    tile_entries.append(("Time in steps", format_seconds(spent), _wall_time_text(run)))
    return tile_entries


def _wall_time_text(run: RunFiles) -> str:
    times = [event["time"] for event in run.events if isinstance(event.get("time"), (int, float))]
    return f"{format_seconds(max(times) - min(times))} from first to last event" if times else ""


def _what_ran(run: RunFiles) -> list[Markup]:
    """Renders the run's setup: its start event, config, layout and the plan's reasons."""
    rows: list[tuple[str, str]] = []
    # A resumed run has several; the last one describes the current setup.
    for event in run.of_kind("run_started")[-1:]:
        hidden = ("kind", "rank", "pid", "time")
        rows += [
            (key, _format_value(value)) for key, value in event.items() if key not in hidden and value not in (None, "")
        ]
    for section in ("model", "data", "devices", "launch", "layout"):
        if section in run.config and section not in dict(rows):
            rows.append((section, _format_value(run.config[section])))
    if run.layout:
        rows = [row for row in rows if row[0] != "layout"] + [("layout", run.layout)]
    if run.plan.get("reason"):
        rows.append(("why this layout", str(run.plan["reason"])))
    rows += [(f"not {name}", str(reason)) for name, reason in (run.plan.get("rejected") or {}).items()]
    elements = [table((), rows)] if rows else []
    if run.config_text:
        elements.append(folded("config.toml", [preformatted(run.config_text)]))
    return elements


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items() if item not in (None, ""))
    if isinstance(value, (list, tuple)):
        return ", ".join(_format_value(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _samples(run: RunFiles) -> list[Markup]:
    """Renders the last samples, the newest open and the others folded."""
    samples = run.of_kind("sampled")
    elements: list[list[Markup]] = []
    for event in reversed(samples[-6:]):
        origin = f"step {event.get('step', '?')}" + (f", prompt {event['prompt']!r}" if event.get("prompt") else "")
        elements.append([note(origin), preformatted(str(event.get("text", "")))])
    if len(elements) > 1:
        earlier = [element for sample in elements[1:] for element in sample]
        elements[1:] = [[folded("earlier samples", earlier)]]
    return [element for sample in elements for element in sample]


def _events(run: RunFiles) -> list[Markup]:
    """Renders the table of events; starts of consecutive ranks share a line."""
    if not run.events:
        return []
    start_time = number(run.events[0].get("time"))
    table_rows: list[tuple[str, ...]] = []
    for kind, group in itertools.groupby(run.events, key=lambda event: event["kind"]):
        events = list(group)
        if kind == "rank_started" and len(events) > 1:
            ranks = f"ranks {spans([event.get('rank', -1) for event in events])}"
            hosts = ", ".join(dict.fromkeys(str(event.get("host", "")) for event in events))
            table_rows.append((_elapsed(events[0], start_time), ranks, kind, "", hosts))
        else:
            table_rows += [_event_row(event, start_time) for event in events]
    hidden_count = len(table_rows) - _MAX_EVENTS
    if hidden_count > 0:
        # The first hundred and the latest events are kept, with the number of those between.
        table_rows[100 : 100 + hidden_count] = [("", "", f"{hidden_count} more", "", "")]
    return [table(("after", "who", "what", "data", "process"), table_rows, (0,))]


def _event_row(event: Mapping[str, object], start_time: float) -> tuple[str, ...]:
    """Returns an event's cells: time, source, kind, data and process."""
    hidden = ("kind", "rank", "pid", "host", "time", "text")
    data = ", ".join(f"{key} {_format_value(value)}" for key, value in event.items() if key not in hidden)
    source = f"rank {event.get('rank', '?')}" if event.get("rank") != -1 else "launcher"
    return (
        _elapsed(event, start_time),
        source,
        str(event["kind"]),
        data[:600],
        f"{event.get('host', '')}:{event.get('pid', '')}",
    )


def _elapsed(event: Mapping[str, object], start_time: float) -> str:
    elapsed_s = number(event.get("time")) - start_time
    return format_seconds(elapsed_s) if math.isfinite(elapsed_s) else ""
