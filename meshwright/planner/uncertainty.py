"""How sure a prediction is: the chance that a step's time is in an interval, that memory suffices, that a plan is best.

An error is ln(measured / predicted). How wide errors scatter depends on what the constants of the price had seen: runs
of the **framework**, at least runs on the **device**, or neither. Layouts of a job share a part of their error, which
moves them alike; the rest is of the **mesh** (the degrees of a layout's axes) and of the **layout** alone. So an
interval counts the whole, and a comparison of layouts the rest.

The scales are in ``uncertainty.toml``, fitted by ``benchmarks/fit_uncertainty.py`` to published runs to which no
constant was fitted. The constants' priors were chosen with these runs in sight, so the scales are somewhat small for
code of which nobody has seen a run (`docs/predictions.md`).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwright.json_types import JsonObject

FILE = Path(__file__).with_name("uncertainty.toml")
INTERVAL = 0.8
"""Chance that a step's time lies in the interval that is shown."""
TIE_CHANCE = 0.2
"""Chance of being faster than another layout from which on the two tie: each then lies in the other's 80 %."""
DRAWS = 4000
"""Sets of errors by which the chance of being the fastest is counted: its own error is at most 0.8 %."""
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The distribution of an error over its scale: normal, but for a share of it that is wider.

    Source: Tukey (1960), the contaminated normal.
    """

    wide_share: float
    """Share of errors that are drawn from the wider normal."""
    wide_factor: float
    """Its standard deviation over that of the others, which is 1."""

    def cdf(self, value: float) -> float:
        """Returns the probability that an error over its scale is at most ``value``."""
        narrow, wide = _NORMAL.cdf(value), _NORMAL.cdf(value / self.wide_factor)
        return (1.0 - self.wide_share) * narrow + self.wide_share * wide

    def quantile(self, probability: float) -> float:
        """Returns the value with `cdf` of ``probability``, by bisection."""
        low, high = -20.0 * self.wide_factor, 20.0 * self.wide_factor
        for _ in range(80):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.cdf(middle) < probability else (low, middle)
        return (low + high) / 2.0

    def draw(self, generator: np.random.Generator, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Returns an array of errors over their scale, of shape ``size``."""
        is_wide = generator.random(size) < self.wide_share
        return np.asarray(generator.standard_normal(size) * np.where(is_wide, self.wide_factor, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the constants of a prediction were fitted to, or measured on."""

    framework: bool
    """Runs of the framework that is priced, or of this very machine."""
    device: bool
    """Runs on the device, or its calibration."""
    own_bytes: bool = False
    """Whether memory is that of our own runtime with the model's modules counted, as its runs on a GPU were planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpread:
    """Scales of a time's error, as logarithms: 0.05 is about 5 %."""

    model: float
    """Of a whole error, where runs of the framework on the device were seen, of other models."""
    framework: float
    """Of a whole error, where none of the framework was."""
    device: float
    """Of a whole error, where none on the device was either."""
    mesh: float
    """Of the part that layouts share whose axes have the same degrees."""
    layout: float
    """Of the part that a layout shares with no other."""
    shape: Shape
    floor: float = 0.0
    """Least scale of a whole error."""

    def widened(self, tolerance: float) -> Self:
        """Returns the spread where layouts tie whose times differ by up to a relative ``tolerance``, or more.

        Args:
            tolerance: at which one layout is faster than another with 1 - `TIE_CHANCE`, and which is in the interval.
        """
        pair_scale = math.log1p(tolerance) / self.shape.quantile(1.0 - TIE_CHANCE)
        floor = math.log1p(tolerance) / self.shape.quantile((1.0 + INTERVAL) / 2.0)
        return replace(self, layout=max(self.layout, pair_scale / math.sqrt(2.0)), floor=floor)

    def scale(self, evidence: Evidence) -> float:
        """Returns the scale of a whole error."""
        if not evidence.device:
            return max(self.floor, self.device)
        return max(self.floor, self.model if evidence.framework else self.framework)

    def factor(self, evidence: Evidence, probability: float = INTERVAL) -> float:
        """Returns f so that the measured time is within predicted / f and predicted x f with ``probability``."""
        return math.exp(self.scale(evidence) * self.shape.quantile((1.0 + probability) / 2.0))

    def chance_faster(self, step_s: float, other_s: float, same_mesh: bool) -> float:
        """Returns the chance that the first of two layouts of a job is faster than the second.

        Args:
            step_s: predicted seconds of the first.
            other_s: predicted seconds of the second.
            same_mesh: whether the degrees of their axes are equal.
        """
        scale = math.sqrt(2.0) * math.hypot(self.layout, 0.0 if same_mesh else self.mesh)
        return self.shape.cdf(math.log(other_s / step_s) / scale)

    def chances_best(self, step_s: Sequence[float], meshes: Sequence[str]) -> NDArray[np.float64]:
        """Returns the chance of each of N layouts of a job that it is the fastest of them, (N,); they add up to 1.

        Args:
            step_s: predicted seconds of each.
            meshes: for each the degrees of its axes; layouts of one mesh share the mesh's error.
        """
        generator = np.random.default_rng(0)  # the same question has the same answer
        names = {mesh: number for number, mesh in enumerate(dict.fromkeys(meshes))}
        mesh_errors = self.mesh * self.shape.draw(generator, (DRAWS, len(names)))
        own_errors = self.layout * self.shape.draw(generator, (DRAWS, len(step_s)))
        times = np.log(step_s) + own_errors + mesh_errors[:, [names[mesh] for mesh in meshes]]
        return np.bincount(times.argmin(axis=1), minlength=len(step_s)) / DRAWS


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySpread:
    """Scales of the error of the fullest rank's bytes, as logarithms."""

    framework: float
    """Of a framework whose runs weren't fitted, beside the others."""
    missing: float
    """What such a framework takes more than predicted, in the median."""
    job: float
    """Of a framework whose runs were: model, layout, and the allocator's fragments."""
    job_missing: float
    """What such a framework takes more, in the median."""
    own: float
    """Of our own runtime on a device that wasn't measured, where the model's tensors are counted; about 0, though its
    runs took less than planned: they were on one GPU, and several have communicators."""
    counted: float
    """Where the model's own tensors are counted and the machine was measured, in place of the others."""
    shape: Shape

    def chance(self, room: float, evidence: Evidence, counted: bool) -> float:
        """Returns the chance that a rank fits its device.

        Args:
            room: ln(bytes of the device / predicted bytes of the rank).
            evidence: what the constants were fitted to.
            counted: whether bytes are counted rather than estimated.
        """
        middle, scale, shape = self._error(evidence, counted)
        return shape.cdf((room - middle) / scale)

    def share(self, chance: float, evidence: Evidence, counted: bool) -> float:
        """Returns the share of a device's memory up to which a prediction fits with a ``chance``; see `chance`."""
        middle, scale, shape = self._error(evidence, counted)
        return math.exp(-middle - scale * shape.quantile(chance))

    def _error(self, evidence: Evidence, counted: bool) -> tuple[float, float, Shape]:
        """Returns middle, scale and shape of the error."""
        if counted:
            return 0.0, self.counted, self.shape
        if evidence.framework:
            return self.job_missing, self.job, self.shape
        if evidence.own_bytes and evidence.device:
            return 0.0, self.own, self.shape
        # A framework's own part is normal, and added to that of the job, of which a share is wider.
        scale = math.hypot(self.framework, self.job)
        wide_scale = math.hypot(self.framework, self.shape.wide_factor * self.job)
        return self.missing, scale, replace(self.shape, wide_factor=wide_scale / scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spreads:
    """The package's spreads."""

    time: TimeSpread
    memory: MemorySpread
    devices: frozenset[str]
    """Devices of the catalogue whose runs the constants were fitted to."""


def parse_spreads(values: JsonObject) -> Spreads:
    """Returns the spreads of the file's values."""

    def part(fields: Mapping[str, float]) -> dict[str, object]:
        scales = {name: float(value) for name, value in fields.items() if not name.startswith("wide_")}
        shape = Shape(wide_share=float(fields["wide_share"]), wide_factor=float(fields["wide_factor"]))
        return {**scales, "shape": shape}

    return Spreads(
        time=TimeSpread(**part(values["time"])),  # type: ignore[arg-type]
        memory=MemorySpread(**part(values["memory"])),  # type: ignore[arg-type]
        devices=frozenset(values["devices"]),
    )


@cache
def fitted_spreads() -> Spreads:
    """Returns the spreads that were fitted to published runs."""
    return parse_spreads(tomllib.loads(FILE.read_text(encoding="utf-8")))
