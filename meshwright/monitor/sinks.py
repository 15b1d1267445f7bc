"""Where step records and events go: the `Sink` contract and the JSON-lines files of the run directory."""

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
"""Rank of events of the process that started the ranks."""
_EVENT_FIELDS = {field.name for field in dataclasses.fields(Event)}
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


_ENCODE = json.JSONEncoder(separators=(",", ":"), default=_plain, allow_nan=False).encode


class Sink(Protocol):
    """Takes what a run reports. A sink is used by one thread and may raise; the owner decides what that means."""

    def step(self, record: StepRecord) -> None:
        """Takes the record of one optimizer step, in ascending order of steps."""

    def event(self, event: Event) -> None:
        """Takes something that happened once."""

    def close(self) -> None:
        """Writes what is still held back. Called once, also after a failure; nothing follows."""


class LineFile:
    """A file of JSON lines that several processes may append to: every line is one write in append mode.

    Linux holds the inode's lock for the whole of an append, so lines of several ranks never mix on a local disk. Lines
    that a full disk doesn't take wait in memory (`RetryingFile`).
    """

    def __init__(self, path: Path) -> None:
        """Opens the file for appending, and ends a line that a killed process left unfinished."""
        self.path = path
        self._file = _opened(path)

    def append(self, values: dict[str, Any]) -> float | None:
        """Appends one line; numbers that aren't finite become null, since JSON has none.

        Returns:
            For how many seconds the disk took nothing, when that is over now; else None.

        Raises:
            RankError: when the file can never be written.
        """
        try:
            text = _ENCODE(values)
        except ValueError:
            text = _ENCODE(_finite(values))
        try:
            return self._file.write(text.encode() + b"\n")
        except OSError as error:
            raise RankError(f"{self.path} can't be written: {error.strerror}; free space or move the run") from error

    @property
    def dropped(self) -> int:
        """Lines that neither disk nor memory took."""
        return self._file.dropped

    def close(self) -> None:
        """Closes the file, and says on standard error what couldn't be written; a second call does nothing."""
        lost = self._file.close()
        if lost:
            why = f"{self._file.error}; free space before the next run"
            sys.stderr.write(f"{self.path}: the last {lost} lines couldn't be written: {why}\n")


def _opened(path: Path) -> RetryingFile:
    try:
        return RetryingFile(path, shared=True)
    except OSError as error:
        raise RankError(f"{path} can't be written: {error.strerror}; free space or move the run") from error


class EventTail:
    """What a supervisor has appended to ``events.jsonl`` since the last look: its lines bear rank -1."""

    def __init__(self, path: Path) -> None:
        """Starts at the present end of the file."""
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def read(self) -> list[Event]:
        """Returns the supervisor's new events; costs one system call where nothing was written."""
        try:
            if os.stat(self._path).st_size <= self._at:
                return []
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                values = parse_json(line)
            except ValueError:
                continue
            if values.get("rank") == SUPERVISOR:
                data = {key: value for key, value in values.items() if key not in _EVENT_FIELDS}
                found.append(Event(kind=str(values.get("kind")), rank=SUPERVISOR, data=data))
        return found


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
            # The same values as record.to_json(), without its deep copy, which costs more than all the rest.
            self._written(self._metrics, {name: getattr(record, name) for name in _STEP_FIELDS})

    def event(self, event: Event) -> None:
        """Appends a line to events.jsonl."""
        self._written(self._events, event.to_json())

    def _written(self, file: LineFile, values: dict[str, Any]) -> None:
        """Appends a line, and an event when the disk takes lines again."""
        outage_s = file.append(values)
        if outage_s is not None:
            told = {"path": file.path.name, "seconds": outage_s, "lost": file.dropped}
            self._events.append(Event(kind="disk_writable", rank=SUPERVISOR, data=told).to_json())

    def close(self) -> None:
        """Closes both files."""
        if self._metrics is not None:
            self._metrics.close()
        self._events.close()


def truncate_metrics(path: Path, step: int) -> int:
    """Drops the lines of metrics.jsonl after a step, and one cut short by a kill, before a run resumes there.

    Steps ascend, so only the lines that go are looked into. What stays is the file's beginning, so that it is cut in
    place, which needs no room on a full disk. Call it before the file is opened for appending.

    Args:
        path: the metrics file; one that isn't there is left so.
        step: the last step to keep.

    Returns:
        Number of lines dropped.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = len(lines)
    while kept and not (lines[kept - 1].endswith(b"\n") and _step_of(lines[kept - 1]) <= step):
        kept -= 1
    if kept == len(lines):
        return 0
    os.truncate(path, sum(map(len, lines[:kept])))
    return len(lines) - kept


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; lines that a kill cut short are passed over, a missing file is empty."""
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


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _finite(_plain(value))
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
