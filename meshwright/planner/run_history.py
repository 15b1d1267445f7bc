"""What runs on a machine took against what was priced: a file of lines, and the factor that it teaches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import PlanError
from meshwright.records import parse_json
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout

NAME = "runs.jsonl"
"""Of the file, beside the calibrations."""
LAST = 40
"""Newest runs of a machine that count."""
NEWEST = 3
"""Newest runs with the same axes that count for these."""
LEAST = 3
"""Runs from which a factor is believed: of a machine, and of some axes on it. One is enough that was timed beside the
machine's pace."""
WILD = 8.0
"""A run this much slower or faster than priced was disturbed, and teaches nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """What runs on a machine taught."""

    factor: float = 1.0
    """Measured over priced seconds of a step, the median."""
    runs: int = 0
    """How many it rests on."""
    by_axes: Mapping[str, float] = field(default_factory=dict)
    """The same for runs whose layouts use some axes, as ``shard+tp``."""

    def of(self, layout: Layout) -> float:
        """Returns what a layout takes over its price: as runs with its axes took, else as the worst of them alone."""
        used = axes_of(layout)
        if used in self.by_axes:
            return self.by_axes[used]
        known = [self.by_axes[axis] for axis in used.split("+") if axis in self.by_axes]
        return max(known) if known else self.factor

    @property
    def note(self) -> str:
        """For people; empty where nothing was learned."""
        if not self.runs:
            return ""
        took = f"{self.runs} earlier runs here took {self.factor:.2f} times what was priced"
        return f"{took}; plans of runs are scaled by what those with the same axes took"


def record(path: Path, machine: str, row: Mapping[str, Any]) -> None:
    """Adds a run: ``layout``, ``model``, ``priced_s`` before any factor, ``measured_s``.

    ``paced`` says that it was corrected for the machine's speed at the moment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"machine": machine, **row}) + "\n")


def learn(path: Path, machine: str) -> RunHistory:
    """Returns what the last runs on a machine teach; lines that can't be read are passed over.

    So are runs that other figures price than the most: compiled, with state in host memory, in float64.
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
        plain = not layout.compile and layout.offload == "none" and layout.precision != "float64"
        if plain and row.get("machine") == machine and 1 / WILD < ratio < WILD:
            ratios.append((axes_of(layout), math.log(ratio), bool(row.get("paced"))))
    ratios = ratios[-LAST:]
    if not _believed([paced for *_, paced in ratios]):
        return RunHistory()
    grouped: dict[str, list[tuple[float, bool]]] = {}
    for used, log, paced in ratios:
        grouped.setdefault(used, []).append((log, paced))
    by_axes = {
        used: math.exp(median(log for log, _ in rows[-NEWEST:]))
        for used, rows in grouped.items()
        if _believed([paced for _, paced in rows])
    }
    return RunHistory(factor=math.exp(median(log for _, log, _ in ratios)), runs=len(ratios), by_axes=by_axes)


def _believed(paced: Sequence[bool]) -> bool:
    """Whether so many runs, paced or not, are enough."""
    return any(paced) or len(paced) >= LEAST


def axes_of(layout: Layout) -> str:
    """Returns the axes that a layout uses, as ``shard3+tp``: what the runtime does beside the operators goes by them.

    ZeRO 3 gathers for each layer, and counts as an axis of its own.
    """
    named = [name for name, degree in layout.degrees.items() if degree > 1]
    return "+".join(
        sorted(f"{name}3" if layout.zero == 3 and name in row_axes(Holds.SHARD) else name for name in named)
    )
