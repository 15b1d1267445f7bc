"""Runs and times steps of a small model under a layout, to measure the runtime's own cost beside its operators."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.pace import Pace
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import allowed_core_time
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.wire import WireOptions
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper

WARM_UP = 2
"""Untimed steps, which open connections and allocate memory."""


PracticeRun = tuple[ModelConfig, Layout, ModelAnalysis]
"""Sizes of a model, the layout of a run, and the model's analysis for it."""


def practise_parts(
    context: RankContext, runs: Sequence[PracticeRun], rows: int, steps: int, limit_s: float
) -> list[list[dict[str, float]]]:
    """Takes steps on this rank; returns each run's steps by part in seconds of computing, without waiting.

    ``rest`` is everything after backward or the pipeline.

    Args:
        context: of the rank.
        runs: one after the other, over all ranks.
        rows: of the global batch, each of the model's context length.
        steps: number of timed steps.
        limit_s: longest wait for another rank.
    """
    init_group(context, timeout_s=limit_s, group_s=limit_s)
    parts = [_step_parts(context, run, rows, steps, limit_s) for run in runs]
    dist.destroy_process_group()
    return parts


def _step_parts(
    context: RankContext, run: PracticeRun, rows: int, steps: int, limit_s: float
) -> list[dict[str, float]]:
    part_seconds = []
    for step in _run_steps(context, run, rows, steps, limit_s):
        names = ("forward", "backward", "pipeline")
        pass_seconds: dict[str, float] = {name: step.parts[name] for name in names if name in step.parts}
        # The parts are wall-clock times; the thread's share of computing scales them. On a GPU other threads launch
        # too, and operators of next to nothing follow one another as they are launched.
        computing_share = 1.0 if context.device.startswith("cuda") else min(1.0, step.thread_s / step.seconds)
        rest_s = step.seconds - sum(pass_seconds.values())
        part_seconds.append(
            {name: computing_share * seconds for name, seconds in {**pass_seconds, "rest": rest_s}.items()}
        )
    return part_seconds


def practise_paced(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    facts: ModelAnalysis,
    rows: int,
    steps: int,
    limit_s: float,
) -> tuple[list[tuple[float, float, float]], dict[str, int]]:
    """Takes steps as `practise_parts` does; returns (seconds, pace, processor seconds) of each, and state bytes."""
    init_group(context, timeout_s=limit_s, group_s=limit_s)
    timed_steps = list(_run_steps(context, (config, layout, facts), rows, steps, limit_s, paced=True))
    dist.destroy_process_group()
    return [(step.seconds, step.pace_s, step.process_s) for step in timed_steps], timed_steps[-1].state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedStep:
    """A timed step of a rank."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part, from the program's clock."""
    thread_s: float
    """Processor seconds of this thread."""
    process_s: float
    """Processor seconds of all threads of the rank, including those of collectives."""
    pace_s: float
    """Mean of the paces before and after it."""
    state_bytes: dict[str, int]
    """Bytes of state by part."""


def _run_steps(
    context: RankContext, run: PracticeRun, rows: int, steps: int, limit_s: float, paced: bool = False
) -> Iterator[_TimedStep]:
    """Yields each timed step; the process group is there."""
    config, layout, facts = run
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be measured")
    wire = WireOptions(timeout_s=limit_s, cores=allowed_core_time())
    program: Any = build_program(build_meta(config), plan, torch.device(context.device), facts, wire=wire)
    optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=False)
    stepper = Stepper(program, optimizer, LossScaler(False), clip=1.0, seed=0)
    batches = _random_batches(layout, context.rank, config, rows, context.device)
    targets = rows * int(config.context or 0)
    pace = Pace(torch.device(context.device)) if paced else None
    for step in range(WARM_UP + steps):
        dist.barrier()
        # Barriers on both sides: the probe must not run beside another rank's step.
        pace_s = pace.seconds() if pace else 0.0
        dist.barrier()
        program.step_timer.drain()
        start_times = time.perf_counter(), time.thread_time(), time.process_time()
        stepper.run(step, batches, targets, 1e-4, 0.0).read()
        seconds, thread_s, process_s = (
            read_clock() - start_time
            for read_clock, start_time in zip((time.perf_counter, time.thread_time, time.process_time), start_times)
        )
        # Warm-up steps run the same code, but aren't recorded.
        if step < WARM_UP:
            continue
        parts = program.step_timer.drain()
        if pace:
            dist.barrier()
            # Speed before and after the step: their mean is the speed during it.
            pace_s = (pace_s + pace.seconds()) / 2
        state_bytes = program.state_meter.read(optimizer.bytes())
        yield _TimedStep(
            seconds=seconds, parts=parts, thread_s=thread_s, process_s=process_s, pace_s=pace_s, state_bytes=state_bytes
        )


def _random_batches(layout: Layout, rank: int, config: ModelConfig, rows: int, device: str) -> list[MicroBatch]:
    """Draws this rank's micro-batches of random tokens: (rows, S) int64 each."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab or 1000, (rows, int(config.context or 0) + 1), generator=generator).to(
        device
    )
    # Every rank draws all rows from one seed and keeps its own.
    own_rows = slice(*layout.span(rank, rows))
    micro_batches = zip(
        token_ids[own_rows, :-1].chunk(layout.microbatches), token_ids[own_rows, 1:].chunk(layout.microbatches)
    )
    return [MicroBatch(tokens.contiguous(), targets.contiguous(), None) for tokens, targets in micro_batches]
