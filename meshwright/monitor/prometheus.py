"""A run in Prometheus' text format, for ``/metrics``.

Source: https://prometheus.io/docs/instrumenting/exposition_formats, text format 0.0.4.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.json_types import JsonObject
from meshwright.monitor.health import health_samples
from meshwright.monitor.rundir import RunFiles, number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "meshwright_"
_STATES = ("running", "finished", "interrupted", "failed")
_Sample = tuple[Mapping[str, str], float]
"""Labels and value."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: name without prefix, kind, and what it measures."""

    name: str
    """In base units, as Prometheus' conventions ask."""
    kind: str
    """``gauge`` or ``counter``."""
    text: str
    """One line of help."""


def format_metrics(run: RunFiles) -> str:
    """Returns the newest step's values, and counts of events, in text format."""
    lines: list[str] = []
    for family, samples in _families(run):
        # A value that isn't known has no sample: absent, not zero.
        known = [(labels, value) for labels, value in samples if not math.isnan(value)]
        if not known:
            continue
        name = _PREFIX + family.name
        lines += [f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{_labels(labels)} {_value(value)}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _families(run: RunFiles) -> Iterator[tuple[Family, Iterable[_Sample]]]:
    step: JsonObject = run.steps[-1] if run.steps else {}
    prediction = run.plan.get("prediction")
    prediction = prediction if isinstance(prediction, Mapping) else {}
    yield (
        Family("run_info", "gauge", "The run; its value is always 1."),
        [({"run": run.path.resolve().name, "layout": run.layout}, 1.0)],
    )
    yield (
        Family("run_state", "gauge", "1 for the state that the run is in."),
        [({"state": state}, float(run.state == state)) for state in _STATES],
    )
    for field, family in _SCALARS.items():
        yield family, [({}, number(step.get(field)))]
    yield (
        Family("step_part_seconds", "gauge", "Parts of the newest step's time on rank 0."),
        _by_name("part", step.get("parts")),
    )
    yield (
        Family("step_part_planned_seconds", "gauge", "Parts of a step's time as planned."),
        _by_name("part", prediction.get("parts")),
    )
    yield (
        Family("memory_bytes", "gauge", "Memory of rank 0 by category; peak is all of it."),
        _by_name("category", step.get("memory")),
    )
    yield (
        Family("memory_planned_bytes", "gauge", "Memory of the fullest rank by category as planned."),
        _by_name("category", prediction.get("memory")),
    )
    traffic = [total for total in step.get("comm") or () if isinstance(total, Mapping)]
    for field, family in _TRAFFIC.items():
        yield (
            family,
            [({"axis": str(total.get("axis")), "op": str(total.get("op"))}, number(total.get(field)))
             for total in traffic],
        )  # fmt: skip
    for field, family in _QUANTILES.items():
        yield (
            family,
            [({"axis": str(total.get("axis")), "op": str(total.get("op")), "quantile": quantile},
              number(total.get(field.format(name))) or math.nan)
             for total in traffic for quantile, name in (("0.5", "p50"), ("0.99", "p99"))],
        )  # fmt: skip
    yield Family("scalar", "gauge", "Numbers of hooks or of a custom loop."), _by_name("name", step.get("scalars"))
    yield (
        Family("expert_share", "gauge", "Share of the router's choices that went to an expert."),
        [({"expert": str(expert)}, number(share)) for expert, share in enumerate(step.get("experts") or ())],
    )
    for name, samples in health_samples(run.path, run.plan).items():
        yield Family(name, "counter" if name.endswith("_total") else "gauge", _HEALTH[name]), samples
    final = run.final()
    yield Family("validation_loss", "gauge", "Loss of the newest evaluation."), [({}, number(final.get("loss")))]
    counts = collections.Counter(str(event["kind"]) for event in run.events)
    yield (
        Family("events_total", "counter", "Lines of events.jsonl by kind."),
        [({"kind": kind}, float(count)) for kind, count in sorted(counts.items())],
    )


_SCALARS = {
    "step": Family("step", "gauge", "Steps done."),
    "loss": Family("loss", "gauge", "Training loss of the newest step."),
    "grad_norm": Family("gradient_norm", "gauge", "2-norm of the gradient before clipping."),
    "lr": Family("learning_rate", "gauge", "Learning rate of the newest step."),
    "accuracy": Family("accuracy_ratio", "gauge", "Share of target tokens that were predicted right."),
    "tokens_total": Family("tokens_total", "counter", "Target tokens since step 0 of the run."),
    "tokens_per_s": Family("tokens_per_second", "gauge", "Tokens per second through the model in the newest step."),
    "step_s": Family("step_seconds", "gauge", "Wall time of the newest step on rank 0."),
    "mfu": Family("mfu_ratio", "gauge", "Model FLOP/s over the data sheets' dense peak."),
    "mfu_of_measured": Family("mfu_of_measured_ratio", "gauge", "Model FLOP/s over the measured matrix products'."),
    "epoch": Family("epoch", "gauge", "Times that the text was read."),
}
_TRAFFIC = {
    "bytes": Family("comm_bytes", "gauge", "Bytes that rank 0 sent in the newest step."),
    "calls": Family("comm_calls", "gauge", "Collectives of rank 0 in the newest step."),
    "seconds": Family("comm_seconds", "gauge", "Time of rank 0's collectives, overlapped time counted."),
    "exposed_s": Family("comm_exposed_seconds", "gauge", "Time that rank 0 stood still for collectives."),
}


_HEALTH = {
    "gpu_utilisation_ratio": "Share of the last moments in which the GPU ran a kernel.",
    "gpu_temperature_celsius": "Temperature of the GPU's core.",
    "gpu_clock_hertz": "Clock of the GPU's multiprocessors.",
    "gpu_power_watts": "Power that the GPU draws.",
    "gpu_uncorrected_memory_errors_total": "Memory errors since the GPU's reset that ECC couldn't correct.",
    "gpu_slowed": "1 while the hardware lowers the GPU's clocks.",
    "network_errors_total": "Errors that the network device has counted.",
    "energy_joules_per_token": "Energy of devices and processors over target tokens of the newest samples.",
    "energy_part_joules_per_token": "Energy of the devices, or of the processors, over the same tokens.",
    "energy_planned_joules_per_token": "Energy of the devices at their power under load over target tokens.",
}
_QUANTILES = {
    "latency_{}_s": Family("comm_latency_seconds", "gauge", "Time of a collective of the newest step on rank 0."),
    "bandwidth_{}": Family(
        "comm_bandwidth_bytes_per_second", "gauge", "Rate that this share of the newest step's collectives reached."
    ),
}
"""Families by the fields of `CommTotals` that they are made of."""


def _by_name(label: str, values: object) -> list[_Sample]:
    if not isinstance(values, Mapping):
        return []
    return [({label: str(name)}, number(value)) for name, value in values.items()]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    # A carriage return would end the line for some readers; the format has no escape for it.
    return escaped.replace("\r", " ")


def _value(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
