"""Shared memory against gloo between CPU ranks: single collectives, and steps under layouts, in turns in one process.

    python benchmarks/bench_wire.py [--ranks 2] [--layouts tp=2 cp=2 ...] [--steps 8] [--bytes 4096 40960 ...]

Both wires carry the same tensors, and train the same model from the same weights, one call or step after the other by
the same ranks, so whatever else uses the machine disturbs both alike. A ratio above 1 means that shared memory is
faster: of the medians, and of the CPU seconds of all ranks, which foreign programs disturb least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.wire import WireOptions, open_axis_group
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper

OPTIONS = {"gloo": WireOptions(choice="gloo"), "shm": WireOptions(choice="shm")}
WIRES = tuple(OPTIONS)
LAYOUTS = ("replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3", "tp=2", "tp=2,sequence=true", "cp=2")
EXPERT_LAYOUTS = ("shard=2,ep=2,zero=1",)
LIMIT_S = 500.0
WARM_UP, ROUNDS, ROWS = 2, 9, 8
Times = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds of this rank's calls, by wire."""


def _collectives(context: RankContext, sizes: list[int]) -> dict[str, Times]:
    """Times each collective and size on this rank."""
    init_group(context, timeout_s=LIMIT_S, group_s=LIMIT_S)
    torch.set_num_threads(1)
    groups = {
        wire: open_axis_group("world", dist.group.WORLD, TrafficLog(), options) for wire, options in OPTIONS.items()
    }
    found: dict[str, Times] = {}
    for size in sizes:
        repeats = max(2, min(50, 2_000_000 // size))
        for name, call in _calls(context.world, size).items():
            times = found[f"{name} of {size} bytes"] = {wire: [] for wire in WIRES}
            for turn in range(ROUNDS * len(WIRES)):
                wire = WIRES[turn % 2]
                call(groups[wire])
                times[wire].append(_timed(partial(call, groups[wire]), repeats))
    dist.destroy_process_group()
    return found


def _calls(ranks: int, size: int) -> dict[str, Callable[[AxisGroup], object]]:
    """Returns a call of each collective, on ``size`` bytes of float32."""
    whole = torch.zeros(max(1, size // 4 // ranks) * ranks)
    shard, parts = torch.zeros(len(whole) // ranks), list(whole.view(ranks, -1))
    other_parts = list(torch.zeros_like(whole).view(ranks, -1))
    return {
        "all_reduce": lambda group: group.all_reduce(whole).wait(),
        "all_gather": lambda group: group.all_gather(whole, shard).wait(),
        "reduce_scatter": lambda group: group.reduce_scatter(shard, whole).wait(),
        "all_to_all": lambda group: group.all_to_all(other_parts, parts).wait(),
    }


def _timed(call: Callable[[], object], repeats: int = 1) -> tuple[float, float]:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start_s) / repeats, (time.process_time() - start_cpu_s) / repeats


def _steps(context: RankContext, config: ModelConfig, layout: Layout, facts: ModelAnalysis, steps: int) -> Times:
    """Times steps of two equal programs in turns on this rank."""
    init_group(context, timeout_s=LIMIT_S, group_s=LIMIT_S)
    torch.set_num_threads(1)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be measured")
    tokens = torch.randint(
        config.vocab or 0, (ROWS, (config.context or 0) + 1), generator=torch.Generator().manual_seed(1)
    )
    own = tokens[slice(*layout.span(context.rank, ROWS))]
    batches = [MicroBatch(own[:, :-1].contiguous(), own[:, 1:].contiguous(), None)]
    runners: dict[str, Stepper] = {}
    for wire in WIRES:
        program: Any = build_program(build_meta(config), plan, torch.device("cpu"), facts, wire=OPTIONS[wire])
        optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=False)
        runners[wire] = Stepper(program, optimizer, LossScaler(False), clip=1.0, seed=0)
    times: Times = {wire: [] for wire in WIRES}
    losses: dict[str, list[float]] = {wire: [] for wire in WIRES}
    for step in range(WARM_UP + steps):
        for wire in WIRES if step % 2 else reversed(WIRES):
            dist.barrier()

            def run(wire: str = wire, step: int = step) -> None:
                losses[wire].append(runners[wire].run(step, batches, tokens[:, 1:].numel(), 1e-4, 0.0).read()["loss"])

            timed = _timed(run)
            if step >= WARM_UP:
                times[wire].append(timed)
    if not torch.allclose(*(torch.tensor(losses[wire]) for wire in WIRES), rtol=1e-4):
        raise AssertionError(f"{layout}: the two wires train differently: {losses}")
    dist.destroy_process_group()
    return times


def _print_row(name: str, ranks: list[Times]) -> None:
    """Prints the slowest rank's median and least of each wire, and the ratios."""

    def calls_of(wire: str) -> Iterator[tuple[tuple[float, float], ...]]:
        return zip(*(times[wire] for times in ranks))

    slowest = {wire: [max(wall for wall, _ in call) for call in calls_of(wire)] for wire in WIRES}
    median, least = ({wire: choose(slowest[wire]) for wire in WIRES} for choose in (statistics.median, min))
    cpu = {wire: statistics.median(sum(cpu_s for _, cpu_s in call) for call in calls_of(wire)) for wire in WIRES}
    figures = "".join(f"{median[wire] * 1e3:10.3f}{least[wire] * 1e3:10.3f}" for wire in WIRES)
    ratios = "".join(f"{one['gloo'] / max(1e-9, one['shm']):8.2f}" for one in (median, least, cpu))
    print(f"{name:34}{figures}{ratios}", flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of the collectives")
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS, *EXPERT_LAYOUTS])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bytes", type=int, nargs="*", default=[64, 4096, 40960, 400_000, 5_000_000])
    options = parser.parse_args()
    print(f"{'milliseconds':34}{'gloo':>10}{'least':>10}{'shm':>10}{'least':>10}{'ratio':>8}{'least':>8}{'CPU':>8}")
    devices = Devices(kind="cpu", count=options.ranks, found=options.ranks, cores=options.ranks)
    if options.bytes:
        ranks = ForkLauncher(options.ranks, devices=devices).run(_collectives, options.bytes, timeout_s=LIMIT_S)
        for name in ranks[0]:
            _print_row(name, [one[name] for one in ranks])
    for text in options.layouts:
        layout, size = Layout.parse(text), {"layers": 6, "width": 384, "heads": 6, "vocab": 512, "context": 128}
        config = ModelConfig(name="mixtral" if "ep=" in text else "llama", **size)  # type: ignore[arg-type]
        facts = analyse_model(build_meta(config), layout)
        devices = Devices(kind="cpu", count=layout.world, found=layout.world, cores=layout.world)
        ranks = ForkLauncher(layout.world, devices=devices).run(
            _steps, config, layout, facts, options.steps, timeout_s=LIMIT_S
        )
        _print_row(f"step under {text}", ranks)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
