"""Fits how sure predictions are to rows to which no constant was fitted, and reports how far that holds.

    python -m benchmarks.fit_uncertainty --errors benchmarks/truth/*.csv    # 3 minutes
    python -m benchmarks.fit_uncertainty

The first command fits constants to other frameworks, devices or models (`published/held_out.py`) and writes each row's
error to ``benchmarks/held_out.csv``. Both take the scales of the errors' parts from that file, and write
``meshwright/planner/uncertainty.toml`` and the table in ``docs/predictions.md``. Frameworks count alike, however many
rows they published. Priors, form and the constants below were chosen with these rows in sight
(`published/held_out.py`), so the reported coverage is a bit optimistic.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fit_device import read_rows
from benchmarks.published.__main__ import read_cases
from benchmarks.published.held_out import HeldOut, compute, read, write
from meshwright.cluster.cluster import Cluster
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.uncertainty import FILE, INTERVAL, Evidence, MemorySpread, Shape, TimeSpread

ERRORS = Path(__file__).with_name("held_out.csv")
PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"
MARKS = ("<!-- fit_uncertainty -->", "<!-- end of fit_uncertainty -->")
WIDE_FACTOR = 3.0
"""Of the wider normal in `uncertainty.Shape`; its share is fitted."""
MOST_PAIRS = 400
"""Pairs of layouts of a job that count; of more they are drawn."""
FULL_ROOM = math.log(4.0)
"""Room under which the error of a row's bytes counts: what fills less than a quarter of its device fits anyhow."""
LEAST_ROOM = -0.15
"""Room under which no plan is: of rows that a device is predicted to lack a seventh of, some ran, which says nothing of
how often others that are predicted to fit don't."""
ENOUGH_FAILED = 20
"""Rows of a framework that ran out of memory from which these give its middle."""
OWN_ROWS = Path(__file__).with_name("h100.jsonl")
"""Our own runs on a GPU, a line each."""
OWN_CALLS, OWN_LEFT_OUT = (10, 11, 12), ("offload", "gemma3 ")
"""Of these the calls of today's runtime, and words in cases that it runs in another way since."""
JOB_PARTS = 5
"""Parts of the jobs whose chances to fit are judged by scales that were fitted to the others."""
SEEN = {
    "model": Evidence(framework=True, device=True),
    "framework": Evidence(framework=False, device=True),
    "device": Evidence(framework=False, device=False),
}
"""What each population of `published/held_out.py` had seen."""


@dataclass(frozen=True)
class Weighted:
    """Errors with their weights, which add up to 1."""

    errors: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, errors: Sequence[float], groups: Sequence[object]) -> Weighted:
        """Weighs errors so that every group counts alike."""
        sizes = {group: groups.count(group) for group in set(groups)}
        weights = np.asarray([1.0 / sizes[group] for group in groups])
        return cls(np.asarray(errors), weights / weights.sum())

    def quantile(self, probability: float) -> float:
        """Returns the quantile of the absolute errors."""
        order = np.argsort(np.abs(self.errors))
        reached = np.cumsum(self.weights[order])
        return float(np.abs(self.errors[order][min(int(np.searchsorted(reached, probability)), len(order) - 1)]))

    def scale(self, shape: Shape) -> float:
        """Returns the scale with which the interval of a shape holds `INTERVAL` of the errors."""
        return self.quantile(INTERVAL) / shape.quantile((1 + INTERVAL) / 2)


def time_errors(rows: Iterable[HeldOut], population: str) -> Weighted:
    """Returns the errors of time of a population, every framework weighing alike."""
    chosen = [row for row in rows if row.population == population and row.time_error is not None]
    return Weighted.of([row.time_error or 0.0 for row in chosen], [row.framework for row in chosen])


