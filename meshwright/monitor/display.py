"""What a run shows: one line every few steps; `monitor.live` redraws a panel instead. Only rank 0 shows anything."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from meshwright.events import Event, StepRecord
from meshwright.monitor.progress import RankStamp, read_progress, waiting_sentences
from meshwright.units import format_bytes, format_count, format_seconds

_KEPT = 4096
_RECENT = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What a display says about the run before its first step."""

    steps: int
    """Steps that the run will have done at its end."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """What to say, in order: model, layout, devices, data, run."""
    progress: Path | None = None
    """The progress file, to say what ranks wait for."""
    describe: Callable[[int], str] | None = None
    """Turns a rank into ``rank 1: replicate 1``, as `Layout.describe_rank` does."""


class Course:
    """What a display remembers of a run: losses, recent steps, the last evaluation, the last notes."""

    def __init__(self, header: RunHeader) -> None:
        """Starts with nothing but the header."""
        self.header = header
        self.last: StepRecord | None = None
        self.losses: list[float] = []
        self.evaluation: Mapping[str, object] = {}
        self.notes: deque[str] = deque(maxlen=4)
        self._stride, self._count, self._sum = 1, 0, 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def step(self, record: StepRecord) -> None:
        """Remembers a step; losses are averaged over ever longer spans, so that memory stays small."""
        self.last = record
        self._recent.append(record.step_s)
        self._sum += record.loss
        self._count += 1
        if self._count == self._stride:
            self.losses.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.losses) >= _KEPT:
            pairs = zip(self.losses[::2], self.losses[1::2])
            self.losses = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    def event(self, event: Event) -> str | None:
        """Remembers an event and returns the line that says it; None for what isn't worth a line."""
        if event.kind == "evaluated":
            self.evaluation = dict(event.data)
        text = event_line(event)
        if text is not None:
            self.notes.append(text.splitlines()[0])
        return text

    def eta_s(self) -> float | None:
        """Returns the seconds still to go at the pace of the recent steps; None before the first step."""
        if self.last is None:
            return None
        return (self.header.steps - self.last.step) * sum(self._recent) / len(self._recent)


def step_line(record: StepRecord, course: Course) -> str:
    """Returns the line for one step: ``step 100/2000  loss 2.4123  ...``."""
    parts = [f"step {record.step}/{course.header.steps}", f"loss {record.loss:.4f}"]
    if record.terms:
        parts[-1] += f" ({', '.join(f'{name} {value:.4f}' for name, value in record.terms.items())})"
    loss = course.evaluation.get("loss")
    if isinstance(loss, float):
        parts.append(f"val {loss:.4f}")
    parts += [f"grad {record.grad_norm:.3g}", f"lr {record.lr:.2e}", f"{format_count(record.tokens_per_s)} tok/s"]
    if record.mfu is not None:
        parts.append(f"mfu {record.mfu:.1%}")
    if record.memory.get("peak"):
        parts.append(f"mem {format_bytes(record.memory['peak'])}")
    if record.skipped:
        parts.append("skipped")
    eta = course.eta_s()
    if eta:
        parts.append(f"eta {format_seconds(eta)}")
    return "  ".join(parts)


def show_event(event: Event, style: str) -> None:
    """Writes an event's line, if it has one, for a process that has no display of its own.

    Args:
        event: what happened.
        style: of the run's display; ``none`` shows nothing.
    """
    line = event_line(event)
    if line is not None and style != "none":
        sys.stderr.write(line + "\n")


def event_line(event: Event) -> str | None:
    """Returns the line for an event, its numbers shortened; None for starts of single ranks and skipped steps."""
    if event.kind in ("rank_started", "step_skipped"):
        return None
    words = [event.kind.replace("_", " ")]
    if event.rank > 0:
        words.append(f"on rank {event.rank}")
    values = dict(event.data)
    if "step" in values:
        words.append(f"at step {values.pop('step')}")
    text = values.pop("text", None)
    shown = [f"{name} {_short(value)}" for name, value in values.items() if isinstance(value, (str, int, float))]
    line = " ".join(words) + (": " + ", ".join(shown) if shown else "")
    return line if text is None else f"{line}\n  | " + str(text).strip().replace("\n", "\n  | ")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class PlainDisplay:
    """Prints one line every few steps and one for each event, and says when ranks wait long."""

    def __init__(self, header: RunHeader, every: int, wait_s: float, stream: TextIO | None = None) -> None:
        """Prints the header and starts watching for ranks that wait.

        Args:
            header: what the run is.
            every: steps between two lines.
            wait_s: a wait is told after ten times as long.
            stream: where to print; standard error by default.
        """
        self._course, self._every, self._wait_s = Course(header), every, 10 * wait_s
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._told: set[tuple[int, int, str]] = set()
        self._stop = threading.Event()
        for name, value in header.rows.items():
            self._line(f"{name:<8} {value}")
        self._thread = threading.Thread(target=self._watch, name="meshwright-display", daemon=True)
        if header.progress is not None:
            self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Prints the step when its turn has come; the first and the last step always."""
        self._course.step(record)
        if record.step % self._every == 0 or record.step in (1, self._course.header.steps):
            self._line(step_line(record, self._course))

    def event(self, event: Event) -> None:
        """Prints the event."""
        text = self._course.event(event)
        if text is not None:
            self._line(text)

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _line(self, text: str) -> None:
        # One write a line: two writers of a pipe can't mix within it.
        with self._lock:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()

    def _watch(self) -> None:
        header = self._course.header
        assert header.progress is not None
        while not self._stop.wait(min(1.0, self._wait_s / 2)):
            try:
                ranks = read_progress(header.progress)
                for text in self._new_waits(ranks):
                    self._line(text)
            except (OSError, ValueError):
                return

    def _new_waits(self, ranks: list[RankStamp]) -> list[str]:
        """Returns sentences for waits that weren't told yet."""
        now = time.monotonic()
        late = {(one.rank, one.step, one.phase) for one in ranks if one.waits_for and one.age_s(now) >= self._wait_s}
        fresh = late - self._told
        self._told |= fresh
        return waiting_sentences(ranks, self._wait_s, self._course.header.describe, now) if fresh else []
