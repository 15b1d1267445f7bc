"""Holds the planner against layouts that were timed on one device, and fits its constants to them.

    python -m benchmarks.fit_device rows.jsonl... [--call 12] [--calibration FILE] [--fit] [--cluster 1xh100]
        [--leave-out WORD...]

Rows are those of ``tests/gpu/parts/layouts.py``: of each layout the measured seconds of a step, and the bytes that were
allocated at its peak. Each is priced by the catalogue's figures, and by a calibration's where one is given. ``--fit``
moves the constants of our own profile, and those of the device's kernels, from the values in use to where the rows lie,
each held by how sure it is; one row in two is held out of a second fit, which says what of it carries over. Nothing is
written: a constant is changed by hand, so that readers see what moved and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.fitting import Knobs
from benchmarks.published.folds import SPREADS
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.jobs.model_reading import make_measure
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.candidate import Candidate
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.measured_price import Measure, measure_activations, price_layout
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout

SPREAD = 0.5
"""Standard deviation of a constant's logarithm where none is known."""
PULL = 0.002
"""Mean loss that it costs to put one constant a standard deviation away."""
ROUNDS, STEP = 12, 0.03
"""Gauss-Newton steps, and the change of a logarithm by which slopes are measured."""
OUTLIER = 0.15
"""Logarithmic error beyond which a row counts in proportion, not by the square."""
RATES = "products/picojoules products/ramp rates/hopper/quantum rates/hopper/flash_forward"
KERNELS = ("products/", "rates/")
"""How names of the device's own constants begin."""
TIME = (
    *(*RATES.split(), "rates/hopper/flash_backward"),
    *("runtime__pass_width", "runtime__pass_ffn", "runtime__host_layer_s", "runtime__host_step_s"),
    *("runtime__fused_width", "runtime__fused_ffn", "runtime__fused_layer_s", "runtime__update_bytes"),
    *("runtime__accumulate_bytes", "runtime__cast_bytes", "runtime__pass_backward", "runtime__host_backward"),
)
"""Constants of a step's seconds by the catalogue."""
TIME_CALIBRATED = (
    *("runtime__host_layer_s", "runtime__host_step_s", "runtime__fused_layer_s", "runtime__host_backward"),
    "runtime__cast_bytes",
)
"""Of these what is left where operators were measured."""
MEMORY = ("saved__gate_extra", "saved__logits")
"""Constants of the bytes that are allocated."""


@dataclass(frozen=True)
class Timed:
    """A layout with what was measured of it."""

    row: dict[str, Any]

    @cached_property
    def layout(self) -> Layout:
        """Parsed from its text."""
        return Layout.parse(self.row["layout"])

    @property
    def sequence(self) -> int:
        """Tokens a row."""
        return int(self.row["seq_len"])

    def question(self, cluster: Cluster, engine: FrameworkProfile) -> Question:
        """Returns the question that the planner would answer of it."""
        built = model(json.dumps(self.row["model"]))
        base = Layout(precision=self.layout.precision, compile=self.layout.compile)
        job = PricedJob(
            shape=shape(json.dumps(self.row["model"])),
            sequence=self.sequence,
            rows=int(self.row["gbs"]),
            precision=base.compute_precision,
            products=base.product_precision,
        )
        question = Question(job=job, cluster=cluster, base=base, engine=engine)
        return measure_activations(question, measure(built, self.sequence, base.precision))

    def price(self, cluster: Cluster, engine: FrameworkProfile) -> Candidate:
        """Returns the layout as the planner prices it."""
        question = self.question(cluster, engine)
        built = model(json.dumps(self.row["model"]))
        return price_layout(question, self.layout, measure(built, self.sequence, question.base.precision))


@cache
def model(text: str) -> BuiltModel:
    """Returns a model on meta, by its config as JSON."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()
    }
    return build_meta(ModelConfig(**fields))


@cache
def shape(text: str) -> Any:
    """Returns its sizes."""
    return measure_shape(model(text))


_MEASURES: dict[tuple[int, int, str], Measure] = {}


def measure(built: BuiltModel, sequence: int, precision: str) -> Measure:
    """Returns what runs its modules on fake tensors, once for each length and precision."""
    key = (id(built), sequence, precision)
    if key not in _MEASURES:
        _MEASURES[key] = make_measure(built, sequence, precision)
    return _MEASURES[key]


def allocated(candidate: Candidate) -> float:
    """Returns the bytes of tensors at a layout's peak."""
    return candidate.price.allocated


