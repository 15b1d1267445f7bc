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


def joules_per_token(nodes: Mapping[str, list[JsonObject]]) -> float:
    """Returns the measured energy of all devices and processors over the tokens of the same time; NaN where unknown.

    Devices and processors that report no energy count nothing.
    """
    joules, tokens = 0.0, math.nan
    for lines in nodes.values():
        energies = [_joules(line) for line in (lines[0], lines[-1])]
        joules += energies[1] - energies[0]
        trained = number(lines[-1].get("tokens")) - number(lines[0].get("tokens"))
        tokens = trained if math.isnan(tokens) else max(tokens, trained)
    return joules / tokens if joules > 0 and tokens > 0 else math.nan


def health(run_dir: Path) -> list[Markup]:
    """Renders the newest sample of each node's devices, its network's errors and the energy of a token."""
    nodes = read_health(run_dir)
    rows = [row for lines in nodes.values() for row in _rows(lines[-1])]
    if not rows:
        return []
    joules = joules_per_token(nodes)
    headings = ("host", "device", "busy", "temperature", "clock", "power", "slowed by", "memory errors")
    elements = [table(headings, rows, (2, 3, 4, 5, 7))]
    if math.isfinite(joules):
        elements.append(note(f"{joules:.3g} J a token, of the devices and processors that report their energy."))
    return elements


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


def health_samples(run_dir: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns (labels, value) of the newest samples, by the name of a Prometheus metric."""
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
    found["energy_joules_per_token"] = [({}, joules_per_token(nodes) if nodes else math.nan)]
    return found


GPU_METRICS = {
    "utilisation": "gpu_utilisation_ratio",
    "celsius": "gpu_temperature_celsius",
    "clock_hz": "gpu_clock_hertz",
    "watts": "gpu_power_watts",
    "uncorrected_errors": "gpu_uncorrected_memory_errors_total",
}
"""Field of a GPU's sample, and its metric."""


def _joules(sample: JsonObject) -> float:
    """Returns the energy counters of a node together."""
    counters = [number(sample.get("cpu_joules")), *(number(gpu.get("joules")) for gpu in _mappings(sample.get("gpus")))]
    return sum(value for value in counters if math.isfinite(value))


def _mappings(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _text(value: object, form: str, scale: float = 1.0) -> str:
    known = number(value) * scale
    return form.format(known) if math.isfinite(known) else ""
