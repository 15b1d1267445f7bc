"""Measured against priced times of a machine's runs: a file of JSON lines, and correction factors from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from meshwright.errors import PlanError
from meshwright.json_types import JsonObject
from meshwright.records import parse_json
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout

NAME = "runs.jsonl"
"""File name, beside the calibrations."""
MAX_RUNS = 40
"""Newest runs of a machine that count for its factor."""
MAX_RUNS_OF_AXES = 3
"""Newest runs with the same axes that count for the factor of these."""
MIN_RUNS = 3
"""Least runs for a factor of a machine, and of some axes on it; a single run is enough if corrected for the machine's
pace."""
OUTLIER_RATIO = 8.0
"""A run slower or faster than priced by this factor was disturbed, and is ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Correction factors from earlier runs on a machine."""

    factor: float = 1.0
    """Median of measured over priced seconds of a step."""
    runs: int = 0
    """Number of runs behind it."""
    by_axes: Mapping[str, float] = field(default_factory=dict)
    """The same for runs whose layouts use the same axes, as ``shard+tp``."""

    def of(self, layout: Layout) -> float:
        """Returns a layout's factor: of its axes, else the largest of any of them alone, else of all runs."""
        axes = axes_of(layout)
        if axes in self.by_axes:
            return self.by_axes[axes]
        factors = [self.by_axes[axis] for axis in axes.split("+") if axis in self.by_axes]
        return max(factors) if factors else self.factor

    @property
    def note(self) -> str:
        """A sentence for the user; empty without runs."""
        if not self.runs:
            return ""
        sentence = f"{self.runs} earlier runs here took {self.factor:.2f} times what was priced"
        return f"{sentence}; plans of runs are scaled by what those with the same axes took"


def record(path: Path, machine: str, row: JsonObject) -> None:
    """Appends a run: ``layout``, ``model``, ``priced_s`` before any factor, ``measured_s``.

    ``paced`` in the row marks a time that was corrected for the machine's pace during the run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"machine": machine, **row}) + "\n")


def learn(path: Path, machine: str) -> RunHistory:
    """Returns the factors of a machine's newest runs; unreadable lines are ignored.

    So are runs whose price rests on other figures: compiled, with state in host memory, in float64.
    """
    ratios: list[tuple[str, float, bool]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return RunHistory()
    for line in lines:
        try:
            row = parse_json(line)
            ratio = float(row["measured_s"]) / float(row["priced_s"])
            layout = Layout.parse(str(row["layout"]))
        except (ValueError, KeyError, TypeError, ZeroDivisionError, PlanError):
            continue
        is_comparable = not layout.compile and layout.offload == "none" and layout.precision != "float64"
        if is_comparable and row.get("machine") == machine and 1 / OUTLIER_RATIO < ratio < OUTLIER_RATIO:
            ratios.append((axes_of(layout), math.log(ratio), bool(row.get("paced"))))
    ratios = ratios[-MAX_RUNS:]
    if not _is_enough([paced for *_, paced in ratios]):
        return RunHistory()
    rows_by_axes: dict[str, list[tuple[float, bool]]] = {}
    for axes, log_ratio, paced in ratios:
        rows_by_axes.setdefault(axes, []).append((log_ratio, paced))
    by_axes = {
        axes: math.exp(median(log_ratio for log_ratio, _ in rows[-MAX_RUNS_OF_AXES:]))
        for axes, rows in rows_by_axes.items()
        if _is_enough([paced for _, paced in rows])
    }
    return RunHistory(
        factor=math.exp(median(log_ratio for _, log_ratio, _ in ratios)), runs=len(ratios), by_axes=by_axes
    )


def _is_enough(paced: Sequence[bool]) -> bool:
    """Whether these runs are enough for a factor; each entry says whether a run was corrected for pace."""
    return any(paced) or len(paced) >= MIN_RUNS


def axes_of(layout: Layout) -> str:
    """Returns the axes that a layout uses, as ``shard3+tp``: the runtime's overhead depends on them.

    ZeRO-3 counts as an axis of its own, because it gathers for each layer.
    """
    used_axes = [name for name, degree in layout.degrees.items() if degree > 1]
    return "+".join(
        sorted(f"{name}3" if layout.zero == 3 and name in row_axes(Holds.SHARD) else name for name in used_axes)
    )
