"""Energy of a token: what the counters of devices and processors measured, beside what the plan expects of devices.

The plan's figure is the power under load of what trains (GPUs, or the cores of ranks on processors), as the catalogue
has it, over the planned tokens a second. Measured are the counters of the GPUs that the run sees (NVML) and of the
processors' packages (RAPL), which count all that runs on their node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.json_types import JsonObject
from meshwright.monitor.rundir import number

UNREPORTED = "no GPU (NVML) and no processor (RAPL, /sys/class/powercap) of these nodes reports its energy to this user"
UNSAMPLED = "nothing is sampled; --monitor.health-s 10 does"
TOO_FEW = "two samples and trained tokens between them are needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEnergy:
    """Joules of a target token; NaN where one isn't known."""

    planned: float = math.nan
    """Of what trains, as planned."""
    devices: float = math.nan
    """Of the GPUs, measured."""
    processors: float = math.nan
    """Of the processors' packages, measured."""
    unknown: str = ""
    """Why nothing was measured, in a clause; empty where something was."""

    @property
    def measured(self) -> float:
        """Of all that reports its energy."""
        known = [value for value in (self.devices, self.processors) if math.isfinite(value)]
        return sum(known) if known else math.nan

    def to_json(self) -> dict[str, float]:
        """Returns what is known by name: ``planned``, ``devices``, ``processors``, ``measured``."""
        values = {name: getattr(self, name) for name in ("planned", "devices", "processors", "measured")}
        return {name: value for name, value in values.items() if math.isfinite(value)}


def token_energy(nodes: Mapping[str, Sequence[JsonObject]], plan: JsonObject) -> TokenEnergy:
    """Returns the energy of a token over the samples, and as planned.

    Args:
        nodes: samples of each node, as `monitor.health.read_health` returns them.
        plan: of plan.json.
    """
    prediction = plan.get("prediction")
    planned = number(prediction.get("joules_per_token")) if isinstance(prediction, Mapping) else math.nan
    devices, processors = _joules_per_token(nodes, _device_joules), _joules_per_token(nodes, _processor_joules)
    unknown = ""
    if math.isnan(devices) and math.isnan(processors):
        newest = [lines[-1] for lines in nodes.values() if lines]
        reports = any(spent(line, line) is not None for line in newest for spent in (_device_joules, _processor_joules))
        unknown = TOO_FEW if reports else UNREPORTED if newest else UNSAMPLED
    return TokenEnergy(planned=planned, devices=devices, processors=processors, unknown=unknown)


def joules_per_token(nodes: Mapping[str, Sequence[JsonObject]]) -> float:
    """Returns the measured energy of a token; NaN where nothing reports any."""
    return token_energy(nodes, {}).measured


def _joules_per_token(
    nodes: Mapping[str, Sequence[JsonObject]], joules_between: Callable[[JsonObject, JsonObject], float | None]
) -> float:
    """Sums the nodes' joules a token; each node's lines count the tokens of the whole run."""
    total = math.nan
    for lines in nodes.values():
        joules = tokens = 0.0
        for earlier, later in itertools.pairwise(lines):
            interval_tokens = number(later.get("tokens")) - number(earlier.get("tokens"))
            interval_joules = joules_between(earlier, later)
            # Where a counter is missing, or has begun again, the tokens of that time don't count either.
            if interval_joules is not None and interval_joules >= 0 and math.isfinite(interval_tokens):
                joules, tokens = joules + interval_joules, tokens + interval_tokens
        if joules > 0 and tokens > 0:
            total = joules / tokens + (0.0 if math.isnan(total) else total)
    return total


def _processor_joules(earlier: JsonObject, later: JsonObject) -> float | None:
    joules = number(later.get("cpu_joules")) - number(earlier.get("cpu_joules"))
    return joules if math.isfinite(joules) else None


def _device_joules(earlier: JsonObject, later: JsonObject) -> float | None:
    """Returns the joules of GPUs that the run sees and that both samples have; None without one, or after a reset."""
    start_joules, end_joules = _device_counters(earlier), _device_counters(later)
    joules = [end_joules[gpu] - start_joules[gpu] for gpu in start_joules.keys() & end_joules.keys()]
    # A counter that began again makes the others' joules those of too few devices.
    return sum(joules) if joules and min(joules) >= 0.0 else None


def _device_counters(sample: JsonObject) -> dict[object, float]:
    gpus, visible = sample.get("gpus"), sample.get("visible")
    counters: dict[object, float] = {}
    for gpu in gpus if isinstance(gpus, list) else ():
        entry: Mapping[str, Any] = gpu if isinstance(gpu, Mapping) else {}
        index, joules = entry.get("index"), number(entry.get("joules"))
        if (
            isinstance(index, int)
            and math.isfinite(joules)
            and not (isinstance(visible, list) and index not in visible)
        ):
            counters[index] = joules
    return counters
