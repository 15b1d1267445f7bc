"""The live panel on a terminal: progress, loss curve, speed, memory, parts of the step, and waiting ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.events import Event, StepRecord
from meshwright.monitor.display import Course, RunHeader, join_text
from meshwright.monitor.progress import read_progress, waiting_sentences
from meshwright.units import format_bytes, format_count, format_seconds

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
            header: the run before its first step.
            wait_s: seconds of waiting after which the panel reports a rank.
            console: to draw on; standard error by default.
            failed: called once when drawing fails; the panel then stays closed and the run continues.
        """
        self._course, self._wait_s, self._failed = Course(header), wait_s, failed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._started = time.monotonic()
        console = Console(stderr=True) if console is None else console
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._draw)
        self._live.start(refresh=True)
        self._thread = threading.Thread(target=self._redraw_until_closed, name="meshwright-display", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Records a step; the next redraw shows it."""
        with self._lock:
            self._course.step(record)

    def event(self, event: Event) -> None:
        """Records an event; one of several lines, such as a sample, is printed above the panel."""
        with self._lock:
            text = self._course.event(event)
        # Events of one line appear among the panel's notes; longer ones are printed above it.
        if text is not None and "\n" in text:
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draws a last time and restores the terminal; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._live.stop()

    def _redraw_until_closed(self) -> None:
        """Redraws until the display is closed; an error of drawing ends the panel, never the run."""
        while not self._stop.wait(_REFRESH_S):
            try:
                self._live.refresh()
            # A closed terminal or a panel that can't be drawn must not end a run.
            except Exception as error:
                self._stop.set()
                with contextlib.suppress(Exception):
                    self._live.stop()
                if self._failed is not None:
                    self._failed(error)
                return

    def _draw(self) -> RenderableType:
        with self._lock:
            return draw(self._course, self._wait_sentences(), time.monotonic() - self._started)

    def _wait_sentences(self) -> list[str]:
        header = self._course.header
        if header.progress is None:
            return []
        return waiting_sentences(read_progress(header.progress), self._wait_s, header.describe)


def draw(course: Course, waits: Sequence[str], elapsed_s: float) -> RenderableType:
    """Renders the panel.

    Args:
        course: the run so far.
        waits: sentences about waiting ranks.
        elapsed_s: seconds since the display started.
    """
    rows: list[RenderableType] = []
    header_grid = Table.grid(padding=(0, 2))
    for name, value in course.header.rows.items():
        header_grid.add_row(Text(name, style="dim"), Text(value, overflow="ellipsis", no_wrap=True))
    if course.header.rows:
        rows += [header_grid, Text("")]
    rows.append(_progress(course, elapsed_s))
    if course.last_record is not None:
        rows += [Text(""), _metrics_grid(course, course.last_record), Text(""), _loss_curve(course.losses), Text("")]
        rows += _time_and_memory(course.last_record)
    if course.joined_record is not None:
        rows += [Text(join_text(course.joined_record), overflow="ellipsis", no_wrap=True), Text("")]
    rows += [Text(note, style="dim", overflow="ellipsis", no_wrap=True) for note in course.notes]
    rows += [Text(sentence, style="bold yellow") for sentence in waits]
    return Panel(Group(*rows), title="meshwright", border_style="dim", expand=True)


def _progress(course: Course, elapsed_s: float) -> RenderableType:
    """Renders step count, progress bar and times."""
    steps_done, eta = (course.last_record.step if course.last_record else 0), course.eta_s()
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    times = format_seconds(elapsed_s) + (f", {format_seconds(eta)} to go" if eta else "")
    progress_bar = ProgressBar(
        total=max(1, course.last_step), completed=steps_done, complete_style="cyan", finished_style="green"
    )
    grid.add_row(Text(f"step {steps_done}/{course.last_step}", style="bold"), progress_bar, Text(times))
    return grid


def _metrics_grid(course: Course, record: StepRecord) -> RenderableType:
    """Renders loss, throughput and other metrics of the last step, in two rows."""
    pairs = [("loss", f"{record.loss:.4f}"), ("tok/s", format_count(record.tokens_per_s))]
    loss = course.evaluation.get("loss")
    if isinstance(loss, (int, float)):
        pairs.insert(1, ("val loss", f"{loss:.4f} @ {course.evaluation.get('step', '?')}"))
    if record.mfu is not None:
        pairs.append(("MFU", f"{record.mfu:.1%}"))
    pairs += [("grad norm", f"{record.grad_norm:.3g}"), ("lr", f"{record.lr:.2e}")]
    pairs += [("step", format_seconds(record.step_s)), ("tokens", format_count(record.tokens_total))]
    grid = Table.grid(padding=(0, 3))
    half = (len(pairs) + 1) // 2
    for row_pairs in (pairs[:half], pairs[half:]):
        grid.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in row_pairs))
    return grid


def _loss_curve(losses: Sequence[float]) -> RenderableType:
    """Renders the loss curve with its highest and lowest value."""
    points = condensed(losses, 120)
    lines = braille(points, 60, 5)
    finite = [point for point in points if abs(point) < float("inf")] or [0.0]
    grid = Table.grid(padding=(0, 1))
    for row, line in enumerate(lines):
        edge_label = {0: f"{max(finite):.3f}", len(lines) - 1: f"{min(finite):.3f}"}.get(row, "")
        grid.add_row(
            Text(edge_label or ("loss" if row == 2 else ""), style="dim", justify="right"), Text(line, style="cyan")
        )
    return grid


def _time_and_memory(record: StepRecord) -> list[RenderableType]:
    """Renders the parts of the last step's time as a bar, and the memory by part."""
    grid, total = Table.grid(padding=(0, 2)), sum(record.parts.values())
    if total > 0:
        bar, legend_keys = Text(), []
        for index, (name, seconds) in enumerate(record.parts.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            bar.append("█" * round(60 * seconds / total), style=colour)
            legend_keys.append(Text.assemble(("■ ", colour), f"{name} {seconds / total:.0%} "))
        grid.add_row(Text("time", style="dim"), Group(bar, Columns(legend_keys)))
    if record.memory:
        sizes = [Text(f"{name} {format_bytes(size)} ") for name, size in record.memory.items()]
        grid.add_row(Text("memory", style="dim"), Columns(sizes))
    return [grid, Text("")]


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws a curve of braille dots, ``width`` x ``height`` characters; values that aren't finite leave gaps.

    Args:
        values: the curve, from left to right; values that share a column of dots are averaged.
        width: characters a line; each has two columns of dots.
        height: lines; each has four rows of dots.
    """
    points = condensed(values, 2 * width)
    finite = [point for point in points if abs(point) < float("inf")]
    cells = [[0x2800] * width for _ in range(height)]
    if finite:
        # A constant curve has no span; 1.0 draws it as a straight line.
        low, span = min(finite), (max(finite) - min(finite)) or 1.0
        for column, point in enumerate(points):
            if abs(point) < float("inf"):
                # Row 0 is at the top, so the largest value has row 0.
                dot_row = round((4 * height - 1) * (1 - (point - low) / span))
                # A cell holds 2 x 4 dots: set the bit of this dot in its cell.
                cells[dot_row // 4][column // 2] |= _DOTS[column % 2][dot_row % 4]
    return ["".join(map(chr, line)) for line in cells]


def condensed(values: Sequence[float], max_values: int) -> list[float]:
    """Averages neighbours, so that at most ``max_values`` values remain."""
    count = min(max_values, len(values))
    spans = [values[len(values) * index // count : len(values) * (index + 1) // count] for index in range(count)]
    return [sum(span) / len(span) for span in spans]
