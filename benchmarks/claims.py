"""What parallelism buys at scale, as the planner predicts it: what fits, how efficient, how much is communication.

    python benchmarks/claims.py [--cluster 1024xa100-80] [--slow 1024xa100-80@ethernet-25g] [--json OUT]

GPT models of growing size, 2048 tokens a row, a batch of 2 rows a device. "Data parallel" copies the model; "ZeRO" may
shard it over the data ranks; "all axes" is the planner's free choice. Efficiency is tokens a second and device against
the same model's best plan on the fewest devices that hold it; communication is what a step spends on exposed traffic.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.units import format_count

FAMILY = (
    (24, 2048), (32, 2560), (32, 4096), (40, 5120), (48, 6144), (64, 8192), (80, 10240), (96, 12288), (105, 20480),
    (128, 25600), (160, 32768),
)  # fmt: skip
"""Layers and width. Source: Narayanan et al. (SC 2021), table 1, and the sizes around it."""
WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {"axes": ("replicate",), "levels": (0,)},
    "ZeRO": {"axes": ("replicate", "shard")},
    "all axes": {},
}
TRAFFIC = ("tp", "cp", "ep", "send", "gather", "reduce")
"""Parts of a step that are exposed communication."""
SEQUENCE, ROWS = 2048, 2
SCALED = (40, 5120)
"""The model whose efficiency is compared."""


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="1024xa100-80")
    parser.add_argument("--slow", default="1024xa100-80@ethernet-25g", help="the same with a slow network")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    found = {"fits": _fits(options.cluster), "efficiency": []}
    for text in (options.cluster, options.slow):
        found["efficiency"] += _efficiency(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _fits(text: str) -> list[dict[str, Any]]:
    rows = []
    print(f"largest model that fits on {text}")
    for way, limits in WAYS.items():
        largest, best = None, None
        for layers, width in FAMILY:
            one = _best(text, layers, width, limits)
            if one is None:
                break
            largest, best = (layers, width), one
        assert largest is not None and best is not None
        count = _shape(*largest).parameters
        rows.append({"way": way, "parameters": count, "layout": str(best.layout), "peak_bytes": best.price.peak})
        print(f"  {way:<14} {format_count(count):>8} parameters  {best.layout}", flush=True)
    return rows


def _efficiency(text: str) -> list[dict[str, Any]]:
    cluster, rows = Cluster.parse(text), []
    counts = [8, 64, 256, cluster.devices]
    print(f"{format_count(_shape(*SCALED).parameters)} parameters on {text}: efficiency, communication")
    for way in ("ZeRO", "all axes"):
        base = 0.0
        for devices in counts:
            one = _best(text, *SCALED, WAYS[way], devices)
            if one is None:
                continue
            each = one.tokens_per_s / devices
            base = base or each
            share = sum(one.price.parts[name] for name in TRAFFIC) / one.price.step_s
            rows.append(
                {"cluster": text, "way": way, "devices": devices, "efficiency": each / base, "communication": share}
                | {"layout": str(one.layout)}
            )
            print(f"  {way:<9} {devices:>5} devices: {each / base:6.1%} {share:6.1%}  {one.layout}", flush=True)
    return rows


def _shape(layers: int, width: int) -> Any:
    name = f"gpt {layers}x{width}"
    sizes = TableSizes(name=name, layers=layers, width=width, heads=width // 128, vocab=51200, gated=False)
    return shape_from_sizes(sizes)


def _best(text: str, layers: int, width: int, limits: dict[str, Any], devices: int = 0) -> Candidate | None:
    cluster = Cluster.parse(text)
    cluster = cluster.restricted(devices) if devices else cluster
    job = PricedJob(shape=_shape(layers, width), sequence=SEQUENCE, rows=ROWS * cluster.devices)
    limits = {"offloads": ("none",)} | limits  # what fits on the devices alone
    try:
        return choose(Question(job=job, cluster=cluster, base=Layout(precision="bf16"), limits=limits), 1).best[0]
    except PlanError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
