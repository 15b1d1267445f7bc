"""The live page's contents: sections of a run that are rendered again when its files have grown."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from meshwright.json_types import JsonObject
from meshwright.monitor.charts import envelope
from meshwright.monitor.page import Section, note, page, section_html, section_id
from meshwright.monitor.progress import read_run_progress, waiting_sentences
from meshwright.monitor.prometheus import format_metrics
from meshwright.monitor.report import LAST_STEP, WAITS, newest_head, run_sections
from meshwright.monitor.rundir import RunFiles, RunReader, column
from meshwright.monitor.timeline import TimelineReader
from meshwright.monitor.timeline_sections import OFF
from meshwright.monitor.wait_history import WaitHistory

MOST_STEPS = 24_000
"""Steps of a run that are kept in memory, some 5 KB each; of a longer run older ones are thinned."""
LEAST_PAUSE_S = 2.0
"""Least time between two renderings, however little they cost."""
CPU_SHARE = 0.004
"""Share of the machine's cores that renderings may take while somebody looks; answers take some more."""
WINDOW = 500
"""Newest steps of which times, memory and traffic are."""
_FIRST_RENDERINGS = 2
"""Renderings that follow each other without a pause: of all but timelines, which a reader sees first, then of all."""
_NOW = "Now"
_DRAWN = (LAST_STEP, WAITS)
_POINTS = 1000
"""Points of a curve in `LivePage.steps`: the lowest and highest of each of half as many spans."""
_CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "mfu", "accuracy")


@dataclass(slots=True)
class _Rendered:
    """A section's markup, and the version at which it last changed."""

    html: str
    version: int


class LivePage:
    """Renders a run directory, at most so often that it takes `CPU_SHARE` of the machine.

    Several threads may use it.

    Args:
        run_dir: the run directory.
        bound: relative difference from plan to measurement above which a row is marked.
        buttons: action and label of each button.
    """

    def __init__(self, run_dir: Path, bound: float, buttons: Sequence[tuple[str, str]] = ()) -> None:
        self._run_dir, self._bound, self._buttons = run_dir, bound, tuple(buttons)
        self._reader = RunReader(run_dir, MOST_STEPS)
        self._timelines, self._history = TimelineReader(run_dir), WaitHistory()
        self._run: RunFiles | None = None
        self._sections: list[Section] = []
        self._rendered: dict[str, _Rendered] = {}
        # By the clock, so that a page of an earlier server of this run is brought up to date.
        self._version = time.time_ns() // 1_000_000
        self._renderings = 0
        self._next_at = -math.inf
        self._pause_s = LEAST_PAUSE_S
        self._lock = threading.Lock()

    def document(self) -> str:
        """Returns the page with its newest figures alone, however long the run: its script asks for the sections."""
        sections = [("", newest_head(self._run_dir))]
        return page(f"{self._run_dir.resolve().name} · meshwright", sections, self._buttons)

    def sections_since(self, version: int) -> JsonObject:
        """Returns the sections that changed after a version, the present version, and when to ask again.

        Args:
            version: of the last answer; 0 for all sections as they were rendered last, after which a reader asks at
                once for what has changed since.
        """
        with self._lock:
            run = self._run if self._run is not None and version == 0 else self._refresh()
            steps = f"step {run.steps[-1]['step']}" if run.steps else "no step yet"
            return {
                "version": self._version,
                "pause_ms": round(self._pause_s * 1e3) if version else 0,
                "state": f"{run.state}, {steps}",
                "sections": {key: entry.html for key, entry in self._rendered.items() if entry.version > version},
            }

    def steps_since(self, step: int) -> JsonObject:
        """Returns curves of the steps after one, each thinned to its extremes where there are many.

        Args:
            step: steps up to this one are left out.

        Returns:
            ``{"last": step, "curves": {name: {"step": [...], "value": [...]}}}``.
        """
        with self._lock:
            run = self._reader.read()
        later = [line for line in run.steps if line["step"] > step]
        curves = {}
        for name in _CURVES:
            x, y = envelope(column(later, "step"), column(later, name), _POINTS // 2)
            points = [(int(at), value) for at, value in zip(x, y) if math.isfinite(value)]
            curves[name] = {"step": [at for at, _ in points], "value": [value for _, value in points]}
        return {"last": run.steps[-1]["step"] if run.steps else 0, "curves": curves}

    def metrics(self) -> str:
        """Returns the newest step and the counted events in Prometheus' text format."""
        # Read, not rendered: a scraper looks for ever.
        with self._lock:
            return format_metrics(self._reader.read())

    def _refresh(self) -> RunFiles:
        """Renders what changed, unless it was rendered a moment ago."""
        if self._run is not None and time.monotonic() < self._next_at:
            return self._run
        started_s = time.thread_time()
        run = self._reader.read()
        self._renderings += 1
        grown = self._renderings >= _FIRST_RENDERINGS and self._history.update(self._timelines)
        if self._renderings <= _FIRST_RENDERINGS:
            # What was there before is read once: it says nothing of what the next rendering costs.
            started_s = time.thread_time()
        reuse = {} if grown else {heading: list(elements) for heading, elements in self._sections if heading in _DRAWN}
        if not self._history.shares:
            reuse = {LAST_STEP: [note(OFF)] if self._renderings >= _FIRST_RENDERINGS else [], WAITS: []}
        sections = run_sections(run, self._history, self._bound, WINDOW, reuse)
        sections.insert(1, (_NOW, self._now()))
        self._run, self._sections = run, sections
        changed = {}
        for heading, elements in sections:
            key, html = section_id(heading), section_html(heading, elements)
            if key not in self._rendered or self._rendered[key].html != html:
                changed[key] = html
        if changed:
            self._version = max(self._version + 1, time.time_ns() // 1_000_000)
            self._rendered |= {key: _Rendered(html, self._version) for key, html in changed.items()}
        if self._renderings >= _FIRST_RENDERINGS:
            spent_s = time.thread_time() - started_s
            self._pause_s = max(LEAST_PAUSE_S, spent_s / (CPU_SHARE * (os.cpu_count() or 1)))
            self._next_at = time.monotonic() + self._pause_s
        return run

    def _now(self) -> list[Markup]:
        """Renders what ranks wait for at the moment, as far as this machine sees them."""
        try:
            sentences = waiting_sentences(read_run_progress(self._run_dir))
        except (OSError, ValueError):
            return []
        return [note(sentence) for sentence in sentences]
