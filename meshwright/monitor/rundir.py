"""Reads a run directory's files: config, plan, step records and events."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.json_types import JsonObject
from meshwright.monitor.sinks import EVENTS, METRICS, read_lines
from meshwright.records import parse_json

_FINAL_STATES = {"run_finished": "finished", "interrupted": "interrupted", "failed": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The contents of a run directory; a part whose file is missing or damaged is empty."""

    path: Path
    """The run directory."""
    config: JsonObject
    """config.toml."""
    config_text: str
    """config.toml as text."""
    plan: JsonObject
    """plan.json."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl, the last of each step, in order of steps."""
    events: list[dict[str, Any]]
    """Lines of events.jsonl, in order of time."""

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of these kinds."""
        return [event for event in self.events if event.get("kind") in kinds]

    @property
    def state(self) -> str:
        """State of the run: running, finished, interrupted or failed, by the last event that determines it."""
        for event in reversed(self.events):
            kind = event.get("kind")
            if kind in _FINAL_STATES:
                return _FINAL_STATES[kind]
            if kind in ("run_started", "resumed"):
                return "running"
        return "running"

    @property
    def layout(self) -> str:
        """The layout's text form; empty when neither plan nor steps have one."""
        planned = self.plan.get("layout")
        if isinstance(planned, Mapping) and planned.get("text"):
            return str(planned["text"])
        return str(self.steps[-1].get("layout") or "") if self.steps else ""

    def final(self) -> dict[str, Any]:
        """Merges the fields of evaluations and of the end of the run; later ones replace earlier ones."""
        final_values: dict[str, Any] = {}
        for event in self.of_kind("evaluated", "run_finished"):
            final_values |= {key: value for key, value in event.items() if value is not None}
        return final_values


def read_run(run_dir: Path) -> RunFiles:
    """Reads a run directory; damaged or missing files leave their part empty."""
    text = _read_text(run_dir / "config.toml")
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        config = {}
    try:
        plan = parse_json(_read_text(run_dir / "plan.json") or "{}")
    except ValueError:
        plan = {}
    # A step retrained after a rewind has several lines: the last one counts.
    steps = {int(line["step"]): line for line in read_lines(run_dir / METRICS) if _is_step_number(line.get("step"))}
    events = [line for line in read_lines(run_dir / EVENTS) if isinstance(line.get("kind"), str)]
    events.sort(key=lambda event: number(event.get("time") or 0.0))
    return RunFiles(
        path=run_dir,
        config=config,
        config_text=text,
        plan=plan if isinstance(plan, dict) else {},
        steps=[steps[step] for step in sorted(steps)],
        events=events,
    )


def column(steps: Sequence[JsonObject], name: str) -> list[float]:
    """Returns one field of every step as floats; NaN where it is missing or null."""
    return [number(step.get(name)) for step in steps]


def number(value: object) -> float:
    """Converts a number to a float; NaN for any other value."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_step_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
