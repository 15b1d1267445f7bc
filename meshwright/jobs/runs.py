"""The jobs ``runs`` and ``runs compare``: what the run directories of a folder hold, and how some of them differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshwright.errors import ClusterError, ConfigError, PlanError
from meshwright.jobs.run_control import find_state
from meshwright.json_types import JsonObject
from meshwright.monitor.charts import COLOURS
from meshwright.monitor.comparison import compared_figures, comparison_page, differing_settings
from meshwright.monitor.energy import token_energy
from meshwright.monitor.health import read_health
from meshwright.monitor.rundir import RunFiles, RunReader, find_runs, is_run_directory, number, read_run
from meshwright.spec.layout import Layout

_NEWEST_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl that a row of the list is made of, some hundred steps."""
_RECENT_STEPS = 50
_READERS = 16
"""Runs that are read at once: whether one that another host trains lives takes seconds to see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run as a row of the list."""

    run: str
    """Its directory."""
    name: str
    """Its directory's name below the folder that was listed."""
    state: str
    """As in `RunStatus`; ``unknown`` where the scheduler can't be asked."""
    step: int
    """Steps done."""
    steps: int | None
    """Steps of the whole run; None where its settings don't say."""
    loss: float | None
    """Training loss of the last step, nats a token."""
    validation_loss: float | None
    """The last validation loss, nats a token."""
    layout: str
    """Layout of the ranks; empty when unknown."""
    devices: str
    """Number and kind of the ranks' devices, as ``8 cuda``; empty when unknown."""
    tokens_per_s: float | None
    """Target tokens a second, the median of the newest steps."""
    joules_per_token: float | None
    """Measured energy of a target token; None where no device or processor reports any."""
    planned_joules_per_token: float | None
    """Of the devices, as planned; None where no power is known."""
    started: float | None
    """First event, in seconds since the epoch."""
    changed: float | None
    """Last event, in seconds since the epoch."""

    def to_json(self) -> JsonObject:
        """Returns the fields as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """How runs differ."""

    runs: tuple[RunSummary, ...]
    """The runs, in the order in which they were named."""
    settings: dict[str, tuple[str, ...]]
    """Value of each setting that differs, by dotted key, for each run; empty where it isn't set."""
    figures: dict[str, tuple[str, ...]]
    """The runs' figures as text, by name."""
    page: str
    """Path of the page with their curves."""

    def to_json(self) -> JsonObject:
        """Returns the fields as plain values."""
        return dataclasses.asdict(self)


def list_runs(folder: Path) -> list[RunSummary]:
    """Returns the runs at and below a folder, the one that began last first; links aren't followed.

    Raises:
        ConfigError: when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder that runs are in, as meshwright runs runs/")
    with ThreadPoolExecutor(_READERS) as readers:
        rows = list(readers.map(lambda run_dir: summarise_run(run_dir, folder), find_runs(folder)))
    return sorted(rows, key=lambda row: row.started or 0.0, reverse=True)


def summarise_run(run_dir: Path, folder: Path | None = None) -> RunSummary:
    """Returns a run's row; what its files hold is data, and a field of another type is left out.

    Args:
        run_dir: its directory.
        folder: below which it is named.
    """
    files = RunReader(run_dir, newest_bytes=_NEWEST_BYTES).read()
    last = files.steps[-1] if files.steps else {}
    evaluated = [number(event.get("loss")) for event in files.of_kind("evaluated")]
    speeds = [number(step.get("tokens_per_s")) for step in files.steps[-_RECENT_STEPS:]]
    times = [number(event.get("time")) for event in files.events]
    energy = token_energy(read_health(run_dir), files.plan)
    return RunSummary(
        run=str(run_dir),
        name=str(run_dir.relative_to(folder)) if folder is not None and folder != run_dir else run_dir.resolve().name,
        state=_state(files),
        step=int(last.get("step", 0)),
        steps=files.last_step,
        loss=_last(number(last.get("loss"))),
        validation_loss=_last(*evaluated),
        layout=files.layout,
        devices=_devices(files),
        tokens_per_s=_last(median(finite)) if (finite := [speed for speed in speeds if math.isfinite(speed)]) else None,
        joules_per_token=_last(energy.measured),
        planned_joules_per_token=_last(energy.planned),
        started=_last(*times[:1]),
        changed=_last(*times),
    )


def compare_runs(run_dirs: Sequence[Path], page: Path) -> RunComparison:
    """Compares runs by settings, figures and curves, and writes a page.

    Args:
        run_dirs: their directories, two to `COLOURS`.
        page: of the file, which is replaced.

    Raises:
        ConfigError: for too few or too many, for a directory that holds no run, and when the page can't be written.
    """
    if not 2 <= len(run_dirs) <= COLOURS:
        raise ConfigError(f"runs compare takes 2 to {COLOURS} runs, a colour each, and {len(run_dirs)} are given")
    for run_dir in run_dirs:
        check_run(run_dir)
    names = short_names(run_dirs)
    files = [read_run(run_dir) for run_dir in run_dirs]
    try:
        page.write_text(comparison_page(names, files), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} can't be written: {error.strerror}; give another --html") from None
    return RunComparison(
        runs=tuple(map(summarise_run, run_dirs)),
        settings=differing_settings(files),
        figures=compared_figures(files),
        page=str(page),
    )


def check_run(run_dir: Path) -> None:
    """Refuses what isn't a run's directory.

    Raises:
        ConfigError: with the rule.
    """
    if not is_run_directory(run_dir):
        raise ConfigError(
            f"{run_dir} is not a run directory: it needs a config.toml and one of plan.json, metrics.jsonl and "
            "events.jsonl, none of them a link; give the directory that train reported"
        )


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Returns the directories' names, and where two are the same their paths."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def _state(files: RunFiles) -> str:
    try:
        return find_state(files)[0]
    except (ConfigError, ClusterError):
        return "unknown"


def _devices(files: RunFiles) -> str:
    """Returns number and kind of devices: as many as the layout has ranks, of the kind that the last rank named."""
    kinds = [str(event.get("device")).partition(":")[0] for event in files.of_kind("rank_started")[-1:]]
    try:
        count = str(Layout.parse(files.layout).world) if files.layout else ""
    except PlanError:
        count = ""
    return " ".join([count, *kinds]).strip()


def _last(*values: float) -> float | None:
    """Returns the last finite value; None without one."""
    return next((value for value in reversed(values) if math.isfinite(value)), None)