def pair_errors(rows: Iterable[HeldOut], same_mesh: bool) -> Weighted:
    """Returns differences of errors over the square root of 2, of layouts of a job with the same mesh or another.

    Every framework weighs alike, and within it every job.
    """
    jobs: dict[tuple[str, str], list[HeldOut]] = {}
    for row in rows:
        if row.population == "framework" and row.time_error is not None:
            jobs.setdefault((row.framework, row.job), []).append(row)
    frameworks: dict[str, list[list[float]]] = {}
    for (framework, _), members in sorted(jobs.items()):
        pairs = [
            ((one.time_error or 0.0) - (other.time_error or 0.0)) / math.sqrt(2.0)
            for one, other in itertools.combinations(members, 2)
            if (one.mesh == other.mesh) is same_mesh
        ]
        if pairs:
            chosen = random.Random(0).sample(pairs, min(MOST_PAIRS, len(pairs)))
            frameworks.setdefault(framework, []).append(chosen)
    errors, weights = [], []
    for of_jobs in frameworks.values():
        for pairs in of_jobs:
            errors += pairs
            weights += [1.0 / len(frameworks) / len(of_jobs) / len(pairs)] * len(pairs)
    return Weighted(np.asarray(errors), np.asarray(weights))


def shape_of(errors: Weighted) -> Shape:
    """Returns the shape whose outer 5 % begin as far beyond its outer 20 % as those of the errors."""
    wanted = errors.quantile(0.95) / errors.quantile(INTERVAL)
    shapes = [Shape(wide_share=share, wide_factor=WIDE_FACTOR) for share in np.arange(0.0, 0.31, 0.01)]
    return min(shapes, key=lambda shape: abs(shape.quantile(0.975) / shape.quantile((1 + INTERVAL) / 2) - wanted))


def _left(whole: float, *parts: float) -> float:
    """Returns what independent parts leave of a whole scale."""
    return math.sqrt(max(0.0, whole**2 - sum(part**2 for part in parts)))


def fit_time(rows: Sequence[HeldOut]) -> TimeSpread:
    """Returns the scales of the parts of errors of time."""
    wholes = {population: time_errors(rows, population) for population in SEEN}
    shape = shape_of(wholes["framework"])
    model, framework, device = (wholes[population].scale(shape) for population in SEEN)
    layout = pair_errors(rows, same_mesh=True).scale(shape)
    other_mesh = pair_errors(rows, same_mesh=False).scale(shape)
    # Who has seen less can't know more: with few frameworks a scale may come out under the one before.
    framework = max(model, framework)
    return TimeSpread(
        model=model,
        framework=framework,
        device=max(framework, device),
        mesh=_left(other_mesh, layout),
        layout=layout,
        shape=shape,
    )


def _log_likelihood(rows: Sequence[HeldOut], scale: float, shape: Shape, missing: float) -> float:
    """Returns the mean logarithm of the chance of what happened to each row, that it fitted or that it didn't."""
    chances = np.asarray([shape.cdf(((row.room or 0.0) - missing) / scale) for row in rows])
    right = np.where([bool(row.fits) for row in rows], chances, 1.0 - chances)
    return float(np.log(np.maximum(right, 1e-6)).mean())


def _fit_fits(rows: Sequence[HeldOut]) -> tuple[float, Shape, float]:
    """Returns scale, shape and middle of the error under which what fitted and what didn't is likeliest."""
    rows = [row for row in rows if (row.room or 0.0) > LEAST_ROOM]
    shapes = [Shape(wide_share=share, wide_factor=WIDE_FACTOR) for share in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)]
    best = (0.1, shapes[0], 0.0)
    for _ in range(2):
        middles = [(*best[:2], middle) for middle in np.arange(-0.05, 0.2001, 0.01)]
        best = max(middles, key=lambda option: _log_likelihood(rows, *option))
        scales = [(scale, shape, best[2]) for scale in np.geomspace(0.02, 0.3, 16) for shape in shapes]
        best = max(scales, key=lambda option: _log_likelihood(rows, *option))
    return float(best[0]), best[1], float(best[2])


