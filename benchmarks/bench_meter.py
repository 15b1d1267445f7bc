"""What a meter costs a custom loop: the time of a step with and without one, interleaved.

``python benchmarks/bench_meter.py --rounds 10``: two ranks on the CPU under plain copies, blocks of steps in turn; each
round gives a ratio of medians, of which the median is printed with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

import meshwright
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.monitor.config import MonitorConfig

STEPS = 40
"""Steps of a block."""


def measure(context: RankContext, rounds: int, width: int, folder: Path) -> list[float]:
    """Returns each round's ratio of median step times, with a meter over without, on rank 0."""
    init_group(context, timeout_s=300.0, group_s=300.0)
    strategy = meshwright.HybridParallelStrategy("replicate=2")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = strategy.shard(nn.Sequential(*layers), example=torch.zeros(2, width))
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-4)
    x = torch.randn(64, width)

    def run_block(metered: bool, name: str) -> float:
        config = MonitorConfig(display="none", report=False, every=10)
        opened = meshwright.meter(folder / name, strategy, config=config) if metered else contextlib.nullcontext()
        times = []
        with opened as meter:
            for _ in range(STEPS):
                began = time.perf_counter()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = float(loss.detach())
                if meter is not None:
                    meter.scalar("own/loss", value)
                    meter.step(loss=value, tokens=64)
                times.append(time.perf_counter() - began)
        return median(times[5:])

    run_block(False, "")
    ratios = []
    for number in range(rounds):
        dist.barrier()
        # The order turns, so that a drift of the machine falls on both.
        order = (True, False) if number % 2 == 0 else (False, True)
        times = {metered: run_block(metered, f"run-{number}") for metered in order}
        ratios.append(times[True] / times[False])
    dist.barrier()
    dist.destroy_process_group()
    return ratios


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launcher = ForkLauncher(2, devices=Devices(kind="cpu", count=2, found=2, cores=2))
        ratios = launcher.run(measure, options.rounds, options.width, Path(folder), timeout_s=600.0)[0]
    low, middle, high = quantiles(ratios, n=4)
    print(f"step with a meter over one without: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} rounds)")


if __name__ == "__main__":
    main()
