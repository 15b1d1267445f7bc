"""A run's recorded steps as a trace in Chrome's JSON format, which Perfetto opens.

Source: Trace Event Format (Google, 2016): complete events ``X``, instant events ``i``, metadata ``M``; times in
microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.monitor.rundir import RunFiles, number
from meshwright.monitor.timeline import StepTimeline, TimelineReader

_STEP_ROW, _PHASE_ROW, _WAIT_ROW = 0, 1, 2
_ROW_NAMES = {_STEP_ROW: "step", _PHASE_ROW: "phase", _WAIT_ROW: "waits for"}
_US = 1e6
EVENTS_PROCESS = 1 << 20
"""Process id of the row of the supervisor's events; ranks have their number."""


def write_trace(run: RunFiles, path: Path, describe: Callable[[int], str] = "rank {}".format) -> tuple[int, int]:
    """Writes the trace of a run.

    Args:
        run: the run directory's contents.
        path: of the file, which is replaced.
        describe: names a rank.

    Returns:
        Number of ranks, and of steps that any of them recorded.

    Raises:
        ConfigError: when no step's timeline was recorded.
    """
    # A step that was trained again after a recovery: the last record counts.
    timelines = {(timeline.rank, timeline.step): timeline for timeline in TimelineReader(run.path).read()}
    if not timelines:
        raise ConfigError(
            f"{run.path} has no timeline of a step; record one in N steps by --monitor.timeline N (a page records one "
            "in 50), each takes some KB a rank"
        )
    origin = min(timeline.start for timeline in timelines.values())
    ranks = sorted({rank for rank, _ in timelines})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events(run, timelines, ranks, origin, describe):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")
    temporary.replace(path)
    return len(ranks), len({step for _, step in timelines})


def _events(
    run: RunFiles,
    timelines: dict[tuple[int, int], StepTimeline],
    ranks: list[int],
    origin: float,
    describe: Callable[[int], str],
) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        yield _metadata("process_name", rank, 0, name=describe(rank))
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
        for row, name in _ROW_NAMES.items():
            yield _metadata("thread_name", rank, row, name=name)
    yield _metadata("process_name", EVENTS_PROCESS, 0, name="supervisor")
    for (rank, step), timeline in sorted(timelines.items()):
        offset_s = timeline.start - origin
        yield _complete(rank, _STEP_ROW, f"step {step}", offset_s, timeline.seconds, {"step": step})
        for span in timeline.phases:
            fields = {"step": step, "micro_batch": span.number}
            yield _complete(rank, _PHASE_ROW, span.name, offset_s + span.start_s, span.seconds, fields)
        for span in timeline.waits:
            waited = {"step": step, "bytes": span.number}
            yield _complete(rank, _WAIT_ROW, span.name, offset_s + span.start_s, span.seconds, waited)
    for event in run.events:
        moment_s = number(event.get("time")) - origin
        # What happened before the first record would move the trace's start.
        if moment_s >= 0:
            process = event["rank"] if event.get("rank") in ranks else EVENTS_PROCESS
            fields = {key: value for key, value in event.items() if key not in ("kind", "rank", "time")}
            yield {
                "ph": "i", "name": str(event["kind"]), "pid": process, "tid": _STEP_ROW, "ts": round(moment_s * _US),
                "s": "p", "args": fields,
            }  # fmt: skip
    for line in run.steps:
        # Rank 0's counters belong to the steps whose start it recorded.
        recorded = timelines.get((0, line["step"]))
        if recorded is not None:
            end_s = recorded.start - origin + recorded.seconds
            for name in ("loss", "tokens_per_s"):
                value = number(line.get(name))
                if value == value:
                    yield {"ph": "C", "name": name, "pid": 0, "ts": round(end_s * _US), "args": {name: value}}


def _metadata(kind: str, rank: int, row: int, **fields: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": fields}


def _complete(rank: int, row: int, name: str, start_s: float, seconds: float, fields: object) -> dict[str, Any]:
    start, duration = round(start_s * _US), round(seconds * _US)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": duration, "args": fields}
