"""Errors of rows to which no constant was fitted: what the spread of predictions is fitted to.

Three populations, by what was unseen. ``model``: constants are fitted to other models of the same framework and device.
``framework``: a framework's own constants stand at their priors, and those of its devices are fitted to the rows of
other frameworks, as in the divisions ``left out`` of `folds`. ``device``: both stand at their priors, and nothing is
fitted. Constants of memory belong to frameworks alone, so the last two have the same errors of memory.
The priors, their kinds and the level of a framework (`folds.PRIORS`, `folds.KINDS`, `fitting.LEVEL`) were chosen with
these errors in sight, so they are somewhat smaller than those of code that nobody has seen.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.published.fitting import known_engines, measured
from benchmarks.published.folds import (
    BEFORE_MEMORY,
    BIGSCIENCE,
    BRIDGE,
    COMPOSER,
    DEEPSPEED,
    FILES,
    FOLDS,
    HF,
    MEGATRON,
    MPT,
    NANOTRON,
    NANOTRON_MEMORY,
    NEMO,
    OLD,
    PLAIN,
    RATES,
    TITAN,
    VTRAIN,
    Fold,
    at_priors,
    drawn,
    fit_from_priors,
    left_out,
)
from benchmarks.published.predict import Predicted, predict, with_engines
from benchmarks.published.rows import Case
from benchmarks.published.stats import layout_of
from meshwright.planner.cost import kernels

ROUNDS, MOST_ROWS = 3, 40
"""Steps of a fit, and rows that it has: fewer than for the table of `docs/predictions.md`, as there are twenty fits."""
SAILOR = tuple(
    f"sailor/runtime/{name}"
    for name in ("matmul", "score_passes", "pass_width", "pass_ffn", "loss_passes:0", "host_layer_s", "host_step_s")
)
MEMORY = (
    *NANOTRON_MEMORY,
    *BEFORE_MEMORY,
    "megatron-te/saved/logits",
    "megatron-te/saved/fresh_gradient",
    "torchtitan-eager/saved/logits",
    "torchtitan/saved/logits",
    "torchtitan-2025/saved/logits",
    "sailor/allocator",
    *(f"{name}/context_bytes" for name in ("nanotron", "nanotron-before", "nanotron-afab")),
    "nanotron-afab/allocator",
    "megatron-deepspeed-bigscience/context_bytes",
    *(f"{name}/allocator_bytes" for name in ("sailor", "torchtitan-eager", "torchtitan", "torchtitan-2025")),
)
"""Constants of memory of all frameworks."""
LEFT_OUT = (
    *FILES,
    ("Megatron of 2020 to 2022", OLD, (VTRAIN, MPT), RATES["ampere"] + DEEPSPEED + COMPOSER[:3], MEGATRON),
    ("Sailor", ("sailor",), (HF, MPT), RATES["hopper"] + NANOTRON + COMPOSER[3:], SAILOR),
)
"""Frameworks left out: (name, judged on, fitted to, constants that are fitted, constants of the framework)."""
OTHER_MODELS = (
    "sweep, small model to large",
    "sweep, large model to small",
    "sweep, memory, small to large",
    "sweep, memory, large to small",
    "vtrain, every other model",
    "MPT, every other size",
    "MLPerf v3 to v4, rates with MPT",
    "bridge and SimuMax, 70B and Qwen to the others",
    "SimuMax, memory, 70B to the others",
)
"""Divisions of `folds` between models of a framework."""
FRAMEWORK_CONSTANTS = tuple(
    dict.fromkeys((*NANOTRON, *DEEPSPEED, *COMPOSER, *MEGATRON, *BIGSCIENCE, *NEMO, *BRIDGE, *PLAIN, *TITAN, *SAILOR))
)
"""Constants of time of all frameworks."""


TEXTS = ("population", "framework", "device", "generation", "products", "job", "mesh", "layout")
"""Columns of a row that aren't numbers."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A row that the constants haven't seen, and how far off its prediction was."""

    population: str
    """``model``, ``framework`` or ``device``: what no row was fitted of."""
    framework: str
    """The name under which its rows were left out."""
    device: str
    """Its name in the catalogue."""
    generation: str
    """Of the device, of `kernels.RATES`."""
    devices: int
    experts: bool
    """Whether the model is a mixture of experts."""
    products: str
    """Data type of the matrix products."""
    job: str
    """Checksum of what rows share that differ in layout alone."""
    mesh: str
    """The degrees of its axes."""
    layout: str
    """Checksum of its layout."""
    time_s: float | None
    """Measured seconds of the step; None where they aren't compared."""
    time_error: float | None
    """ln(measured / predicted) of the step's seconds; None where they aren't compared."""
    memory_error: float | None
    """ln(measured / predicted) of memory."""
    room: float | None
    """ln(memory of the device / predicted bytes of its fullest rank); None where it is unknown whether it fitted."""
    fits: bool | None
    """Whether it did."""

    @classmethod
    def read(cls, row: dict[str, str]) -> Self:
        """Returns a row of the file that `write` made."""

        def number(key: str) -> float | None:
            return float(row[key]) if row[key] else None

        return cls(
            **{key: row[key] for key in TEXTS},
            devices=int(row["devices"]),
            experts=row["experts"] == "1",
            time_s=number("time_s"),
            time_error=number("time_error"),
            memory_error=number("memory_error"),
            room=number("room"),
            fits=bool(int(row["fits"])) if row["fits"] else None,
        )


