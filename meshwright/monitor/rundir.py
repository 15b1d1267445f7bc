"""What a run directory says about its run, read from its files alone."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.monitor.sinks import EVENTS, METRICS, read_lines
from meshwright.records import parse_json

_ENDS = {"run_finished": "finished", "interrupted": "interrupted", "failed": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The contents of a run directory; a part whose file is missing or damaged is empty."""

    path: Path
    """The run directory."""
    config: Mapping[str, Any]
    """config.toml."""
    config_text: str
    """config.toml as it stands in the file."""
    plan: Mapping[str, Any]
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
        """How the run stands: running, finished, interrupted or failed, by the last event that says so."""
        for event in reversed(self.events):
            kind = event.get("kind")
            if kind in _ENDS:
                return _ENDS[kind]
            if kind in ("run_started", "resumed"):
                return "running"
        return "running"

    @property
    def layout(self) -> str:
        """The layout's text form, empty when nothing says it."""
        planned = self.plan.get("layout")
        if isinstance(planned, Mapping) and planned.get("text"):
            return str(planned["text"])
        return str(self.steps[-1].get("layout") or "") if self.steps else ""

    def final(self) -> dict[str, Any]:
        """Returns the numbers of the evaluations and of the end of the run, later ones over earlier ones."""
        found: dict[str, Any] = {}
        for event in self.of_kind("evaluated", "run_finished"):
            found |= {key: value for key, value in event.items() if value is not None}
        return found


def read_run(run_dir: Path) -> RunFiles:
    """Reads a run directory; damaged or missing files leave their part empty."""
    text = _text(run_dir / "config.toml")
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        config = {}
    try:
        plan = parse_json(_text(run_dir / "plan.json") or "{}")
    except ValueError:
        plan = {}
    steps = {int(line["step"]): line for line in read_lines(run_dir / METRICS) if _whole(line.get("step"))}
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


def column(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Returns one value of every step as floats; what is missing or null is NaN."""
    return [number(step.get(name)) for step in steps]


def number(value: object) -> float:
    """Returns a number as a float, and NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
