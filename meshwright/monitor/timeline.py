"""Timelines of recorded steps: each rank's phases and waits, a line a step in ``timeline/rank-00003.jsonl``.

Times are those of the host: on a GPU, where kernels run after they were launched, they show when the rank's thread
launched and waited, not when the device computed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.monitor.retry import RetryingFile
from meshwright.records import parse_json

TIMELINE = "timeline"
"""Directory of the timelines in a run directory."""
MOST_SPANS = 4096
"""Spans of one step and rank beyond which the others are counted alone: a record stays below some 200 KiB."""
_US = 1e6


class Span(NamedTuple):
    """A stretch of time of one rank."""

    name: str
    """Phase, or the collective that the rank waited for: ``all_reduce over replicate``."""
    start_s: float
    """Seconds since the step's start."""
    seconds: float
    """Its duration."""
    number: int
    """Micro-batch of a phase; bytes that the rank sends in a collective."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """What one rank did in one step, up to the start of the next one."""

    rank: int
    """Global rank."""
    step: int
    """Step, counted from 1."""
    start: float
    """Seconds since the epoch at the step's start, by the rank's host."""
    phases: tuple[Span, ...]
    """Phases in order, which don't overlap."""
    waits: tuple[Span, ...]
    """Waits for collectives, within phases."""
    dropped: int = 0
    """Spans beyond `MOST_SPANS`, which weren't recorded."""

    @property
    def seconds(self) -> float:
        """Seconds from the step's start to the end of its last phase."""
        return max((span.start_s + span.seconds for span in self.phases), default=0.0)

    @property
    def waiting_share(self) -> float:
        """Share of the step in which the rank waited for others."""
        return sum(span.seconds for span in self.waits) / self.seconds if self.seconds > 0 else 0.0


class TimelineWriter:
    """Records every so many steps of one rank; in the others it costs a comparison a phase.

    Args:
        run_dir: the run directory, which exists.
        rank: global rank.
        every: steps between two recorded ones; the third step is recorded too, for the first drawing.
    """

    def __init__(self, run_dir: Path, rank: int, every: int) -> None:
        self._path = run_dir / TIMELINE / f"rank-{rank:05d}.jsonl"
        self._path.parent.mkdir(exist_ok=True)
        self._file = RetryingFile(self._path, shared=True)
        self._every = every
        self._step = 0
        """Step being recorded; 0 for none."""
        self._start = self._started = 0.0
        self._phases: list[tuple[str, int, float]] = []
        self._waits: list[list[Any]] = []
        self._dropped = 0

    def begin(self, step: int) -> None:
        """Ends the record of the step before, and starts that of ``step`` if it is due."""
        if self._step:
            self._write()
        if step % self._every and step != 3:
            return
        self._step, self._dropped = step, 0
        self._start, self._started = time.time(), time.perf_counter()

    def phase(self, name: str, micro: int) -> None:
        """Records that a phase starts."""
        if self._step:
            if len(self._phases) < MOST_SPANS:
                self._phases.append((name, micro, time.perf_counter()))
            else:
                self._dropped += 1

    def wait(self, operation: str, size_bytes: int) -> None:
        """Records that a wait for a collective starts; without ``operation`` that the last one ends."""
        if not self._step:
            return
        now = time.perf_counter()
        if not operation:
            if self._waits and self._waits[-1][2] < 0:
                self._waits[-1][2] = now
        elif len(self._waits) < MOST_SPANS:
            self._waits.append([operation, now, -1.0, size_bytes])
        else:
            self._dropped += 1

    def close(self) -> None:
        """Ends the record under way, and closes the file; a second call does nothing."""
        if self._step:
            self._write()
        self._file.close()

    def _write(self) -> None:
        ended = time.perf_counter()
        ends = [started for _, _, started in self._phases[1:]] + [ended]

        def microseconds(moment: float) -> int:
            return round((moment - self._started) * _US)

        line = {
            "step": self._step,
            "start": self._start,
            "phases": [
                [name, microseconds(started), round((end - started) * _US), micro]
                for (name, micro, started), end in zip(self._phases, ends)
            ],
            "waits": [
                # A wait without an end was cut short by the end of the step.
                [name, microseconds(began), round(((end if end >= 0 else ended) - began) * _US), size]
                for name, began, end, size in self._waits
            ],
        }
        if self._dropped:
            line["dropped"] = self._dropped
        self._step = 0
        self._phases.clear()
        self._waits.clear()
        # A disk that can never be written costs timelines, never the run.
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class TimelineReader:
    """Reads the timelines of a run directory, each line once.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / TIMELINE
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[StepTimeline]:
        """Yields what was recorded since the last call, rank after rank; lines that a kill cut short are left out."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank_text = path.stem.rpartition("-")[2]
            if not rank_text.isdecimal():
                continue
            for line in self._new_lines(path):
                timeline = parse_timeline(int(rank_text), line)
                if timeline is not None:
                    yield timeline

    def _new_lines(self, path: Path) -> Sequence[bytes]:
        offset = self._offsets.get(path, 0)
        try:
            if path.stat().st_size <= offset:
                return ()
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:
            return ()
        # A line without its end is still being written; the next call reads it.
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(complete)
        return complete.splitlines()


def parse_timeline(rank: int, line: bytes) -> StepTimeline | None:
    """Parses a line of a rank's timeline; None for any other line.

    Args:
        rank: global rank, from the file's name.
        line: JSON.
    """
    try:
        values = parse_json(line)
        return StepTimeline(
            rank=rank,
            step=int(values["step"]),
            start=float(values["start"]),
            phases=tuple(_parse_span(span) for span in values["phases"]),
            waits=tuple(_parse_span(span) for span in values["waits"]),
            dropped=int(values.get("dropped", 0)),
        )
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None


def _parse_span(values: Sequence[Any]) -> Span:
    name, start_us, duration_us, number = values
    return Span(str(name), float(start_us) / _US, float(duration_us) / _US, int(number))
