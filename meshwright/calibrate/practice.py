"""Steps of a small model under a layout, timed: what the runtime itself takes beside the operators it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.pace import Pace
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
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
"""Steps that don't count: in them connections open and memory is got."""


def practise(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    facts: ModelAnalysis,
    rows: int,
    steps: int,
    limit_s: float,
) -> tuple[list[float], dict[str, int]]:
    """Runs steps on this rank.

    Args:
        context: of the rank.
        config: a model by its sizes.
        layout: to run it under.
        facts: what the layout needs of the model.
        rows: of the global batch, of as many tokens as the model's context.
        steps: that are timed.
        limit_s: of every wait.

    Returns:
        Seconds of each step, and bytes of state by part.
    """
    found = list(_steps(context, config, layout, facts, rows, steps, limit_s))
    return [one.seconds for one in found], found[-1].held


def practise_parts(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    facts: ModelAnalysis,
    rows: int,
    steps: int,
    limit_s: float,
) -> list[dict[str, float]]:
    """As `practise`; returns each step's parts in seconds that the thread computed, not those in which it waited.

    ``rest`` is all that follows backward or the pipeline.
    """
    found = []
    for one in _steps(context, config, layout, facts, rows, steps, limit_s):
        names = ("forward", "backward", "pipeline")
        passes: dict[str, float] = {name: one.parts[name] for name in names if name in one.parts}
        share = min(1.0, one.thread_s / one.seconds)
        rest = one.seconds - sum(passes.values())
        found.append({name: share * seconds for name, seconds in {**passes, "rest": rest}.items()})
    return found


def practise_paced(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    facts: ModelAnalysis,
    rows: int,
    steps: int,
    limit_s: float,
) -> tuple[list[tuple[float, float, float]], dict[str, int]]:
    """As `practise`; returns (seconds, pace around it, processor seconds) of each step, and bytes of state by part."""
    found = list(_steps(context, config, layout, facts, rows, steps, limit_s, paced=True))
    return [(one.seconds, one.pace_s, one.process_s) for one in found], found[-1].held


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedStep:
    """A timed step of a rank."""

    seconds: float
    parts: dict[str, float]
    """Of them, by the program's clock."""
    thread_s: float
    """In which this thread computed."""
    process_s: float
    """In which all threads of the rank did: those of collectives too."""
    pace_s: float
    """Mean of the paces before and after it."""
    held: dict[str, int]
    """Bytes of state by part."""


def _steps(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    facts: ModelAnalysis,
    rows: int,
    steps: int,
    limit_s: float,
    paced: bool = False,
) -> Iterator[_TimedStep]:
    """Yields each timed step."""
    init_group(context, timeout_s=limit_s, group_s=limit_s)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be measured")
    program: Any = build_program(build_meta(config), plan, torch.device(context.device), facts)
    optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=False)
    stepper = Stepper(program, optimizer, LossScaler(False), clip=1.0, seed=0)
    batches = _batches(layout, context.rank, config, rows, context.device)
    targets = rows * int(config.context or 0)
    pace = Pace(torch.device(context.device)) if paced else None
    for step in range(WARM_UP + steps):
        dist.barrier()
        pace_s = pace.seconds() if pace else 0.0
        dist.barrier()
        program.clock.drain()
        began = time.perf_counter(), time.thread_time(), time.process_time()
        stepper.run(step, batches, targets, 1e-4, 0.0).read()
        seconds, thread_s, process_s = (
            now() - then for now, then in zip((time.perf_counter, time.thread_time, time.process_time), began)
        )
        if step < WARM_UP:
            continue
        parts = program.clock.drain()
        if pace:
            dist.barrier()
            pace_s = (pace_s + pace.seconds()) / 2
        held = program.meter.read(optimizer.bytes())
        yield _TimedStep(seconds=seconds, parts=parts, thread_s=thread_s, process_s=process_s, pace_s=pace_s, held=held)
    dist.destroy_process_group()


def _batches(layout: Layout, rank: int, config: ModelConfig, rows: int, device: str) -> list[MicroBatch]:
    """Returns this rank's micro-batches of random tokens."""
    draw = torch.Generator().manual_seed(0)
    stream = torch.randint(0, config.vocab or 1000, (rows, int(config.context or 0) + 1), generator=draw).to(device)
    mine = slice(*layout.span(rank, rows))
    parts = zip(stream[mine, :-1].chunk(layout.microbatches), stream[mine, 1:].chunk(layout.microbatches))
    return [MicroBatch(tokens.contiguous(), targets.contiguous(), None) for tokens, targets in parts]
