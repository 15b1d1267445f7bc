"""Sinks of step records and events: the `Sink` contract and the JSON-lines files of the run directory."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import RankError
from meshwright.events import Event, StepRecord
from meshwright.monitor.retry import RetryingFile
from meshwright.records import parse_json

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SUPERVISOR = -1
"""Rank in events of the process that started the ranks."""
_EVENT_FIELDS = {field.name for field in dataclasses.fields(Event)}
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord))


def _to_plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


_ENCODE = json.JSONEncoder(separators=(",", ":"), default=_to_plain, allow_nan=False).encode


class Sink(Protocol):
    """Receives the records and events of a run. One thread uses a sink; it may raise, and its owner handles that."""

    def step(self, record: StepRecord) -> None:
        """Receives the record of one optimizer step, in ascending order of steps."""

    def event(self, event: Event) -> None:
        """Receives one event."""

    def close(self) -> None:
        """Writes everything still buffered. Called once and last, also after a failure."""


class LineFile:
    """A file of JSON lines that several processes may append to: every line is one write in append mode.

    Linux holds the inode's lock during an append, so lines of several ranks never mix on a local disk. Lines that don't
    fit on a full disk wait in memory (`RetryingFile`).
    """

    def __init__(self, path: Path) -> None:
        """Opens the file for appending, and terminates a line that a killed process left unfinished."""
        self.path = path
        self._file = _open_file(path)

    def append(self, values: dict[str, Any]) -> float | None:
        """Appends one line; numbers that aren't finite become null, since JSON has none.

        Returns:
            Duration in seconds of a disk failure that ended with this call; else None.

        Raises:
            RankError: when the file can never be written.
        """
        try:
            text = _ENCODE(values)
        except ValueError:
            # The slow path, taken only where a value isn't finite.
            text = _ENCODE(_null_non_finite(values))
        try:
            return self._file.write(text.encode() + b"\n")
        except OSError as error:
            raise RankError(f"{self.path} can't be written: {error.strerror}; free space or move the run") from error

    @property
    def dropped(self) -> int:
        """Lines that were dropped: the disk failed and the buffer was full."""
        return self._file.dropped

    def close(self) -> None:
        """Closes the file, and reports lost lines on standard error; a second call does nothing."""
        lost_count = self._file.close()
        if lost_count:
            cause = f"{self._file.error}; free space before the next run"
            sys.stderr.write(f"{self.path}: the last {lost_count} lines couldn't be written: {cause}\n")


def _open_file(path: Path) -> RetryingFile:
    try:
        return RetryingFile(path, shared=True)
    except OSError as error:
        raise RankError(f"{path} can't be written: {error.strerror}; free space or move the run") from error


class EventTail:
    """Reads the events that a supervisor (rank -1) has appended to ``events.jsonl`` since the last call."""

    def __init__(self, path: Path) -> None:
        """Starts at the current end of the file."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[Event]:
        """Returns the supervisor's new events; without any it costs one system call."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        # A line without its end is still being written; the next call reads it.
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        events = []
        for line in complete_lines.splitlines():
            try:
                values = parse_json(line)
            except ValueError:
                continue
            # Ranks write to the same file; only the supervisor's events are news here.
            if values.get("rank") == SUPERVISOR:
                data = {key: value for key, value in values.items() if key not in _EVENT_FIELDS}
                recorded_at = values.get("time")
                recorded_at = float(recorded_at) if isinstance(recorded_at, (int, float)) else 0.0
                events.append(Event(kind=str(values.get("kind")), rank=SUPERVISOR, data=data, time=recorded_at))
        return events


class JsonlSink:
    """Writes ``metrics.jsonl`` and ``events.jsonl``: rank 0 both, other ranks events alone."""

    def __init__(self, run_dir: Path, metrics: bool = True) -> None:
        """Opens the files of a run directory.

        Args:
            run_dir: the run directory, which exists.
            metrics: whether this rank writes step records.
        """
        self._metrics = LineFile(run_dir / METRICS) if metrics else None
        self._events = LineFile(run_dir / EVENTS)

    def step(self, record: StepRecord) -> None:
        """Appends a line to metrics.jsonl."""
        if self._metrics is not None:
            # The same values as record.to_json(), without its deep copy, which costs more than writing them.
            self._append(self._metrics, {name: getattr(record, name) for name in _STEP_FIELDS})

    def event(self, event: Event) -> None:
        """Appends a line to events.jsonl."""
        self._append(self._events, event.to_json())

    def _append(self, file: LineFile, values: dict[str, Any]) -> None:
        """Appends a line, and an event when the disk has recovered from a failure."""
        outage_s = file.append(values)
        if outage_s is not None:
            outage_fields = {"path": file.path.name, "seconds": outage_s, "lost": file.dropped}
            self._events.append(Event(kind="disk_writable", rank=SUPERVISOR, data=outage_fields).to_json())

    def close(self) -> None:
        """Closes both files."""
        if self._metrics is not None:
            self._metrics.close()
        self._events.close()


def truncate_metrics(path: Path, step: int) -> int:
    """Drops the lines of metrics.jsonl after a step, and one cut short by a kill, before a run resumes there.

    Steps ascend, so only the dropped lines are parsed. The file is truncated in place, which needs no space on a full
    disk. Call it before the file is opened for appending.

    Args:
        path: the metrics file; a missing one is not created.
        step: the last step to keep.

    Returns:
        Number of lines dropped.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept_count = len(lines)
    # Backwards from the end: lines after the step, and a torn one.
    while kept_count and not (lines[kept_count - 1].endswith(b"\n") and _step_of(lines[kept_count - 1]) <= step):
        kept_count -= 1
    if kept_count == len(lines):
        return 0
    os.truncate(path, sum(map(len, lines[:kept_count])))
    return len(lines) - kept_count


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; skips lines that a kill cut short; a missing file is empty."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                values = parse_json(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                yield values


def _step_of(line: bytes) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _null_non_finite(value: Any) -> Any:
    """Replaces floats that aren't finite by None, also in nested values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _null_non_finite(_to_plain(value))
    if isinstance(value, Mapping):
        return {str(key): _null_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_null_non_finite(item) for item in value]
    return value
