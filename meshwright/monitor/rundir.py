"""Reads a run directory's files: config, plan, step records and events."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.json_types import JsonObject
from meshwright.monitor.sinks import EVENTS, METRICS
from meshwright.records import parse_json

_FINAL_STATES = {"run_finished": "finished", "interrupted": "interrupted", "failed": "failed"}
METER_LOCK = "meter.lock"
"""Locked by the loop that writes into the run directory, until its process ends."""
_MOST_LEVELS = 4
"""Levels of folders below the one that is searched for runs."""
_TAIL_BYTES = 256
"""Bytes before the end of what was read, by which a file that was cut and grew again is recognised."""


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
    thinned_steps: int = 0
    """Steps that a reader of a long run dropped from ``steps``, extremes excepted."""
    thinned_s: float = 0.0
    """Seconds of these steps."""

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

    @property
    def last_step(self) -> int | None:
        """Step at which the run ends, as it looks after the last one; None where its settings don't say."""
        train = self.config.get("train")
        settings_steps = train.get("steps") if isinstance(train, dict) else None
        steps = self.steps[-1].get("last_step") if self.steps else None
        return next((value for value in (steps, settings_steps) if _is_step_number(value)), None)

    def final(self) -> dict[str, Any]:
        """Merges the fields of evaluations and of the end of the run; later ones replace earlier ones."""
        final_values: dict[str, Any] = {}
        for event in self.of_kind("evaluated", "run_finished"):
            final_values |= {key: value for key, value in event.items() if value is not None}
        return final_values

    def has_done(self, steps: int) -> bool:
        """Returns whether the run has been trained to its last of ``steps`` steps, and concluded."""
        final = self.final()
        return self.state == "finished" and float(final.get("scaled_steps", final.get("step", 0))) >= steps


def read_run(run_dir: Path) -> RunFiles:
    """Reads a run directory; damaged or missing files leave their part empty."""
    return RunReader(run_dir).read()


