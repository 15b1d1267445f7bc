"""What keeping freed memory buys and costs on a CPU rank: page faults and speed by tensor size, and a training step.

Run: ``python benchmarks/bench_host_memory.py [rows]`` (about 20 s on one core).
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch

from meshwright.launch.config import LaunchConfig
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher

MIB = 2**20
SIZES_MIB = (1, 4, 16, 64, 200)
STEPS = 6


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def operations(context: RankContext) -> list[tuple[int, float, int]]:
    """Doubles a tensor of each size again and again: (MiB, GiB/s, page faults an operation)."""
    rows = []
    for size in SIZES_MIB:
        source = torch.ones(size * MIB // 4)
        repeats = max(4, 400 // size)
        torch.mul(source, 2)
        start, before = time.perf_counter(), _faults()
        for _ in range(repeats):
            torch.mul(source, 2)
        seconds = (time.perf_counter() - start) / repeats
        rows.append((size, size / 1024 / seconds, (_faults() - before) // repeats))
    return rows


def training_steps(context: RankContext, rows: int) -> tuple[float, int, float, float]:
    """Trains six wide layers and a head of 16384 words: (s a step, faults a step, peak MiB, kernel s in all)."""
    torch.manual_seed(0)
    start_mib = _resident("VmRSS")
    linear = torch.nn.Linear
    layers = [torch.nn.Sequential(linear(384, 1536), torch.nn.GELU(), linear(1536, 384)) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.Embedding(16384, 384), *layers, linear(384, 16384))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.randint(0, 16384, (rows * 256,))
    seconds, before = [], 0
    for step in range(STEPS):
        before = _faults() if step == 2 else before
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(model(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return min(seconds[2:]), (_faults() - before) // (STEPS - 2), _resident("VmHWM") - start_mib, kernel


def main() -> None:
    """Prints both measurements with and without."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    devices = Devices(kind="cpu", count=1, found=1, cores=1)
    for keep in (False, True):
        launcher = ForkLauncher(1, devices=devices, config=LaunchConfig(keep_memory=keep))
        print(f"keep_memory = {keep}")
        for size, speed, faults in launcher.run(operations, timeout_s=120)[0]:
            print(f"  {size:4d} MiB: {speed:6.2f} GiB/s, {faults:6d} faults an operation")
        step_s, faults, peak, kernel = launcher.run(training_steps, rows, timeout_s=300)[0]
        print(f"  {rows} rows: {step_s:.3f} s a step, {faults} faults, peak {peak:.0f} MiB, kernel {kernel:.1f} s")


if __name__ == "__main__":
    main()
