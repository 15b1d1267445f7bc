"""Planned against measured: how far each part of a run was from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

GROUPS = ("memory", "parts", "traffic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """One quantity that was both planned and measured."""

    part: str
    """Dotted name: ``memory.parameters``, ``parts.forward``, ``traffic.shard``, ``step_s``."""
    planned: float
    """Planned value: bytes for memory and traffic, seconds for the rest."""
    measured: float
    """Measured value, in the same unit."""
    relative: float
    """(measured - planned) / planned; infinite where nothing was planned and something measured."""
    beyond: bool
    """Whether the difference exceeds the bound."""

    def to_json(self) -> dict[str, Any]:
        """Returns the drift as plain values."""
        return asdict(self)


def compare(plan: Mapping[str, Any], measured: Mapping[str, Any], bound: float) -> list[Drift]:
    """Compares a plan's prediction with what was measured; what only one of them knows is left out.

    Traffic is whole on both sides: an axis that one of them lacks carried, or was to carry, nothing.

    Args:
        plan: a plan as in plan.json, or its prediction alone.
        measured: ``{"memory": {part: bytes}, "step_s": s, "parts": {part: s}, "traffic": {axis: bytes}}``, as
            `measure` gives it.
        bound: relative difference from which a part counts as drifted.

    Returns:
        One entry for each quantity, memory first, then times, then traffic.
    """
    prediction = plan.get("prediction") or plan
    pairs: list[tuple[str, Any, Any]] = [("step_s", prediction.get("step_s"), measured.get("step_s"))]
    for group in GROUPS:
        planned, found = prediction.get(group) or {}, measured.get(group) or {}
        if group == "traffic" and planned and found:
            names = dict.fromkeys((*planned, *found))
            pairs += [(f"{group}.{name}", planned.get(name, 0), found.get(name, 0)) for name in names]
            continue
        pairs += [(f"{group}.{name}", planned[name], found[name]) for name in planned if name in found]
    pairs.sort(key=lambda pair: ("memory", "step_s", "parts", "traffic").index(pair[0].partition(".")[0]))
    return [
        _drift(part, float(plan_value), float(value), bound)
        for part, plan_value, value in pairs
        if plan_value is not None and value is not None
    ]


def _drift(part: str, planned: float, measured: float, bound: float) -> Drift:
    nothing = float("inf") if measured else 0.0
    relative = (measured - planned) / planned if planned else nothing
    return Drift(part=part, planned=planned, measured=measured, relative=relative, beyond=abs(relative) > bound)


def measure(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Condenses step records to what `compare` takes: medians of times and traffic, maxima of memory.

    The first steps, in which caches fill and kernels are chosen, are left out of the medians where there are enough.

    Args:
        steps: lines of metrics.jsonl.
    """
    warm = steps[min(5, len(steps) // 2) :]
    return {
        "step_s": _middle(step.get("step_s") for step in warm),
        "parts": {name: _middle((step.get("parts") or {}).get(name) for step in warm) for name in _keys(warm, "parts")},
        "memory": {
            name: max((step.get("memory") or {}).get(name) or 0 for step in steps) for name in _keys(steps, "memory")
        },
        "traffic": _traffic(warm),
    }


def _traffic(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums: list[dict[str, float]] = []
    for step in steps:
        sums.append({})
        for total in step.get("comm") or ():
            sums[-1][total["axis"]] = sums[-1].get(total["axis"], 0) + total["bytes"]
    axes = dict.fromkeys(axis for one in sums for axis in one)
    return {axis: median(one.get(axis, 0) for one in sums) for axis in axes}


def _keys(steps: Sequence[Mapping[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step.get(group) or {}))


def _middle(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return median(kept) if kept else None