def fit_memory(rows: Sequence[HeldOut], own_runs: Weighted) -> MemorySpread:
    """Returns the scales of the error of memory, that of our own runs by their errors (`own_errors`).

    Of a known framework by what ran out of memory, which is what the chance is of. Frameworks differ by their middles:
    those of which enough ran out give theirs by that, with all that lies outside the allocator; others by what rows
    took that filled a part of their device.
    """
    job, shape, job_missing = _fit_fits([row for row in rows if row.room is not None and row.population == "model"])
    middles = []
    unseen = [row for row in rows if row.room is not None and row.population == "framework"]
    for name in sorted({row.framework for row in unseen}):
        own = [row for row in unseen if row.framework == name]
        if sum(not row.fits for row in own) >= ENOUGH_FAILED:
            middles.append(_fit_fits(own)[2])
            continue
        full = [row.memory_error for row in own if row.memory_error is not None and (row.room or 0.0) < FULL_ROOM]
        middles += [float(np.median(full))] if full else []
    counted = [row.memory_error or 0.0 for row in rows if row.framework == "SimuMax" and row.population == "model"]
    return MemorySpread(
        framework=float(np.std(middles, ddof=1)),
        missing=float(np.median(middles)),
        job=job,
        job_missing=job_missing,
        own=own_runs.scale(shape),
        counted=Weighted.of(counted, [""] * len(counted)).scale(shape),
        shape=shape,
    )


def own_errors() -> Weighted:
    """Returns the errors of all bytes that our own runs took of a GPU, every model weighing alike."""
    cluster = Cluster.parse("1xh100")
    rows = [row for call in OWN_CALLS for row in read_rows([OWN_ROWS], call)]
    rows = [item for item in rows if not any(word in item.row["case"] for word in OWN_LEFT_OUT)]
    errors = [math.log(item.row["device_bytes"] / item.price(cluster, MESHWRIGHT).price.peak) for item in rows]
    return Weighted.of(errors, [str(item.row["model"]) for item in rows])


def covered(rows: Sequence[HeldOut], spread: TimeSpread) -> float:
    """Returns the share of rows whose measured time lies in the interval of their population."""
    inside = [
        abs(row.time_error) <= math.log(spread.factor(SEEN[row.population]))
        for row in rows
        if row.time_error is not None
    ]
    return sum(inside) / len(inside) if inside else math.nan


def deciles(chances: Sequence[float], weights: np.ndarray) -> list[float]:
    """Returns the share of errors in each tenth of their predicted distribution; 10 % each is right."""
    counts, _ = np.histogram(np.clip(chances, 0.0, 1.0 - 1e-9), bins=10, range=(0.0, 1.0), weights=weights)
    return [float(count) for count in counts / weights.sum()]


def without(rows: Sequence[HeldOut], key: Callable[[HeldOut], str]) -> Iterable[tuple[str, list[HeldOut], TimeSpread]]:
    """Yields each group of rows with the spread that was fitted to the others."""
    for name in sorted({key(row) for row in rows}):
        yield name, [row for row in rows if key(row) == name], fit_time([row for row in rows if key(row) != name])


def _sizes(rows: Sequence[HeldOut], population: str, what: str) -> list[tuple[float, float]]:
    """Returns median and 90th percentile of abs(predicted / measured - 1) of each framework of a population."""
    frameworks: dict[str, list[float]] = {}
    for row in rows:
        error = row.time_error if what == "time" else row.memory_error
        if row.population == population and error is not None:
            frameworks.setdefault(row.framework, []).append(abs(math.expm1(-error)))
    return [(float(np.median(sizes)), float(np.percentile(sizes, 90))) for sizes in frameworks.values()]