READ: dict[str, tuple[str, Callable[[Candidate], float]]] = {
    "time": ("step_time_s", lambda candidate: candidate.price.step_s),
    "memory": ("allocated_bytes", allocated),
}
"""For time and memory the column of what was measured, and what was planned."""


class Profile:
    """Constants by name, of which those of kernels are set in their table and all others in a copy of our profile.

    Args:
        names: which.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._kernels = Knobs([name for name in names if name.startswith(KERNELS)])

    def read(self) -> np.ndarray:
        """Returns the values in use."""
        return np.asarray([*self._kernels.read(), *(self._option(name) for name in self._options)])

    @property
    def _options(self) -> list[str]:
        return [name for name in self.names if not name.startswith(KERNELS)]

    @staticmethod
    def _option(name: str) -> float:
        group, _, field = name.partition("__")
        return float(getattr(getattr(MESHWRIGHT, group), field))

    def write(self, values: np.ndarray) -> FrameworkProfile:
        """Sets the kernels' constants and returns the profile with the others."""
        count = len(self._kernels.names)
        self._kernels.write(list(values[:count]))
        return MESHWRIGHT.with_options(**dict(zip(self._options, map(float, values[count:]))))

    @property
    def spreads(self) -> np.ndarray:
        """How sure each is: the standard deviation of its logarithm."""
        fields = [name.replace("__", "/").rpartition("/")[2] for name in (*self._kernels.names, *self._options)]
        return np.asarray([SPREADS.get(field, SPREAD) for field in fields])

    @property
    def ordered(self) -> tuple[str, ...]:
        """Names in the order of the values."""
        return (*self._kernels.names, *self._options)


def errors(rows: Sequence[Timed], cluster: Cluster, engine: FrameworkProfile, what: str) -> np.ndarray:
    """Returns the logarithm of planned over measured of each row, (N,)."""
    column, planned = READ[what]
    return np.asarray([np.log(planned(item.price(cluster, engine)) / float(item.row[column])) for item in rows])


def fit(rows: Sequence[Timed], cluster: Cluster, names: Sequence[str], what: str) -> dict[str, tuple[float, float]]:
    """Returns (value in use, fitted value) by constant; what is in use is as before afterwards.

    Damped Gauss-Newton steps on logarithms: rows pull, the values in use hold.
    """
    profile = Profile(names)
    start, place = profile.read(), np.zeros(len(names))
    hold = np.sqrt(PULL * len(rows)) / profile.spreads

    def residuals(at: np.ndarray) -> np.ndarray:
        return errors(rows, cluster, profile.write(start * np.exp(at)), what)

    def loss(found: np.ndarray, at: np.ndarray) -> float:
        size = np.abs(found)
        bent = np.where(size < OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER))
        return float(bent.sum() + ((hold * at) ** 2).sum())

    found, damping = residuals(place), 1e-3
    for _ in range(ROUNDS):
        slopes = np.stack([(residuals(place + STEP * unit) - found) / STEP for unit in np.eye(len(names))], axis=1)
        weights = 1.0 / np.maximum(1.0, np.abs(found) / OUTLIER)
        matrix = slopes.T @ (weights[:, None] * slopes) + np.diag(hold**2)
        gradient = slopes.T @ (weights * found) + hold**2 * place
        while damping < 1e3:
            trial = place - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            tried = residuals(trial)
            if loss(tried, trial) < loss(found, place):
                break
            damping *= 4.0
        else:
            break
        place, found, damping = trial, tried, max(1e-4, damping / 4.0)
    profile.write(start)
    return {name: (old, old * float(np.exp(by))) for name, old, by in zip(profile.ordered, start, place)}


def summary(found: np.ndarray) -> str:
    """Returns the spread of errors in a line."""
    sizes = np.abs(np.expm1(found))
    return (
        f"median {np.median(sizes):.1%}, p90 {np.quantile(sizes, 0.9):.1%}, most {sizes.max():.1%}, "
        f"bias {np.expm1(np.median(found)):+.1%}, standard deviation {found.std():.1%}"
    )