def meter_runs(run_dir: Path) -> bool:
    """Returns whether a custom loop measures itself into a run directory now; see `meshwright.monitor.loop_meter`."""
    try:
        descriptor = os.open(run_dir / METER_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def is_run_directory(path: Path) -> bool:
    """Returns whether a folder is a run's directory: a run's files, none of them a link, a pipe or a device."""
    files = {name: _file_kind(path / name) for name in ("config.toml", "plan.json", METRICS, EVENTS)}
    folders = {_file_kind(path / name) for name in ("checkpoints", "owner", "launch", "timeline")}
    has_files = files["config.toml"] and any(files[name] for name in files if name != "config.toml")
    return bool(has_files) and set(files.values()) <= {0, stat.S_IFREG} and folders <= {0, stat.S_IFDIR}


def find_runs(folder: Path) -> list[Path]:
    """Returns the run directories at and below a folder, by name; links and hidden folders aren't followed."""
    if is_run_directory(folder):
        return [folder]
    runs: list[Path] = []
    level = [folder]
    for _ in range(_MOST_LEVELS):
        below = [path for parent in level for path in _subfolders(parent)]
        runs += [path for path in below if is_run_directory(path)]
        level = [path for path in below if not is_run_directory(path)]
    return sorted(runs)


def _subfolders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
    return []


def _file_kind(path: Path) -> int:
    """Returns the kind of what a name stands for, links themselves included; 0 for nothing."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return 0


class RunReader:
    """Reads a run directory again and again, each line of its growing files once.

    Args:
        run_dir: the run directory.
        most_steps: steps up to which all lines are kept; of more, the older half is thinned to a quarter, in which
            skipped steps and the largest gradient norms stay. None keeps all.
        newest_bytes: bytes at the end of the steps' file that are read at first; None for the whole file.
        newest_event_bytes: the same of the events' file. Without a start or an end among them a run counts as running.
    """

    def __init__(
        self,
        run_dir: Path,
        most_steps: int | None = None,
        newest_bytes: int | None = None,
        newest_event_bytes: int | None = None,
    ) -> None:
        self._run_dir, self._most_steps = run_dir, most_steps
        self._metrics = LineReader(run_dir / METRICS, newest_bytes)
        self._events = LineReader(run_dir / EVENTS, newest_event_bytes)
        self._steps: dict[int, dict[str, Any]] = {}
        self._event_lines: list[dict[str, Any]] = []
        self._thinned_steps, self._thinned_s = 0, 0.0
        self._config: tuple[str, JsonObject] = ("", {})
        self._plan: JsonObject = {}
        self._stamps: tuple[int, ...] = ()

    def read(self) -> RunFiles:
        """Reads what is new, and returns all of the run."""
        lines, restarted = self._metrics.read()
        if restarted:
            # A run that was resumed at an earlier step truncates its file.
            self._steps.clear()
            self._thinned_steps, self._thinned_s = 0, 0.0
        # A step retrained after a rewind has several lines: the last one counts.
        self._steps |= {int(line["step"]): line for line in lines if _is_step_number(line.get("step"))}
        events, restarted = self._events.read()
        if restarted:
            self._event_lines.clear()
        self._event_lines += [line for line in events if isinstance(line.get("kind"), str)]
        if events:
            self._event_lines.sort(key=lambda event: number(event.get("time") or 0.0))
        if self._most_steps is not None and len(self._steps) > self._most_steps:
            self._thin()
        self._read_setup()
        return RunFiles(
            path=self._run_dir,
            config=self._config[1],
            config_text=self._config[0],
            plan=self._plan,
            steps=[self._steps[step] for step in sorted(self._steps)],
            events=list(self._event_lines),
            thinned_steps=self._thinned_steps,
            thinned_s=self._thinned_s,
        )

    def _read_setup(self) -> None:
        """Reads config.toml and plan.json, which change when a run is resumed or gets another layout."""
        stamps = tuple(_modified(self._run_dir / name) for name in ("config.toml", "plan.json"))
        if stamps == self._stamps:
            return
        self._stamps, text = stamps, _read_text(self._run_dir / "config.toml")
        try:
            config = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError):
            config = {}
        try:
            plan = parse_json(_read_text(self._run_dir / "plan.json") or "{}")
        except ValueError:
            plan = {}
        self._config, self._plan = (text, config), plan if isinstance(plan, dict) else {}

    def _thin(self) -> None:
        steps = sorted(self._steps)
        older = steps[: len(steps) // 2]
        for start in range(0, len(older), 4):
            group = older[start : start + 4]
            # Spikes are what a curve of a long run is looked at for.
            kept = max(group, key=lambda step: max(_size(self._steps[step], "grad_norm"), 0.0))
            for step in group:
                if step != kept and not self._steps[step].get("skipped"):
                    seconds = number(self._steps.pop(step).get("step_s"))
                    self._thinned_steps += 1
                    self._thinned_s += seconds if math.isfinite(seconds) else 0.0


class LineReader:
    """Reads the objects of a growing file of JSON lines, each once.

    Args:
        path: of the file, which may not exist yet.
        newest_bytes: bytes at its end to begin with, of which the first line may be torn; None for all.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self._path, self._offset, self._tail = path, 0, b""
        if newest_bytes is not None:
            with contextlib.suppress(OSError):
                self._offset = max(0, path.stat().st_size - newest_bytes)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the new objects, and whether the file was cut or replaced, so that they are all there is."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                # Cut and grown again, it has the old length and other bytes there.
                restarted = file.read(len(self._tail)) != self._tail
                if restarted:
                    file.seek(0)
                    self._offset, self._tail = 0, b""
                data = file.read()
        except OSError:
            return [], False
        # Without its end a line may still be being written, or a kill cut it short.
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._tail = (self._tail + complete)[-_TAIL_BYTES:]
        values = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                value = parse_json(line)
                if isinstance(value, dict):
                    values.append(value)
        return values, restarted


def column(steps: Sequence[JsonObject], name: str) -> list[float]:
    """Returns one field of every step as floats; NaN where it is missing or null."""
    # Most values are floats, and a long run's page asks for each a dozen times.
    return [value if type(value := step.get(name)) is float else number(value) for step in steps]


def number(value: object) -> float:
    """Converts a number to a float; NaN for any other value, and for an integer beyond a float's range."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(step: JsonObject, name: str) -> float:
    """Returns a field; infinity where it isn't finite, as a spike is written."""
    value = number(step.get(name))
    return value if math.isfinite(value) else math.inf


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _is_step_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