def compute(cases: Sequence[Case], word: str = "") -> Iterator[HeldOut]:
    """Yields the rows of all populations; takes two minutes, and leaves the constants as they were.

    Args:
        cases: of all files.
        word: only divisions whose name has it.
    """
    for name, judged, fitted, knobs, unseen in LEFT_OUT:
        if word in name:
            yield from _without_framework(cases, left_out(name, judged, fitted, knobs, unseen))
    for fold in FOLDS:
        if fold.name in OTHER_MODELS and word in fold.name:
            with at_priors((*fold.knobs, *fold.unseen)):
                yield from _fitted_and_judged(cases, fold, "model")


def _without_framework(cases: Sequence[Case], fold: Fold) -> Iterator[HeldOut]:
    """Yields a framework's rows with constants that were fitted to others, and with none fitted."""
    with at_priors((*fold.knobs, *fold.unseen, *MEMORY)):
        yield from _fitted_and_judged(cases, fold, "framework")
    rates = tuple(name for names in RATES.values() for name in names)
    with at_priors((*rates, *FRAMEWORK_CONSTANTS, *MEMORY)):
        test = with_engines([case for case in cases if fold.test(case)], known_engines())
        yield from (_held_out("device", item, "") for item in predict(test))


def _fitted_and_judged(cases: Sequence[Case], fold: Fold, population: str) -> Iterator[HeldOut]:
    train = [case for case in cases if fold.train(case) and measured(case, fold.what)]
    test = [case for case in cases if fold.test(case)]
    fit_from_priors(fold, drawn(train, MOST_ROWS), ROUNDS, leaps=False)
    # A division between models is fitted to one measure, and says nothing of the other.
    what = fold.what if population == "model" else ""
    yield from (_held_out(population, item, what) for item in predict(with_engines(test, known_engines())))


def framework_of(case: Case) -> str:
    """Returns the name under which a row's framework is left out."""
    return next(name for name, judged, *_ in LEFT_OUT if case.file.startswith(judged))


def _held_out(population: str, item: Predicted, what: str) -> HeldOut:
    """Returns a row with its errors, those of ``what`` alone unless that is empty."""
    case, timed, sized = item.case, what != "memory", what != "time"
    room_bytes = item.room_bytes or case.machine.device.memory_bytes
    # What was measured ran, whether or not its file says so.
    fits = (True if case.memory_bytes else case.fits) if sized else None
    (generation,) = (name for name, rates in kernels.RATES.items() if rates is kernels.rates(case.machine.device))
    return HeldOut(
        population=population,
        framework=framework_of(case),
        device=case.machine.device.name,
        generation=generation,
        devices=int(float(case.row["gpus"])),
        experts=any(block.experts for block in case.job.shape.blocks),
        products=case.job.products or case.job.precision,
        job=f"{zlib.crc32('/'.join((case.file, *case.group)).encode()):08x}",
        mesh=",".join(f"{axis}{case.columns[axis]}" for axis in ("pp", "tp", "cp", "ep", "replicate", "shard")),
        layout=f"{zlib.crc32(repr(layout_of(item)).encode()):08x}",
        time_s=case.time_s if timed else None,
        time_error=math.log(case.time_s / item.step_s) if timed and case.time_s else None,
        memory_error=math.log(case.memory_bytes / item.memory_bytes) if sized and case.memory_bytes else None,
        room=math.log(room_bytes / item.peak_bytes) if fits is not None else None,
        fits=fits,
    )


def write(path: Path, rows: Iterable[HeldOut]) -> None:
    """Writes rows as CSV; errors to four digits behind the point."""

    def text(value: object) -> object:
        if isinstance(value, bool):
            return int(value)
        return f"{value:.4f}" if isinstance(value, float) else value

    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([field.name for field in dataclasses.fields(HeldOut)])
        out.writerows([text(value) for value in dataclasses.astuple(row)] for row in rows)


def read(path: Path) -> list[HeldOut]:
    """Returns the rows of a file that `write` made."""
    with path.open(encoding="utf-8", newline="") as file:
        return [HeldOut.read(row) for row in csv.DictReader(file)]
