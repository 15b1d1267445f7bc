"""Rows that follow the speed: two ranks, one of which computes at half speed for a while.

    python benchmarks/bench_rebalance.py [--rounds 1] [--real] [--json OUT]

Three runs a round, one after the other: even shares, `--train.rebalance 3`, and the best fixed shares under the load
(rows=2-1: half the speed). Printed for each are the median seconds of a step before the load, in the last of the steps
under it and in the last after it, when the rows moved, and after how many steps a step took at most 1.1 times the best
fixed shares': under the load those of rows=2-1, after it the even ones'.

The load is a sleep for each row, twice as long on the slow rank, so that the figures say what the rows do and not what
else the machine does; with `--real` another program takes half of the slow rank's core instead, and nothing sleeps.
A round takes two minutes on two cores that others use too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import meshwright
from meshwright.train.step import Stepper

STEPS, LOAD, UNLOAD, SETTLED = 120, 30, 75, 15
"""Steps of a run, the first under the load, the first after it; steps at the end of each span that are measured."""
ROW_S = 0.01
"""Seconds that each row sleeps, twice as many on the slow rank under the load."""
BAR, BAR_STEPS = 1.10, 30
"""Times the best fixed shares' seconds that a step may take so many steps after a change of the load."""
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


@contextlib.contextmanager
def another_program(folder: Path) -> Iterator[None]:
    """Takes half of the second core from step `LOAD` to `UNLOAD`."""
    core = sorted(os.sched_getaffinity(0))[1]
    load = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(folder / "metrics.jsonl"), str(core), str(LOAD), str(UNLOAD)]
    )
    try:
        yield
    finally:
        load.kill()
        load.wait()


@contextlib.contextmanager
def sleeping_rows() -> Iterator[None]:
    """Makes each row of the ranks that are forked meanwhile take `ROW_S`, on rank 1 under the load twice as long."""
    run = Stepper.run

    def run_slowly(self: Stepper, step: int, batches: Sequence[Any], *more: Any, **named: Any) -> Any:
        slow = torch.distributed.get_rank() == 1 and LOAD <= step < UNLOAD
        time.sleep(sum(len(batch.tokens) for batch in batches) * ROW_S * (2.0 if slow else 1.0))
        return run(self, step, batches, *more, **named)

    Stepper.run = run_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stepper.run = run  # type: ignore[method-assign]


def measure(layout: str, rebalance: int, folder: Path, real: bool) -> dict[str, Any]:
    """Trains once under the load; returns the steps' seconds and losses, and the changes of shares."""
    config = meshwright.RunConfig(
        model=meshwright.ModelConfig(name="gpt2", layers=4 if real else 2, width=256 if real else 32, heads=4),
        layout=layout,
        devices=2,
        run=str(folder),
        data=meshwright.DataConfig(limit_bytes=400_000, vocab_size=512, sequence=128 if real else 16),
        train=meshwright.TrainConfig(steps=STEPS, batch=24, rebalance=rebalance, prove=False, sample_tokens=0),
        evaluation=meshwright.EvaluationConfig(every=0),
        checkpoint=meshwright.CheckpointConfig(every=0),
        monitor=meshwright.MonitorConfig(display="none", tensorboard=False, report=False),
    )
    with another_program(folder) if real else sleeping_rows():
        meshwright.train(config, hooks=(pin,), say=lambda _line: None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {
        "seconds": [row["step_s"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "changes": [(line["first_step"], line["shares"]) for line in lines if line["kind"] == "shares_changed"],
    }


def span_seconds(sample: dict[str, Any]) -> dict[str, float]:
    """Returns the median seconds of a step at the end of each span."""
    spans = {"before": LOAD, "loaded": UNLOAD, "after": STEPS}
    return {name: median(sample["seconds"][stop - SETTLED : stop]) for name, stop in spans.items()}


def steps_to_bar(seconds: Sequence[float], first: int, last: int, best_s: float) -> int | None:
    """Returns the steps from ``first`` on until the median of three is within the bar; None where it never is."""
    steps = range(first, last - 2)
    return next((step - first for step in steps if median(seconds[step : step + 3]) <= BAR * best_s), None)


def print_bar(samples: dict[str, dict[str, Any]]) -> None:
    """Prints how soon the rebalanced run came within the bar, and how far its losses are from the even run's."""
    even, moved, fixed = samples["even"], samples["rebalanced"], samples["best fixed"]
    best = {"loaded": span_seconds(fixed)["loaded"], "after": span_seconds(even)["after"]}
    for name, first, last in (("loaded", LOAD, UNLOAD), ("after", UNLOAD, STEPS)):
        steps = steps_to_bar(moved["seconds"], first, last, best[name])
        met = steps is not None and steps <= BAR_STEPS
        print(
            f"  {name}: static best {1e3 * best[name]:.0f} ms, rebalanced {1e3 * span_seconds(moved)[name]:.0f} ms; "
            f"within {BAR - 1:.0%} after {steps} steps (bar {BAR_STEPS}): {'met' if met else 'MISSED'}"
        )
    apart = max(abs(loss - other) / abs(other) for loss, other in zip(moved["losses"], even["losses"]))
    print(f"  largest relative difference of a step's loss from the even run's: {apart:.1e} (float32)", flush=True)


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        samples = {}
        for name, (layout, rebalance) in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                samples[name] = measure(layout, rebalance, Path(folder) / "run", options.real)
            times = ", ".join(f"{span} {1e3 * value:.0f} ms" for span, value in span_seconds(samples[name]).items())
            moved = samples[name]["changes"] or "never"
            print(f"round {number + 1}, {name}: {times}; rows moved: {moved}", flush=True)
        print_bar(samples)
        rounds.append(samples)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
