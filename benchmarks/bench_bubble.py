"""The bubble of a balanced pipeline, measured, beside what the simulator says of the same list of actions.

    python benchmarks/bench_bubble.py [--ranks 2] [--micro 4,8] [--schedules 1f1b,zbv] [--steps 8] [--json OUT]

A llama of equal layers and a tiny vocabulary is cut into equal stages and run by meshwright's own pipeline, one rank a
core. Every action is timed where it runs; its medians, and the time of a send, are the simulator's costs. Idle is what
isn't inside an action: waiting for another rank, and the runtime's own work between actions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import ForeignLoad, wait_until_quiet

from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import known_schedules
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.session import build_program

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 8, 384, 6, 64, 128
WARM_UP = 2
LIMIT_S = 300.0
PLACES = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}
"""Methods of a stage that are one kind of action; a backward is B or I by its arguments."""


@dataclass(frozen=True)
class Timed:
    """One action as it ran."""

    stage: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Row:
    """One schedule, measured and simulated."""

    schedule: str
    micro: int
    ideal: float
    """Simulated bubble where F = I = W and sends are free."""
    simulated: float
    """Simulated bubble at the measured costs."""
    measured: float
    """Median bubble of the steps."""
    simulated_s: float
    """Simulated time from the first action's start to the last one's end."""
    measured_s: float
    """The same, measured."""
    send_s: float
    costs_s: dict[str, list[float]]
    """Median seconds of each kind, by stage."""
    foreign: float
    """Cores that other programs kept busy meanwhile: above 0.2 the figures mean little."""


def main() -> int:
    """Prints a line for each schedule and number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="no more than there are cores")
    parser.add_argument("--micro", default="4,8", help="micro-batches, separated by commas")
    parser.add_argument("--rows", type=int, default=2, help=f"rows of {TOKENS} tokens a micro-batch")
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zerobubble,zbv")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    cores = len(os.sched_getaffinity(0))
    if options.ranks > cores:
        parser.error(f"--ranks {options.ranks}: {cores} cores; ranks that share a core measure nothing")
    names = (("schedule", "<12"), ("micro", ">6"), ("F=I=W", ">8"), ("simulated", ">11"), ("measured", ">10"))
    head = "".join(f"{name:{width}}" for name, width in (*names, ("step ms", ">9"), ("of simulated", ">14")))
    print(head + f"{'foreign cores':>15}")
    rows = []
    for micro in (int(word) for word in options.micro.split(",")):
        for name in options.schedules.split(","):
            rows.append(_row(name, micro, options))
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def line(row: Row) -> str:
    """Formats a row."""
    return (
        f"{row.schedule:<12}{row.micro:>6}{row.ideal:>8.1%}{row.simulated:>11.1%}{row.measured:>10.1%}"
        f"{row.measured_s * 1e3:>9.0f}{row.measured_s / row.simulated_s:>14.2f}{row.foreign:>15.2f}"
    )


def _row(name: str, micro: int, options: argparse.Namespace) -> Row:
    stages = options.ranks * known_schedules()[name].least_stages
    split = "-".join([str(LAYERS // stages)] * stages)
    layout = Layout.parse(f"pp={options.ranks},schedule={name},microbatches={micro},split={split}")
    schedule = layout.pipeline()
    config = ModelConfig(name="llama", layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCABULARY, context=TOKENS)
    facts = analyse_model(build_meta(config), layout)
    devices = Devices(kind="cpu", count=options.ranks, found=options.ranks, cores=options.ranks)
    wait_until_quiet()
    meter = ForeignLoad()
    found = ForkLauncher(options.ranks, devices=devices).run(
        run_rank, config, layout, facts, options.rows, options.steps, timeout_s=LIMIT_S
    )
    foreign, send_s = meter.read(), found[0][1]
    by_step = [[one for rank, _ in found for one in rank[step]] for step in range(options.steps)]
    costs = _costs([one for step in by_step for one in step], stages, send_s)
    simulation = simulate(schedule, costs)
    spans = [max(one.end_s for one in step) - min(one.start_s for one in step) for step in by_step]
    idle = [
        1.0 - sum(one.end_s - one.start_s for one in step) / (span * options.ranks)
        for step, span in zip(by_step, spans)
    ]
    return Row(
        schedule=name,
        micro=micro,
        ideal=simulate(schedule, ActionCosts.uniform(stages)).bubble,
        simulated=simulation.bubble,
        measured=statistics.median(idle),
        simulated_s=simulation.makespan_s,
        measured_s=statistics.median(spans),
        send_s=send_s,
        costs_s={key: list(getattr(costs, key)) for key in ("forward_s", "backward_s", "input_s", "weight_s")},
        foreign=foreign,
    )


def _costs(actions: list[Timed], stages: int, send_s: float) -> ActionCosts:
    """Medians of each kind of action by stage; a kind that doesn't occur costs nothing."""
    seen: dict[tuple[int, str], list[float]] = {}
    for one in actions:
        seen.setdefault((one.stage, one.kind), []).append(one.end_s - one.start_s)

    def of(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(seen.get((stage, kind), [0.0])) for stage in range(stages))

    return ActionCosts(forward_s=of("F"), backward_s=of("B"), input_s=of("I"), weight_s=of("W"), send_s=send_s)


def run_rank(
    context: RankContext, config: ModelConfig, layout: Layout, facts: ModelAnalysis, rows: int, steps: int
) -> tuple[list[list[Timed]], float]:
    """Runs steps on this rank; returns each one's actions, and the seconds of a send."""
    init_group(context, timeout_s=LIMIT_S, group_s=LIMIT_S)
    torch.set_num_threads(1)
    program: Any = build_program(build_meta(config), _plan(layout), torch.device("cpu"), facts)
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (layout.microbatches, rows, TOKENS + 1))
    batches = [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), None) for part in tokens]
    scale = 1.0 / (layout.microbatches * rows * TOKENS)
    taken: list[Timed] = []
    found = []
    for step in range(WARM_UP + steps):
        dist.barrier()
        program.forward_backward(batches, scale, (0, 0))
        program.clear_gradients()
        if step == 0:
            # The stages are there from the first step on.
            for stage in program._current_run[1]._stages:
                _watch(stage, taken)
        elif step >= WARM_UP:
            found.append(list(taken))
        taken.clear()
    send_s = _send_time(torch.zeros(rows, TOKENS, WIDTH), program.mesh.axis_groups["pp"].group)
    dist.destroy_process_group()
    return found, send_s


def _plan(layout: Layout) -> Plan:
    return Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be measured")


def _watch(stage: Any, taken: list[Timed]) -> None:
    """Times each action of a stage of torch's runtime."""

    def timed(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kind = PLACES.get(name) or ("B" if kwargs.get("full_backward", True) else "I")
            start_s = time.perf_counter()
            given = plain(*args, **kwargs)
            taken.append(Timed(stage.stage_index, kind, start_s, time.perf_counter()))
            return given

        return run

    for name in (*PLACES, "backward_one_chunk"):
        setattr(stage, name, timed(name, getattr(stage, name)))


def _send_time(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Half the median time of a tensor to the next rank and back, of ranks that come in pairs."""
    rank, peers = dist.get_rank(group), dist.get_process_group_ranks(group)
    other = rank ^ 1
    laps = []
    for _ in range(20):
        if other >= len(peers):
            break
        begun = time.perf_counter()
        for sends in (rank < other, rank > other):
            (dist.send if sends else dist.recv)(tensor, peers[other], group=group)
        laps.append((time.perf_counter() - begun) / 2)
    return statistics.median(laps) if laps else 0.0


if __name__ == "__main__":
    sys.exit(main())
