"""Rows that follow the speed: two ranks on a core each, one of which another program takes half of for a while.

    python benchmarks/bench_rebalance.py [--rounds 2] [--json OUT]

Three runs a round, one after the other: even shares, `--train.rebalance 3`, and the best fixed shares under the load
(rows=2-1: half the speed). Told for each are the median seconds of a step before the load, in the last of the steps
under it and in the last after it, and when the rows moved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import meshwright

STEPS, LOAD, UNLOAD, SETTLED = 130, 30, 80, 15
"""Steps of a run, the first under the load, the first after it; steps at the end of each span that are measured."""
RUNS = {"even": ("replicate=2", 0), "rebalanced": ("replicate=2", 3), "best fixed": ("replicate=2,rows=2-1", 0)}
_LOAD = """
import os, sys, time
metrics, core, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
os.sched_setaffinity(0, {core})
step, looked, parent = 0, 0.0, os.getppid()
while step < last and os.getppid() == parent:
    if time.monotonic() - looked > 0.02:
        looked = time.monotonic()
        if os.path.exists(metrics):
            step = sum(1 for _ in open(metrics))
    if step < first:
        time.sleep(0.01)
"""


def pin(info: meshwright.StepInfo) -> meshwright.Request:
    """Keeps all threads of a rank on the core of its number; a hook."""
    if info.step == 1:
        core = sorted(os.sched_getaffinity(0))[torch.distributed.get_rank()]
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
    return meshwright.Request.NONE


def measure(layout: str, rebalance: int, folder: Path) -> dict[str, Any]:
    """Trains once under the load; returns seconds of a step by span, and the changes of shares."""
    config = meshwright.RunConfig(
        model=meshwright.ModelConfig(name="gpt2", layers=4, width=256, heads=4),
        layout=layout,
        devices=2,
        run=str(folder),
        data=meshwright.DataConfig(limit_bytes=400_000, vocab_size=512, sequence=128),
        train=meshwright.TrainConfig(steps=STEPS, batch=24, rebalance=rebalance, prove=False, sample_tokens=0),
        evaluation=meshwright.EvaluationConfig(every=0),
        checkpoint=meshwright.CheckpointConfig(every=0),
        monitor=meshwright.MonitorConfig(display="none", tensorboard=False, report=False),
    )
    core = sorted(os.sched_getaffinity(0))[1]
    load = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(folder / "metrics.jsonl"), str(core), str(LOAD), str(UNLOAD)]
    )
    try:
        meshwright.train(config, hooks=(pin,), say=lambda _line: None)
    finally:
        load.kill()
        load.wait()
    seconds = [json.loads(line)["step_s"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    spans = {"before": (LOAD - SETTLED, LOAD), "loaded": (UNLOAD - SETTLED, UNLOAD), "after": (STEPS - SETTLED, STEPS)}
    return {
        "seconds": {name: median(seconds[start:stop]) for name, (start, stop) in spans.items()},
        "changes": [(line["first_step"], line["shares"]) for line in lines if line["kind"] == "shares_changed"],
    }


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for number in range(options.rounds):
        for name, (layout, rebalance) in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                samples[name].append(measure(layout, rebalance, Path(folder) / "run"))
            last = samples[name][-1]
            times = ", ".join(f"{span} {1e3 * seconds:.0f} ms" for span, seconds in last["seconds"].items())
            print(f"round {number + 1}, {name}: {times}; rows moved: {last['changes'] or 'never'}", flush=True)
    fixed = [sample["seconds"]["loaded"] for sample in samples["best fixed"]]
    for name, rows in samples.items():
        ratios = [row["seconds"]["loaded"] / best for row, best in zip(rows, fixed)]
        least, most = min(ratios), max(ratios)
        print(f"{name}: under the load {median(ratios):.2f} of the best fixed shares ({least:.2f}-{most:.2f})")
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