def report(rows: Sequence[Timed], clusters: dict[str, Cluster], engine: FrameworkProfile = MESHWRIGHT) -> None:
    """Prints each row's measured and planned figures, and the errors' spread."""
    for item in rows:
        cells = []
        for name, cluster in clusters.items():
            candidate = item.price(cluster, engine)
            step_s, size = candidate.price.step_s, allocated(candidate)
            late = step_s / item.row["step_time_s"] - 1
            cell = f"{name} {1e3 * step_s:8.1f} ms {late:+7.1%}"
            if item.row.get("allocated_bytes"):
                whole = candidate.price.peak / item.row["device_bytes"] - 1
                cell += (
                    f", {size / 2**30:6.2f} GiB {size / item.row['allocated_bytes'] - 1:+6.1%} (device {whole:+.1%})"
                )
            parts = {key: round(1e3 * value, 1) for key, value in candidate.price.parts.items() if value > 5e-4}
            cells.append(f"{cell} {parts}")
        measured = f"{1e3 * item.row['step_time_s']:8.1f} ms {item.row.get('allocated_bytes', 0) / 2**30:6.2f} GiB"
        own = {key: round(1e3 * value, 1) for key, value in item.row.get("parts", {}).items()}
        print(f"{item.row['case']}: {measured} {own}\n    " + "\n    ".join(cells))
    for name, cluster in clusters.items():
        for what, (column, _) in READ.items():
            chosen = [item for item in rows if item.row.get(column)]
            if chosen:
                print(f"{name}, {what}, {len(chosen)} rows: {summary(errors(chosen, cluster, engine, what))}")


def fitted_errors(
    moved: dict[str, tuple[float, float]], rows: Sequence[Timed], cluster: Cluster, what: str
) -> np.ndarray:
    """Returns `errors` of rows by the fitted constants; those in use are as before afterwards."""
    profile = Profile(list(moved))
    start = profile.read()
    engine = profile.write(np.asarray([moved[key][1] for key in profile.ordered]))
    found = errors(rows, cluster, engine, what)
    profile.write(start)
    return found


def print_fit(rows: Sequence[Timed], cluster: Cluster, names: Sequence[str], what: str, title: str) -> None:
    """Prints the constants that rows ask for, and the errors of rows that a fit to the others never saw."""
    moved = fit(rows, cluster, names, what)
    after = fitted_errors(moved, rows, cluster, what)
    print(f"{title}, {what}, fitted to {len(rows)} rows: {summary(after)}")
    halves = [(rows[first::2], rows[1 - first :: 2]) for first in range(2)]
    pairs = [(fit(seen, cluster, names, what), unseen) for seen, unseen in halves]
    held_out = np.concatenate([fitted_errors(found, unseen, cluster, what) for found, unseen in pairs])
    before = np.concatenate([errors(unseen, cluster, MESHWRIGHT, what) for _, unseen in halves])
    print(f"{title}, {what}, held out by halves: {summary(held_out)}; as in use: {summary(before)}")
    for key, (old, new) in moved.items():
        by_half = " and ".join(f"{found[key][1]:.4g}" for found, _ in pairs)
        print(f"    {key:32s} in use {old:<10.4g} fitted {new:<10.4g} halves {by_half}")
    worst = sorted(zip(np.abs(after), rows), key=lambda pair: -pair[0])[:6]
    print("    furthest: " + "; ".join(f"{item.row['case']} {error:.1%}" for error, item in worst))


def read_rows(paths: Iterable[Path], call: int | None = None) -> list[Timed]:
    """Returns the rows that ran, of each case the last; of one call on a device, or of all."""
    by_case: dict[str, Timed] = {}
    for line in (line for path in paths for line in path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        if row.get("step_time_s") and call in (None, row.get("call")):
            by_case[row["case"]] = Timed(row)
    return list(by_case.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.fit_device", description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--call", type=int, nargs="+", help="only rows of these calls on the device")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="WORD", help="no cases with one of these in them")
    parser.add_argument("--cluster", default="1xh100")
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args(arguments)
    nominal = Cluster.parse(chosen.cluster)
    clusters = {"catalogue": nominal}
    if chosen.calibration:
        clusters["calibrated"] = nominal.calibrated(Calibration.load(chosen.calibration))
    rows = []
    found = [item for call in chosen.call or [None] for item in read_rows(chosen.rows, call)]
    for item in (item for item in found if not any(word in item.row["case"] for word in chosen.leave_out)):
        try:
            item.price(nominal, MESHWRIGHT)
        except MeshwrightError as error:
            print(f"{item.row['case']}: {error}", file=sys.stderr)
            continue
        rows.append(item)
    report(rows, clusters)
    for name, cluster in clusters.items() if chosen.fit else ():
        for what, names in {"time": TIME if name == "catalogue" else TIME_CALIBRATED, "memory": MEMORY}.items():
            fitted_rows = [item for item in rows if item.row.get(READ[what][0])]
            if len(fitted_rows) > 1:
                print_fit(fitted_rows, cluster, names, what, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