def regrets(rows: Iterable[HeldOut], population: str) -> dict[str, list[float]]:
    """Returns, by framework, how much slower the first choice of each job was than the best measured.

    Rows of one layout count as their mean. Predictions within a thousandth of each other are ties, which the checksum
    of the layout breaks.
    """
    jobs: dict[tuple[str, str], dict[str, list[HeldOut]]] = {}
    for row in rows:
        if row.population == population and row.time_error is not None:
            jobs.setdefault((row.framework, row.job), {}).setdefault(row.layout, []).append(row)
    frameworks: dict[str, list[float]] = {}
    for (framework, _), layouts in sorted(jobs.items()):
        if len(layouts) > 1:
            measured_s = {name: float(np.mean([row.time_s or 0.0 for row in own])) for name, own in layouts.items()}
            predicted_log = {
                name: float(np.mean([math.log(row.time_s or 1.0) - (row.time_error or 0.0) for row in own]))
                for name, own in layouts.items()
            }
            first = min(layouts, key=lambda name: (round(predicted_log[name], 3), name))
            frameworks.setdefault(framework, []).append(measured_s[first] / min(measured_s.values()) - 1.0)
    return frameworks


def headline(rows: Sequence[HeldOut]) -> list[str]:
    """Returns the table of errors by what was unseen: means over frameworks of their medians and p90."""
    lines = ["| unseen | frameworks | time: median, p90 | frameworks | memory: median, p90 | frameworks | regret |"]
    lines.append("|---|---|---|---|---|---|---|")
    for population in SEEN:
        cells = []
        for what in ("time", "memory"):
            sizes = _sizes(rows, population, what)
            median, p90 = np.mean(sizes, axis=0)
            cells.append(f"{len(sizes)} | {100 * median:.1f} %, {100 * p90:.1f} %")
        lost = regrets(rows, population).values()
        median, p90 = np.mean([(np.median(own), np.percentile(own, 90)) for own in lost], axis=0)
        cells.append(f"{len(lost)} | {100 * median:.1f} %, {100 * p90:.1f} %")
        lines.append(f"| {population} | {' | '.join(cells)} |")
    return [*lines, ""]


def report(rows: Sequence[HeldOut], time: TimeSpread, memory: MemorySpread) -> list[str]:
    """Returns the lines of the tables: coverage of rows that neither the constants nor the spread were fitted to."""
    lines = headline(rows)
    lines += ["| left out | rows | within 80 % interval, framework unseen | framework and device unseen | half width |"]
    lines.append("|---|---|---|---|---|")
    chances: list[float] = []
    names: list[str] = []
    shares: list[float] = []
    for kind, key in (("framework", lambda row: row.framework), ("device", lambda row: row.generation)):
        for name, group, spread in without(rows, key):
            timed = [row for row in group if row.time_error is not None]
            first = [row for row in timed if row.population == "framework"]
            second = [row for row in timed if row.population == "device"]
            width = spread.factor(SEEN["framework"]) - 1
            cells = f"{covered(first, spread):.0%} | {covered(second, spread):.0%} | {width:.0%}"
            lines.append(f"| {kind}: {name} | {len(first)} | {cells} |")
            if kind == "framework":
                scale = spread.scale(SEEN["framework"])
                chances += [spread.shape.cdf((row.time_error or 0.0) / scale) for row in first]
                names += [name] * len(first)
                shares.append(covered(first, spread))
    alike = Weighted.of([0.0] * len(names), names).weights
    mean, enough = float(np.mean(shares)), sum(share >= INTERVAL for share in shares)
    lines += ["", f"Frameworks count alike: {mean:.0%} within; {enough} of {len(shares)} have at least {INTERVAL:.0%}."]
    tenths = " ".join(f"{share:.0%}" for share in deciles(chances, alike))
    lines += [f"Tenths of the predicted distribution, each 10 % if it were exact: {tenths}.", ""]
    return [*lines, *_memory_lines(rows, memory)]


