"""Measured against priced times of a machine's runs: a file of JSON lines, and corrections of prices from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from meshwright.errors import PlanError
from meshwright.json_types import JsonObject
from meshwright.planner.cost.prices import LAYER_TRAFFIC, TRAFFIC_WORK
from meshwright.records import parse_json
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import LOSSY_CHOICES, Layout

NAME = "runs.jsonl"
"""File name, beside the calibrations."""
MAX_RUNS = 40
"""Newest runs of a machine that count for its factor."""
MAX_RUNS_OF_AXES = 3
"""Newest runs with the same axes that count for the factor of these."""
MIN_RUNS = 3
"""Least runs for a factor of a machine, and of some axes on it; a single run is enough if corrected for the machine's
pace."""
LEAST_TRAFFIC = 0.02
"""Least share of a step priced as waits for traffic that a factor on them can follow from."""
TRAFFIC = (*LAYER_TRAFFIC, "send", "gather", "reduce")
"""Parts of a step's seconds for which ranks wait for traffic."""
_BUBBLE = "bubble"
_OUTSIDE_PASS = (_BUBBLE, TRAFFIC_WORK, "offload", "optimizer", "step", "stragglers")
OUTLIER_RATIO = 8.0
"""A run slower or faster than priced by this factor was disturbed, and is ignored."""
LIKE_SIZE = 10.0
"""Largest ratio of two jobs' floating-point operations a step at which runs of one say something of the other: a step
of tiny layers waits for launches and latencies, of which a large one's has nearly none. Source: on one H100, tiny runs
scaled a plan of 286 ms to 96 ms, and the step took 272 (benchmarks/README.md, "One GPU")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factors on the priced seconds of a step."""

    compute: float = 1.0
    """On all but traffic."""
    traffic: float = 1.0
    """On seconds for which ranks wait for traffic."""

    @property
    def inverse(self) -> Correction:
        """The correction that takes this one back."""
        return Correction(compute=1.0 / self.compute, traffic=1.0 / self.traffic)

    def on_pass(self, parts: Mapping[str, float]) -> float:
        """Returns the factor on a micro-batch's forward and backward, from the parts of a step's seconds."""
        compute_s = sum(seconds for name, seconds in parts.items() if name not in (*TRAFFIC, *_OUTSIDE_PASS))
        traffic_s = sum(parts.get(name, 0.0) for name in LAYER_TRAFFIC)
        total_s = compute_s + traffic_s
        return (self.compute * compute_s + self.traffic * traffic_s) / total_s if total_s else self.compute

    def of_parts(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Returns the corrected parts of a step's seconds; a pipeline's bubble follows its passes."""
        factors = dict.fromkeys(TRAFFIC, self.traffic) | {_BUBBLE: self.on_pass(parts)}
        return {name: seconds * factors.get(name, self.compute) for name, seconds in parts.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class AxesCorrections:
    """Corrections from runs that are alike but for their axes.

    Measured waits tell traffic from compute, so that a slow wire raises the price of layouts by what they send on it.
    A run without them corrects layouts that use its axes alone.
    """

    factor: float = 1.0
    """Median of measured over priced seconds of a step, of exact runs."""
    runs: int = 0
    """Number of exact runs."""
    by_axes: Mapping[str, Correction] = field(default_factory=dict)
    """Of runs whose layouts use the same axes, as ``shard+tp``."""
    other: Correction = Correction()
    """Of layouts none of whose axes ran: of all exact runs whose waits were measured."""

    def of(self, layout: Layout) -> Correction:
        """Returns a layout's correction: of its axes, else the largest factors of any of them alone, else `other`."""
        axes = axes_of(layout)
        if axes in self.by_axes:
            return self.by_axes[axes]
        corrections = [self.by_axes[axis] for axis in axes.split("+") if axis in self.by_axes]
        if not corrections:
            return self.other
        return Correction(
            compute=max(correction.compute for correction in corrections),
            traffic=max(correction.traffic for correction in corrections),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Corrections from a machine's earlier runs of like size and in the same precision as a job."""

    eager: AxesCorrections = AxesCorrections()
    """From runs whose layers weren't compiled."""
    compiled: AxesCorrections = AxesCorrections()
    """From runs whose layers were."""

    @property
    def runs(self) -> int:
        """Number of exact runs."""
        return self.eager.runs + self.compiled.runs

    def of(self, layout: Layout) -> Correction:
        """Returns a layout's correction, from runs whose layers were compiled as its own are.

        Before any such run the others' is taken: the device's pace and the wire are the same, and a choice between
        eager and compiled layers compares prices that are corrected alike.
        """
        return self._alike(layout).of(layout)

    def note(self, layout: Layout) -> str:
        """Returns how many runs a layout's price was scaled by, as a clause; empty without any."""
        alike = self._alike(layout)
        if not alike.runs:
            return ""
        count = "1 earlier run" if alike.runs == 1 else f"{alike.runs} earlier runs"
        kind = "compiled, " if alike is self.compiled else "eager, " if layout.compile else ""
        return (
            f"{count} here of like size ({kind}within {LIKE_SIZE:.0f} times the work of a step) took "
            f"{alike.factor:.2f} times what was priced; compute and traffic are scaled by what those with the same "
            "axes took"
        )

    def _alike(self, layout: Layout) -> AxesCorrections:
        alike, others = (self.compiled, self.eager) if layout.compile else (self.eager, self.compiled)
        return alike if alike.runs or axes_of(layout) in alike.by_axes else others


def record(path: Path, machine: str, row: JsonObject) -> None:
    """Appends a run: ``layout``, ``flops`` of a step, ``priced_s`` before any correction, ``measured_s``.

    ``paced`` in the row marks a time that was corrected for the machine's pace during the run; ``waits_s`` and
    ``priced_waits_s`` are seconds of the step for which rank 0 waited for traffic, where they were measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"machine": machine, **row}) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run's measured over its priced seconds, as logarithms."""

    axes: str
    is_lossy: bool
    paced: bool
    ratio: float
    """Of a step."""
    compute: float | None
    """Of a step without waits for traffic; None where these weren't measured."""
    traffic: float | None
    """Of these waits; None also where too few seconds of them were priced for a ratio."""


def learn(path: Path, machine: str, flops: float, precision: str) -> RunHistory:
    """Returns the corrections of a machine's newest runs of like size and in the same precision.

    Unreadable lines are ignored, and so are runs whose price rests on other figures: with state in host memory, in
    float64.

    Args:
        path: of the file.
        machine: its key.
        flops: floating-point operations of the job's step, on all ranks.
        precision: of the job's layouts.
    """
    runs: dict[bool, list[_Run]] = {False: [], True: []}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return RunHistory()
    for line in lines:
        try:
            row = parse_json(line)
            if row["machine"] != machine or not 1 / LIKE_SIZE <= float(row["flops"]) / flops <= LIKE_SIZE:
                continue
            layout = Layout.parse(str(row["layout"]))
            run = _read_run(row, layout)
        except (ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError, PlanError):
            continue
        if run is not None and layout.precision == precision:
            runs[layout.compile].append(run)
    return RunHistory(eager=_corrections(runs[False][-MAX_RUNS:]), compiled=_corrections(runs[True][-MAX_RUNS:]))


def _corrections(runs: Sequence[_Run]) -> AxesCorrections:
    """Returns the corrections from runs that are alike but for their axes."""
    if not _is_enough(runs):
        return AxesCorrections()
    runs_by_axes: dict[str, list[_Run]] = {}
    for run in runs:
        runs_by_axes.setdefault(run.axes, []).append(run)
    # What rounding costs beside the wire says nothing of layouts that don't round.
    exact = [run for run in runs if not run.is_lossy]
    compute = [run.compute for run in exact if run.compute is not None]
    traffic = [run.traffic for run in exact if run.traffic is not None]
    return AxesCorrections(
        factor=_typical([run.ratio for run in exact]),
        runs=len(exact),
        by_axes={
            axes: _correction(same_axes[-MAX_RUNS_OF_AXES:])
            for axes, same_axes in runs_by_axes.items()
            if _is_enough(same_axes)
        },
        other=Correction(compute=_typical(compute), traffic=_typical(traffic)),
    )


def _read_run(row: JsonObject, layout: Layout) -> _Run | None:
    """Returns the ratios of a layout's row; None where it says nothing of others.

    Raises:
        ValueError, KeyError, TypeError, ZeroDivisionError: for a row that `record` didn't write.
    """
    priced_s, measured_s = float(row["priced_s"]), float(row["measured_s"])
    if layout.offload != "none" or layout.precision == "float64":
        return None
    if not 1 / OUTLIER_RATIO < measured_s / priced_s < OUTLIER_RATIO:
        return None
    compute = traffic = None
    if "waits_s" in row:
        waits_s, priced_waits_s = float(row["waits_s"]), float(row["priced_waits_s"])
        compute = _log_ratio(measured_s - waits_s, priced_s - priced_waits_s)
        if priced_waits_s >= LEAST_TRAFFIC * priced_s:
            # A wire may be far slower than catalogued: only the step as a whole bounds it.
            traffic = _log_ratio(waits_s, priced_waits_s, most=math.inf)
    return _Run(
        axes=axes_of(layout), is_lossy=layout.is_lossy, paced=bool(row.get("paced")),
        ratio=math.log(measured_s / priced_s), compute=compute, traffic=traffic,
    )  # fmt: skip


def _log_ratio(measured_s: float, priced_s: float, most: float = OUTLIER_RATIO) -> float | None:
    """Returns the logarithm of measured over priced seconds; None where something else than the price is wrong."""
    is_plausible = priced_s > 0.0 and 1 / OUTLIER_RATIO < measured_s / priced_s < most
    return math.log(measured_s / priced_s) if is_plausible else None


def _correction(runs: Sequence[_Run]) -> Correction:
    """Returns the correction of layouts with the same axes as some runs."""
    compute = [run.compute for run in runs if run.compute is not None]
    traffic = [run.traffic for run in runs if run.traffic is not None]
    if compute and traffic:
        return Correction(compute=_typical(compute), traffic=_typical(traffic))
    # What the step took more can't be told apart.
    total = math.exp(median(run.ratio for run in runs))
    return Correction(compute=total, traffic=total)


def _typical(logs: Sequence[float]) -> float:
    """Returns the median factor; 1 without any."""
    return math.exp(median(logs)) if logs else 1.0


def _is_enough(runs: Sequence[_Run]) -> bool:
    """Whether these runs are enough for a factor: some of them, or one that was corrected for pace."""
    return any(run.paced for run in runs) or len(runs) >= MIN_RUNS


def axes_of(layout: Layout) -> str:
    """Returns the axes that a layout uses in a step, as ``shard3+tp``: the runtime's overhead depends on them.

    ZeRO-3 counts as an axis of its own, because it gathers for each layer, and so does each way to round what is sent,
    whose work the ranks' own cores do. Islands don't count: steps between joins are those of one.
    """
    used_axes = [name for name, degree in layout.within_island().degrees.items() if degree > 1]
    if layout.zero == 3:
        used_axes = [f"{name}3" if name in row_axes(Holds.SHARD) else name for name in used_axes]
    choices = {name: str(getattr(layout, name)) for name in LOSSY_CHOICES}
    used_axes += [f"{name}={choice}" for name, choice in choices.items() if choice != "none"]
    return "+".join(sorted(used_axes))
