"""Health of a run's machines: samples that a process beside each supervisor writes, as the page and /metrics read them.

A line of ``health/NODE.jsonl`` has `time`, `host`, `step`, `tokens`, `gpus`, `nics` (errors by name) and `cpu_joules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.json_types import JsonObject
from meshwright.monitor.energy import TokenEnergy, token_energy
from meshwright.monitor.page import note, table
from meshwright.monitor.rundir import LineReader, number

FOLDER = "health"
_NEWEST_BYTES = 1 << 18
"""Bytes at the end of each file that are read: some hundred samples."""


def read_health(run_dir: Path) -> dict[str, list[JsonObject]]:
    """Returns the newest samples of each node, by its file's name; none without any."""
    folder = run_dir / FOLDER
    # A link or a pipe in a copied run directory isn't a node's file.
    files = [path for path in folder.glob("*.jsonl") if path.is_file() and not path.is_symlink()]
    samples: dict[str, list[JsonObject]] = {
        path.stem: list(LineReader(path, _NEWEST_BYTES).read()[0]) for path in sorted(files)
    }
    return {node: lines for node, lines in samples.items() if lines}


def health(run_dir: Path, plan: JsonObject | None = None) -> list[Markup]:
    """Renders the newest sample of each node's devices, its network's errors and the energy of a token.

    Args:
        run_dir: the run directory.
        plan: of plan.json; None for a run without one.
    """
    nodes = read_health(run_dir)
    rows = [row for lines in nodes.values() for row in _rows(lines[-1])]
    headings = ("host", "device", "busy", "temperature", "clock", "power", "slowed by", "memory errors")
    elements = [table(headings, rows, (2, 3, 4, 5, 7))] if rows else []
    return elements + _energy(token_energy(nodes, plan or {}), is_sampled=bool(rows) or _has_counters(nodes))


def _has_counters(nodes: Mapping[str, list[JsonObject]]) -> bool:
    """Whether samples are of nodes whose sampler looked for a processor's counter, whatever it found."""
    newest = [lines[-1] for lines in nodes.values()]
    return any(line.get("cpu_joules", {}) is None or math.isfinite(number(line.get("cpu_joules"))) for line in newest)


def _energy(energy: TokenEnergy, is_sampled: bool) -> list[Markup]:
    """Renders planned and measured energy of a token; says why where nothing was measured."""
    if math.isfinite(energy.measured):
        figures = [
            ("planned, what trains at its power under load", energy.planned, "no power known"),
            ("measured, GPUs", energy.devices, "none reports it"),
            ("measured, processors", energy.processors, "none reports it"),
        ]
        rows = [(name, f"{value:.3g} J" if math.isfinite(value) else absent) for name, value, absent in figures]
        sentence = f"{energy.measured:.3g} J a token, of the devices and processors that report their energy."
        return [note(sentence), table(("energy of a token", ""), rows, (1,))]
    if math.isfinite(energy.planned):
        return [note(f"Planned: {energy.planned:.3g} J a token. Not measured: {energy.unknown}.")]
    return [note(f"The energy of a token isn't measured: {energy.unknown}.")] if is_sampled else []


def _rows(sample: JsonObject) -> Iterator[tuple[str, ...]]:
    host = str(sample.get("host", ""))
    for gpu in _mappings(sample.get("gpus")):
        yield (
            host,
            f"GPU {gpu.get('index')} {gpu.get('name', '')}",
            _text(gpu.get("utilisation"), "{:.0%}"),
            _text(gpu.get("celsius"), "{:.0f} °C"),
            _text(gpu.get("clock_hz"), "{:.0f} MHz", 1e-6),
            _text(gpu.get("watts"), "{:.0f} W"),
            ", ".join(map(str, gpu.get("slowdowns") or ())),
            _text(gpu.get("uncorrected_errors"), "{:.0f}"),
        )
    nics = sample.get("nics")
    for name, errors in nics.items() if isinstance(nics, Mapping) else ():
        if number(errors) > 0:
            yield (host, f"network {name}", "", "", "", "", "", _text(errors, "{:.0f} errors"))


def health_samples(run_dir: Path, plan: JsonObject | None = None) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns (labels, value) of the newest samples, by the name of a Prometheus metric.

    Args:
        run_dir: the run directory.
        plan: of plan.json; None for a run without one.
    """
    nodes = read_health(run_dir)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for lines in nodes.values():
        sample = lines[-1]
        host = str(sample.get("host", ""))
        for gpu in _mappings(sample.get("gpus")):
            labels = {"host": host, "gpu": str(gpu.get("index"))}
            for field, name in GPU_METRICS.items():
                found.setdefault(name, []).append((labels, number(gpu.get(field))))
            found.setdefault("gpu_slowed", []).append((labels, float(bool(gpu.get("slowdowns")))))
        nics = sample.get("nics")
        for nic, errors in nics.items() if isinstance(nics, Mapping) else ():
            found.setdefault("network_errors_total", []).append(({"host": host, "device": str(nic)}, number(errors)))
    energy = token_energy(nodes, plan or {})
    found["energy_joules_per_token"] = [({}, energy.measured)]
    parts = {"devices": energy.devices, "processors": energy.processors}
    found["energy_part_joules_per_token"] = [({"part": name}, value) for name, value in parts.items()]
    found["energy_planned_joules_per_token"] = [({}, energy.planned)]
    return found


GPU_METRICS = {
    "utilisation": "gpu_utilisation_ratio",
    "celsius": "gpu_temperature_celsius",
    "clock_hz": "gpu_clock_hertz",
    "watts": "gpu_power_watts",
    "uncorrected_errors": "gpu_uncorrected_memory_errors_total",
}
"""Field of a GPU's sample, and its metric."""


def _mappings(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(value: object, form: str, scale: float = 1.0) -> str:
    known = number(value) * scale
    return form.format(known) if math.isfinite(known) else ""