def cross_fitted_chances(rows: Sequence[HeldOut]) -> list[float]:
    """Returns each row's chance to fit, by scales that are fitted to the jobs of the other parts of `JOB_PARTS`."""
    chances = {}
    parts = [int(row.job, 16) % JOB_PARTS for row in rows]
    for part in range(JOB_PARTS):
        scale, shape, missing = _fit_fits([row for row, own in zip(rows, parts) if own != part])
        for index, (row, own) in enumerate(zip(rows, parts)):
            if own == part:
                chances[index] = shape.cdf(((row.room or 0.0) - missing) / scale)
    return [chances[index] for index in range(len(rows))]


def _memory_lines(rows: Sequence[HeldOut], memory: MemorySpread) -> list[str]:
    populations = {name: [row for row in rows if row.room is not None and row.population == name] for name in SEEN}
    chances_by_population = {
        "model": np.asarray(cross_fitted_chances(populations["model"])),
        "framework": np.asarray(
            [memory.chance(row.room or 0.0, SEEN["framework"], counted=False) for row in populations["framework"]]
        ),
    }
    lines = [
        "| chance to fit | model unseen: rows, mean chance, fitted | framework unseen: rows, mean chance, fitted |"
    ]
    lines.append("|---|---|---|")
    edges = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
    off = sampled = 0.0
    for low, high in itertools.pairwise(edges):
        cells = []
        for population, chances in chances_by_population.items():
            inside = (chances >= low) & ((chances < high) | (high == 1.0))
            fits = np.asarray([bool(row.fits) for row in populations[population]])
            found = f"{chances[inside].mean():.1%}, {fits[inside].mean():.1%}" if inside.any() else ""
            cells.append(f"{inside.sum()}{', ' + found if found else ''}")
            if population == "model" and inside.any() and 0.1 <= low < 0.9:
                chance = chances[inside].mean()
                off += abs(chance - fits[inside].mean()) / 8.0
                sampled += math.sqrt(2.0 / math.pi * chance * (1.0 - chance) / inside.sum()) / 8.0
        lines.append(f"| {low:.0%} to {high:.0%} | {' | '.join(cells)} |")
    told = (
        f"The eight tenths in the middle are {100 * off:.1f} points off in the mean, model unseen; rows that are right"
    )
    return [*lines, "", f"{told} and as few would be {100 * sampled:.1f}."]


def write_file(path: Path, time: TimeSpread, memory: MemorySpread, devices: Iterable[str]) -> None:
    """Writes the package's data file."""

    def table(name: str, spread: TimeSpread | MemorySpread, keys: Sequence[str]) -> list[str]:
        values = {key: float(getattr(spread, key)) for key in keys}
        values |= {"wide_share": spread.shape.wide_share, "wide_factor": spread.shape.wide_factor}
        return [f"[{name}]", *(f"{key} = {value:.4f}" for key, value in values.items()), ""]

    lines = ["# Scales of ln(measured / predicted), written by benchmarks/fit_uncertainty.py; planner/uncertainty.py."]
    lines += [f"devices = [{', '.join(repr(name) for name in sorted(devices))}]".replace("'", '"'), ""]
    lines += table("time", time, ("model", "framework", "device", "mesh", "layout"))
    lines += table("memory", memory, ("framework", "missing", "job", "job_missing", "own", "counted"))
    path.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.fit_uncertainty", description=__doc__)
    parser.add_argument("--errors", nargs="+", type=Path, metavar="FILE", help="write the rows' errors first")
    chosen = parser.parse_args(arguments)
    if chosen.errors:
        cases = [case for path in chosen.errors for case in read_cases(path)[0]]
        write(ERRORS, compute(cases))
    rows = read(ERRORS)
    time, memory = fit_time(rows), fit_memory(rows, own_errors())
    write_file(FILE, time, memory, {row.device for row in rows})
    table = "\n".join(report(rows, time, memory))
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    if after:
        PAGE.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
