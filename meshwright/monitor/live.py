"""The live panel on a terminal: progress, loss curve, speed, memory, parts of the step, and who waits for what."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshwright.events import Event, StepRecord
from meshwright.monitor.display import Course, RunHeader
from meshwright.monitor.progress import read_progress, waiting_sentences
from meshwright.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_REFRESH_S = 0.25
_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "red", "white")
# Dots of a braille cell, Source: Unicode 15, block 2800; [column][row from the top].
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


class LiveDisplay:
    """Redraws a panel from its own thread, so that it moves while the ranks wait."""

    def __init__(
        self,
        header: RunHeader,
        wait_s: float,
        console: Console | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Draws the panel and starts the thread that redraws it.

        Args:
            header: what the run is.
            wait_s: seconds that a rank waits before the panel says for what.
            console: where to draw; standard error by default.
            failed: told once when drawing fails; the panel then stays away and the run goes on.
        """
        from rich.console import Console
        from rich.live import Live

        self._course, self._wait_s, self._failed = Course(header), wait_s, failed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._started = time.monotonic()
        console = Console(stderr=True) if console is None else console
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._draw)
        self._live.start(refresh=True)
        self._thread = threading.Thread(target=self._redraw, name="meshwright-display", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Takes a step; it is drawn at the next redraw."""
        with self._lock:
            self._course.step(record)

    def event(self, event: Event) -> None:
        """Takes an event; samples and the like are printed above the panel."""
        with self._lock:
            text = self._course.event(event)
        if text is not None and "\n" in text:
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draws once more and gives the terminal back; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._live.stop()

    def _redraw(self) -> None:
        while not self._stop.wait(_REFRESH_S):
            try:
                self._live.refresh()
            # A terminal that went away or a panel that can't be drawn must not end a run.
            except Exception as error:
                self._stop.set()
                with contextlib.suppress(Exception):
                    self._live.stop()
                if self._failed is not None:
                    self._failed(error)
                return

    def _draw(self) -> RenderableType:
        with self._lock:
            return draw(self._course, self._waits(), time.monotonic() - self._started)

    def _waits(self) -> list[str]:
        header = self._course.header
        if header.progress is None:
            return []
        return waiting_sentences(read_progress(header.progress), self._wait_s, header.describe)


def draw(course: Course, waits: Sequence[str], elapsed_s: float) -> RenderableType:
    """Returns the panel.

    Args:
        course: the run so far.
        waits: sentences about ranks that wait.
        elapsed_s: seconds since the display began.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    rows: list[RenderableType] = []
    head = Table.grid(padding=(0, 2))
    for name, value in course.header.rows.items():
        head.add_row(Text(name, style="dim"), Text(value, overflow="ellipsis", no_wrap=True))
    if course.header.rows:
        rows += [head, Text("")]
    rows.append(_progress(course, elapsed_s))
    if course.last is not None:
        rows += [Text(""), _numbers(course, course.last), Text(""), _curve(course.losses), Text("")]
        rows += _parts(course.last)
    rows += [Text(note, style="dim", overflow="ellipsis", no_wrap=True) for note in course.notes]
    rows += [Text(sentence, style="bold yellow") for sentence in waits]
    return Panel(Group(*rows), title="meshwright", border_style="dim", expand=True)


def _progress(course: Course, elapsed_s: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, eta = (course.last.step if course.last else 0), course.eta_s()
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    times = format_seconds(elapsed_s) + (f", {format_seconds(eta)} to go" if eta else "")
    bar = ProgressBar(total=max(1, course.header.steps), completed=done, complete_style="cyan", finished_style="green")
    grid.add_row(Text(f"step {done}/{course.header.steps}", style="bold"), bar, Text(times))
    return grid


def _numbers(course: Course, last: StepRecord) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    pairs = [("loss", f"{last.loss:.4f}"), ("tok/s", format_count(last.tokens_per_s))]
    loss = course.evaluation.get("loss")
    if isinstance(loss, (int, float)):
        pairs.insert(1, ("val loss", f"{loss:.4f} @ {course.evaluation.get('step', '?')}"))
    if last.mfu is not None:
        pairs.append(("MFU", f"{last.mfu:.1%}"))
    pairs += [("grad norm", f"{last.grad_norm:.3g}"), ("lr", f"{last.lr:.2e}")]
    pairs += [("step", format_seconds(last.step_s)), ("tokens", format_count(last.tokens_total))]
    grid = Table.grid(padding=(0, 3))
    half = (len(pairs) + 1) // 2
    for some in (pairs[:half], pairs[half:]):
        grid.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in some))
    return grid


def _curve(losses: Sequence[float]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    points = condensed(losses, 120)
    lines = braille(points, 60, 5)
    finite = [point for point in points if abs(point) < float("inf")] or [0.0]
    grid = Table.grid(padding=(0, 1))
    for row, line in enumerate(lines):
        edge = {0: f"{max(finite):.3f}", len(lines) - 1: f"{min(finite):.3f}"}.get(row, "")
        grid.add_row(Text(edge or ("loss" if row == 2 else ""), style="dim", justify="right"), Text(line, style="cyan"))
    return grid


def _parts(last: StepRecord) -> list[RenderableType]:
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid, total = Table.grid(padding=(0, 2)), sum(last.parts.values())
    if total > 0:
        bar, keys = Text(), []
        for place, (name, seconds) in enumerate(last.parts.items()):
            colour = _COLOURS[place % len(_COLOURS)]
            bar.append("█" * round(60 * seconds / total), style=colour)
            keys.append(Text.assemble(("■ ", colour), f"{name} {seconds / total:.0%} "))
        grid.add_row(Text("time", style="dim"), Group(bar, Columns(keys)))
    if last.memory:
        sizes = [Text(f"{name} {format_bytes(size)} ") for name, size in last.memory.items()]
        grid.add_row(Text("memory", style="dim"), Columns(sizes))
    return [grid, Text("")]


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws values as a curve of braille dots, ``width`` x ``height`` characters; values that aren't finite leave gaps.

    Args:
        values: the curve, from left to right; several that share a column of dots are averaged.
        width: characters a line; each has two columns of dots.
        height: lines; each has four rows of dots.
    """
    points = condensed(values, 2 * width)
    finite = [point for point in points if abs(point) < float("inf")]
    cells = [[0x2800] * width for _ in range(height)]
    if finite:
        low, span = min(finite), (max(finite) - min(finite)) or 1.0
        for column, point in enumerate(points):
            if abs(point) < float("inf"):
                down = round((4 * height - 1) * (1 - (point - low) / span))
                cells[down // 4][column // 2] |= _DOTS[column % 2][down % 4]
    return ["".join(map(chr, line)) for line in cells]


def condensed(values: Sequence[float], most: int) -> list[float]:
    """Returns at most ``most`` values, each the mean of as many neighbours."""
    count = min(most, len(values))
    spans = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    return [sum(span) / len(span) for span in spans]
