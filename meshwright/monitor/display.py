"""The plain display of a run: one line every few steps; `monitor.live` is the panel. Only rank 0 has a display."""

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

_MAX_LOSSES = 4096
_RECENT = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """The run as a display shows it before the first step."""

    steps: int
    """Step at which the run ends, at the latest."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Names and values to show, in order: model, layout, devices, data, run."""
    progress: Path | None = None
    """The progress file, which shows what ranks wait for."""
    describe: Callable[[int], str] | None = None
    """Formats a rank as ``rank 1: replicate 1``, by `Layout.describe_rank`."""


class Course:
    """History of a run for a display: losses, recent step times, the last evaluation, the last notes."""

    def __init__(self, header: RunHeader) -> None:
        """Starts with the header alone."""
        self.header = header
        self.last_record: StepRecord | None = None
        self.losses: list[float] = []
        self.evaluation: Mapping[str, object] = {}
        self.joined_record: StepRecord | None = None
        """The last step after which islands joined."""
        self.notes: deque[str] = deque(maxlen=4)
        self._stride, self._count, self._sum = 1, 0, 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def step(self, record: StepRecord) -> None:
        """Records a step; losses are averaged over ever longer spans, so that memory stays bounded."""
        self.last_record = record
        if record.outer:
            self.joined_record = record
        self._recent.append(record.step_s)
        self._sum += record.loss
        self._count += 1
        if self._count == self._stride:
            self.losses.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.losses) >= _MAX_LOSSES:
            # Halve the resolution: each entry then stands for twice as many steps.
            pairs = zip(self.losses[::2], self.losses[1::2])
            self.losses = [(earlier + later) / 2 for earlier, later in pairs]
            self._stride *= 2

    def event(self, event: Event) -> str | None:
        """Records an event and returns its line; None for a kind that has none."""
        if event.kind == "evaluated":
            self.evaluation = dict(event.data)
        text = event_line(event)
        if text is not None:
            self.notes.append(text.splitlines()[0])
        return text

    @property
    def last_step(self) -> int:
        """Step at which the run ends, as it looks after the last one."""
        record = self.last_record
        return self.header.steps if record is None or record.last_step is None else record.last_step

    def eta_s(self) -> float | None:
        """Estimates the remaining seconds from the mean of recent steps; None before the first step."""
        if self.last_record is None:
            return None
        return (self.last_step - self.last_record.step) * sum(self._recent) / len(self._recent)


def step_line(record: StepRecord, course: Course) -> str:
    """Formats the line of one step: ``step 100/2000  loss 2.4123  ...``."""
    fields = [f"step {record.step}/{course.last_step}", f"loss {record.loss:.4f}"]
    if record.terms:
        fields[-1] += f" ({', '.join(f'{name} {value:.4f}' for name, value in record.terms.items())})"
    loss = course.evaluation.get("loss")
    if isinstance(loss, float):
        fields.append(f"val {loss:.4f}")
    fields += [f"grad {record.grad_norm:.3g}", f"lr {record.lr:.2e}", f"{format_count(record.tokens_per_s)} tok/s"]
    if course.joined_record is not None:
        fields.append(join_text(course.joined_record))
    if record.mfu is not None:
        fields.append(f"mfu {record.mfu:.1%}")
        if record.mfu_of_measured is not None and record.mfu_of_measured != record.mfu:
            fields[-1] += f" ({record.mfu_of_measured:.1%} of measured)"
    if record.memory.get("peak"):
        fields.append(f"mem {format_bytes(record.memory['peak'])}")
    if record.skipped:
        fields.append("skipped")
    eta = course.eta_s()
    if eta:
        fields.append(f"eta {format_seconds(eta)}")
    return "  ".join(fields)


def join_text(record: StepRecord) -> str:
    """Formats the last join of islands: ``islands 2.31 2.35, apart 0.12, sent 2.0 MiB for 4.0 MiB @ 30``."""
    join = record.outer
    losses = " ".join(f"{loss:.4g}" for loss in join["island_losses"])
    sent, raw = format_bytes(join["sent_bytes"]), format_bytes(join["raw_bytes"])
    return f"islands {losses}, apart {join['consensus_distance']:.3g}, sent {sent} for {raw} @ {record.step}"


def show_event(event: Event, style: str) -> None:
    """Writes an event's line, if it has one, for a process without a display.

    Args:
        event: the event.
        style: of the run's display; ``none`` shows nothing.
    """
    line = event_line(event)
    if line is not None and style != "none":
        sys.stderr.write(line + "\n")


def event_line(event: Event) -> str | None:
    """Formats the line of an event, with short numbers; None for starts of single ranks and skipped steps."""
    if event.kind in ("rank_started", "step_skipped"):
        return None
    phrases = [event.kind.replace("_", " ")]
    if event.rank > 0:
        phrases.append(f"on rank {event.rank}")
    values = dict(event.data)
    if "step" in values:
        phrases.append(f"at step {values.pop('step')}")
    text = values.pop("text", None)
    value_texts = [
        f"{name} {_format_value(value)}" for name, value in values.items() if isinstance(value, (str, int, float))
    ]
    line = " ".join(phrases) + (": " + ", ".join(value_texts) if value_texts else "")
    return line if text is None else f"{line}\n  | " + str(text).strip().replace("\n", "\n  | ")


def _format_value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class PlainDisplay:
    """Prints one line every few steps and one for each event, and reports ranks that wait long."""

    def __init__(self, header: RunHeader, every: int, wait_s: float, stream: TextIO | None = None) -> None:
        """Prints the header and starts to watch for waiting ranks.

        Args:
            header: the run before its first step.
            every: steps between two lines.
            wait_s: a tenth of the wait after which a rank is reported.
            stream: to print to; standard error by default.
        """
        self._course, self._every, self._wait_s = Course(header), every, 10 * wait_s
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._reported_waits: set[tuple[int, int, str]] = set()
        self._stop = threading.Event()
        for name, value in header.rows.items():
            self._print_line(f"{name:<8} {value}")
        self._thread = threading.Thread(target=self._watch_waits, name="meshwright-display", daemon=True)
        if header.progress is not None:
            self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Prints every k-th step, and always the first and the last."""
        self._course.step(record)
        if record.step % self._every == 0 or record.step in (1, self._course.last_step):
            self._print_line(step_line(record, self._course))

    def event(self, event: Event) -> None:
        """Prints the event."""
        text = self._course.event(event)
        if text is not None:
            self._print_line(text)

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _print_line(self, text: str) -> None:
        # One write a line: two writers of a pipe can't mix within it.
        with self._lock:
            # A terminal of another encoding must not end a run over an arrow or a mu.
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()

    def _watch_waits(self) -> None:
        """Reports long waits until the display is closed or the progress file is gone."""
        header = self._course.header
        assert header.progress is not None
        while not self._stop.wait(min(1.0, self._wait_s / 2)):
            try:
                ranks = read_progress(header.progress)
                for text in self._new_waits(ranks):
                    self._print_line(text)
            except (OSError, ValueError):
                return

    def _new_waits(self, ranks: list[RankStamp]) -> list[str]:
        """Returns sentences for waits that weren't reported yet."""
        now = time.monotonic()
        long_waits = {
            (stamp.rank, stamp.step, stamp.phase)
            for stamp in ranks
            if stamp.waits_for and stamp.age_s(now) >= self._wait_s
        }
        # Each wait once, by rank, step and phase: a hang would else print a line a second.
        new_waits = long_waits - self._reported_waits
        self._reported_waits |= new_waits
        return waiting_sentences(ranks, self._wait_s, self._course.header.describe, now) if new_waits else []
