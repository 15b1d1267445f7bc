"""Predicts cases together: those of one model, machine and engine are one array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published.rows import UNREADABLE, Case
from benchmarks.published.unequal import unequal_costs
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.layout_batch import LayoutBatch
from meshwright.planner.cost.price import FeasibilityRule, price_many


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A case and what is predicted for it."""

    case: Case
    step_s: float
    memory_bytes: float
    """Of the kind that was measured."""
    peak_bytes: float
    """What the fullest rank takes of its device."""
    parts: dict[str, float]
    room_bytes: float = 0.0
    """Memory of the device that is fullest; 0 is that of the case's machine."""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.peak_bytes <= (self.room_bytes or self.case.machine.device.memory_bytes)

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.case.time_s is None else self.step_s / self.case.time_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Likewise."""
        return None if self.case.memory_bytes is None else self.memory_bytes / self.case.memory_bytes - 1.0


def predict(cases: Sequence[Case]) -> list[Predicted]:
    """Returns a prediction for each case, in order."""
    found: dict[int, Predicted] = {}
    for index in _bunches(cases):
        chosen = [cases[at] for at in index]
        items = [_unequal(chosen[0])] if chosen[0].kinds else _bunch(chosen)
        found |= dict(zip(index, items))
    return [found[at] for at in range(len(cases))]


def figures(cases: Sequence[Case], what: str) -> list[float]:
    """Returns what `predict` says of ``time`` or ``memory`` alone."""
    found: dict[int, float] = {}
    for index in _bunches(cases):
        chosen = [cases[at] for at in index]
        if chosen[0].kinds:
            item = _unequal(chosen[0])
            values = [item.step_s if what == "time" else item.memory_bytes]
        elif what == "time":
            values = [item.step_s for item in _bunch(chosen)]
        else:
            values = [item.memory_bytes for item in _bunch(chosen, lambda degrees, *_: np.zeros(degrees.count, bool))]
        found |= dict(zip(index, values))
    return [found[at] for at in range(len(cases))]


def _bunches(cases: Sequence[Case]) -> list[list[int]]:
    """Indices of cases that are priced together: those of one model, machine and engine; unequal devices alone."""
    bunches: dict[tuple[object, ...], list[int]] = {}
    for at, case in enumerate(cases):
        job = case.job
        key = (id(job.shape), job.sequence, job.precision, job.products, job.adapters, _device(case), case.engine)
        bunches.setdefault((at,) if case.kinds else key, []).append(at)
    return list(bunches.values())


def refused(case: Case) -> str:
    """Returns why a case can't be priced although its row could be read; empty when it can."""
    try:
        (found,) = predict([case])
    except UNREADABLE as fault:
        return f"can't be priced: {str(fault).split(';')[0][:80]}"
    return "" if whole_number(found) else "can't be priced: no finite time"


def whole_number(found: Predicted) -> bool:
    """Whether time and memory came out finite and above 0."""
    return all(math.isfinite(value) and value > 0 for value in (found.step_s, found.memory_bytes, found.peak_bytes))


def _device(case: Case) -> tuple[object, ...]:
    fabric = case.machine.fabric
    return (case.machine.device.name, fabric.inside, fabric.outside, fabric.devices, fabric.cards)


def _unequal(case: Case) -> Predicted:
    assert case.kinds is not None  # `predict` asks for those with kinds alone
    costs = unequal_costs(case.job, case.columns, case.split, case.kinds, case.engine)
    return Predicted(
        case=case,
        step_s=costs["step_s"],
        memory_bytes=costs[case.memory_kind or "reserved"],
        peak_bytes=costs["device"],
        parts={},
        room_bytes=costs["room"],
    )


def _degrees(cases: Sequence[Case]) -> LayoutBatch:
    names = {name: None for case in cases for name in case.columns}
    columns = {name: [case.columns.get(name, 1.0) for case in cases] for name in names}
    columns["rows"] = [case.job.rows for case in cases]
    return LayoutBatch.of(columns, [case.split for case in cases])


def _bunch(cases: Sequence[Case], holds: FeasibilityRule | None = None) -> list[Predicted]:
    job, machine, engine = cases[0].job, cases[0].machine, cases[0].engine
    prices = price_many(job, _degrees(cases), machine, engine, holds)
    kinds = {
        "first": prices.first_reserved,
        "reserved": prices.reserved,
        "allocated": prices.allocated,
        "device": prices.peak,
    }
    return [
        Predicted(
            case=case,
            step_s=float(prices.step_s[at]),
            memory_bytes=float(kinds.get(case.memory_kind or "reserved", prices.reserved)[at]),
            peak_bytes=float(prices.peak[at]),
            parts=prices.parts_of(at),
        )
        for at, case in enumerate(cases)
    ]


def with_engines(cases: Sequence[Case], engines: dict[str, FrameworkProfile]) -> list[Case]:
    """Returns the cases with engines replaced by name."""
    return [dataclasses.replace(case, engine=engines.get(case.engine.name, case.engine)) for case in cases]
