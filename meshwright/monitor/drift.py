"""Drift: the difference of each part of a run from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshwright.json_types import JsonObject

GROUPS = ("memory", "parts", "traffic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """One quantity that was both planned and measured."""

    part: str
    """Dotted name: ``memory.parameters``, ``parts.forward``, ``traffic.shard``, ``step_s``."""
    planned: float
    """Planned value: bytes for memory and traffic, seconds for everything else."""
    measured: float
    """Measured value, in the same unit."""
    relative: float
    """(measured - planned) / planned; infinite where zero was planned and more measured."""
    beyond: bool
    """Whether the difference exceeds the bound."""

    def to_json(self) -> dict[str, object]:
        """Returns the drift as plain values."""
        return asdict(self)


def compare(plan: JsonObject, measured: JsonObject, bound: float) -> list[Drift]:
    """Compares a plan's prediction with the measurement; quantities that only one of them has are left out.

    Traffic is complete on both sides: an axis that one of them lacks counts as zero bytes.

    Args:
        plan: a plan as in plan.json, or its prediction alone.
        measured: ``{"memory": {part: bytes}, "step_s": s, "parts": {part: s}, "traffic": {axis: bytes}}``, as
            returned by `measure`.
        bound: relative difference from which a part counts as drifted.

    Returns:
        One entry for each quantity, memory first, then times, then traffic.
    """
    prediction = plan.get("prediction") or plan
    pairs: list[tuple[str, Any, Any]] = [("step_s", prediction.get("step_s"), measured.get("step_s"))]
    for group in GROUPS:
        planned, measured_group = prediction.get(group) or {}, measured.get(group) or {}
        if group == "traffic" and planned and measured_group:
            names = dict.fromkeys((*planned, *measured_group))
            pairs += [(f"{group}.{name}", planned.get(name, 0), measured_group.get(name, 0)) for name in names]
            continue
        pairs += [
            (f"{group}.{name}", planned[name], measured_group[name]) for name in planned if name in measured_group
        ]
    pairs.sort(key=lambda pair: ("memory", "step_s", "parts", "traffic").index(pair[0].partition(".")[0]))
    return [
        _compare_value(quantity, float(plan_value), float(value), bound)
        for quantity, plan_value, value in pairs
        if plan_value is not None and value is not None
    ]


def _compare_value(quantity: str, planned: float, measured: float, bound: float) -> Drift:
    relative_to_zero = float("inf") if measured else 0.0
    relative = (measured - planned) / planned if planned else relative_to_zero
    return Drift(part=quantity, planned=planned, measured=measured, relative=relative, beyond=abs(relative) > bound)


def measure(steps: Sequence[JsonObject]) -> JsonObject:
    """Summarises step records for `compare`: medians of times and traffic, maxima of memory.

    The medians exclude the first steps, which fill caches and choose kernels, where the run has enough others.

    Args:
        steps: lines of metrics.jsonl.
    """
    warm = _warm(steps)
    return {
        "step_s": _median_of_known(step.get("step_s") for step in warm),
        "parts": {
            name: _median_of_known((step.get("parts") or {}).get(name) for step in warm)
            for name in _field_names(warm, "parts")
        },
        "memory": {
            name: max((step.get("memory") or {}).get(name) or 0 for step in steps)
            for name in _field_names(steps, "memory")
        },
        "traffic": _median_traffic(warm),
    }


def _warm(steps: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Returns the steps without the first ones, of which at least half remain where a run has few."""
    return steps[min(5, len(steps) // 2) :]


def median_waits_s(steps: Sequence[JsonObject]) -> float:
    """Returns the median seconds of a step for which the rank stood still for traffic; without steps 0.

    Args:
        steps: lines of metrics.jsonl.
    """
    waits = [sum(float(total["exposed_s"]) for total in step.get("comm") or ()) for step in _warm(steps)]
    return median(waits) if waits else 0.0


def _median_traffic(steps: Sequence[JsonObject]) -> dict[str, float]:
    """Returns each axis' median bytes a step; a step without traffic on an axis counts as 0."""
    bytes_by_step: list[dict[str, float]] = []
    for step in steps:
        bytes_by_step.append({})
        for total in step.get("comm") or ():
            bytes_by_step[-1][total["axis"]] = bytes_by_step[-1].get(total["axis"], 0) + total["bytes"]
    axes = dict.fromkeys(axis for axis_bytes in bytes_by_step for axis in axis_bytes)
    return {axis: median(axis_bytes.get(axis, 0) for axis_bytes in bytes_by_step) for axis in axes}


def _field_names(steps: Sequence[JsonObject], group: str) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step.get(group) or {}))


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return median(known_values) if known_values else None
