"""What every rank of a run does: join the group, build the layout, train, say how it ended."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError, RankError
from meshwright.events import Event
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import BuiltModel, use_float64
from meshwright.models.draw_trial import may_draw
from meshwright.models.forward import model_output
from meshwright.models.objective import Objective
from meshwright.models.objective_trial import ForwardTrial
from meshwright.monitor.display import RunHeader
from meshwright.monitor.flight import find_recorder
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import PROGRESS, ProgressWriter, node_progress
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build
from meshwright.parallel.context import own_tokens
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.peak_rate import measure_peak
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.transform import DTYPES
from meshwright.spec.layout import Layout
from meshwright.spec.placement import Box
from meshwright.spec.plan import Plan
from meshwright.train.faults import Faults, parse_faults
from meshwright.train.feed import MicroBatch, TokenFeed
from meshwright.train.hooks import Hook
from meshwright.train.loss import cross_entropy_sums
from meshwright.train.memory import Memory, RankMemory
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.own_loss import own_loss_compute
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import LossScaler
from meshwright.train.shortage import is_shortage, report
from meshwright.train.spoiler import Spoiler
from meshwright.train.step import Stepper
from meshwright.train.trainer import Trainer, TrainerDeps


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """What the command hands to every rank."""

    config: RunConfig
    plan: Plan
    model: BuiltModel
    run_dir: Path
    data_dir: Path
    fingerprint: str
    """Of the model's architecture."""
    header: dict[str, str]
    """What the display says about the run."""
    analysis: ModelAnalysis
    """What the layout needs to know of the model."""
    flops_per_token: float
    """Model FLOPs of one token, forward and backward."""
    hooks: tuple[Hook, ...] = ()
    """Called after each step, on every rank."""
    memory: Memory | None = None
    """Where ranks leave their state for those that come after them; None when nobody starts others."""


def model_compute(model: BuiltModel, objective: Objective | None = None) -> Compute:
    """Returns the computation of one micro-batch: forward, and cross-entropy summed over target tokens.

    Args:
        model: on meta.
        objective: its own loss, where that is more than the cross-entropy of its logits.
    """
    if objective is not None and not objective.plain:
        return own_loss_compute(model.structure, objective)

    def compute(
        module: nn.Module, batch: MicroBatch, scale: float, view: LossView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = own_tokens(batch.targets, *view.tokens)
        output = model_output(
            module,
            model.structure,
            batch.tokens,
            batch.targets,
            batch.positions,
            batch.positions is not None,
            token_parts=batch.tokens.shape[1] // targets.shape[1],
        )
        if output.logits is None:
            raise ConfigError("the model's forward gives only a loss, which no trial has read")
        # Some models shape their output as whole rows, of which this rank has a part: the order is the same.
        logits = output.logits.reshape(*targets.shape, output.logits.shape[-1])
        return cross_entropy_sums(logits, targets, scale, view.vocab)

    return compute


def _weights(objective: Objective, batch: MicroBatch) -> torch.Tensor:
    """Returns what a micro-batch counts for in each term, `Objective.weights`."""
    return objective.weights(batch.targets)


def _no_values(name: str, box: Box) -> torch.Tensor:
    """Stands for weights that a state is about to fill: a part that it would leave out shows at once."""
    return torch.full([stop - start for start, stop in box], math.nan)


def build_program(
    model: BuiltModel, plan: Plan, device: torch.device, facts: ModelAnalysis | None = None, filled: bool = True
) -> Program:
    """Builds this rank's program; the default process group must stand.

    Args:
        model: on meta; its module is wrapped and becomes the program's.
        plan: the layout.
        device: where this rank computes.
        facts: from `analyse_model`; read here when not given.
        filled: give weights their first values, which takes as long as to draw or read them; NaN otherwise.
    """
    layout = plan.layout
    source = source_of(model, layout, facts or analyse_model(model, layout), filled)
    mesh = Mesh(layout, device.type, TrafficLog())
    return build(source, layout, mesh, device, StepTimer(device.type))


def source_of(model: BuiltModel, layout: Layout, facts: ModelAnalysis, filled: bool = True) -> ModelSource:
    """Returns a model as `parallel.build` takes it.

    Args:
        model: on meta.
        layout: that it will run under.
        facts: from `analyse_model`, for this layout.
        filled: give weights their first values; NaN otherwise.
    """
    trial = facts.trial or ForwardTrial()
    if layout.precision == "float64":
        use_float64(model.module)
    return ModelSource(
        module=model.module,
        layers=model.structure.layers,
        compute=model_compute(model, trial.objective),
        weigh=None if trial.objective.plain else partial(_weights, trial.objective),
        terms=tuple(term.name for term in trial.objective.reported),
        moving=tuple(buffer.name for buffer in trial.moving),
        fill=model.tensor if filled else _no_values,
        fill_buffers=model.fill_buffers,
        random=may_draw(model) and not layout.compile,
        ties=model.structure.ties,
        table=facts.table,
        layer_graph=facts.layer_graph,
        attention=facts.attention,
        experts=facts.experts,
    )


def _progress(context: RankContext, job: TrainJob) -> Path:
    """Returns the file of this host's stamps: clocks and shared memory end at a host's edge."""
    if context.node is not None:
        return job.run_dir / node_progress(context.node)
    return job.run_dir / (PROGRESS if context.nodes == 1 else f"{socket.gethostname()}-{PROGRESS}")


def _peak(job: TrainJob, stepper: Stepper, device: torch.device) -> float:
    """Returns the matrix-product rate of all ranks together, measured while all of them multiply, or as before."""
    if job.memory is not None and job.memory.peak_flops is not None:
        return job.memory.peak_flops * job.plan.layout.world
    best = max(measure_peak(device, dtype) for dtype in {DTYPES[job.plan.layout.precision], torch.float32})
    own = torch.tensor([best], dtype=torch.float64, device=device)
    return float(stepper.world_sum(own))


def run_rank(context: RankContext, job: TrainJob) -> dict[str, Any]:
    """Trains on this rank; the same call on every rank.

    Returns:
        How the run ended (the same on every rank).
    """
    config = job.config
    init_group(context, timeout_s=config.launch.collective_s, group_s=config.launch.group_s)
    progress = ProgressWriter(_progress(context, job), context.rank, context.generation)
    progress.stamp("start", 0, 0)
    if job.memory is not None and job.memory.flight is not None:
        job.memory.flight.answer(context.local_rank, find_recorder())
    try:
        with contextlib.ExitStack() as stack:
            return _train(context, job, progress, stack)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(context: RankContext, job: TrainJob, progress: ProgressWriter, stack: contextlib.ExitStack) -> Any:
    config, layout = job.config, job.plan.layout
    device = torch.device(context.device)
    program = build_program(job.model, job.plan, device, job.analysis, job.memory is None or job.memory.state is None)
    optimizer = LocalAdamW(program.weights, config.optimizer, on_host=layout.offload == "optimizer")
    stepper = Stepper(
        program,
        optimizer,
        LossScaler(layout.precision == "fp16"),
        clip=config.optimizer.clip,
        seed=config.train.seed,
    )
    token_set = TokenSet.open(job.data_dir)
    faults = _faults(context, job, program, optimizer)
    folder, fence = job.run_dir / "checkpoints", job.memory.fence if job.memory is not None else None
    store = CheckpointStore.build(folder, config.checkpoint, lambda phase: faults.at(f"checkpoint.{phase}"), fence)
    at = (context.rank, context.generation, store.agreement, context.local_rank)
    memory = RankMemory(job.memory, *at) if job.memory is not None else None
    if memory is not None:
        stack.callback(memory.close)  # what was copied counts, whatever ends this rank
    latest = memory.state if memory is not None and memory.state is not None else store.latest()
    header = RunHeader(
        steps=config.train.steps, rows=job.header, progress=_progress(context, job), describe=layout.describe_rank
    )
    monitor = Monitor.build(
        config.monitor, job.run_dir, header, rank=context.rank, resumed_step=latest.step if latest else None
    )
    stack.callback(monitor.close)
    monitor.event(Event(kind="rank_started", rank=context.rank, data={"device": context.device}))
    faults.refuse = partial(_tell_refused, monitor, context.rank)
    origin = Origin(model=job.fingerprint, data=token_set.fingerprint, layout=layout, config=config.to_dict())
    parts = TrainerDeps(
        config=config,
        layout=layout,
        program=program,
        optimizer=optimizer,
        stepper=stepper,
        feed=None,  # type: ignore[arg-type]
        store=store,
        monitor=monitor,
        progress=progress,
        origin=origin,
        rank=context.rank,
        stop_asked=context.stop,
        flops_per_token=job.flops_per_token,
        hooks=job.hooks,
        peak_flops=_peak(job, stepper, device),
        memory=memory,
        faults=faults,
        sick_step=job.memory.sick_step if job.memory is not None else 0,
    )
    trainer = Trainer(parts)
    stack.enter_context(_shortage_told(job.plan, trainer))
    start = trainer.resume() + trainer.passed_over
    feed = _feed(job, token_set, layout.span(context.rank, config.train.batch), device, start)
    stack.callback(feed.close)
    parts.feed = feed
    if context.rank == 0:
        monitor.event(Event(kind="run_started", rank=0, data={"step": trainer.step, "layout": str(layout)}))
    return trainer.run()


@contextlib.contextmanager
def _shortage_told(plan: Plan, trainer: Trainer) -> Iterator[None]:
    """Turns an allocator's error into a report of what was planned and what is held."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise RankError(report(plan, trainer.held(), trainer.place, error)) from error


def _tell_refused(monitor: Monitor, rank: int, path: Path, why: str) -> None:
    """Reports a file that asks for no fault that there is."""
    if rank == 0:
        monitor.event(Event(kind="fault_refused", rank=0, data={"path": str(path), "reason": why}))


def _faults(context: RankContext, job: TrainJob, program: Program, optimizer: LocalAdamW) -> Faults:
    """Returns what is to go wrong on this rank; what belongs to its start happens here."""
    spoiler = Spoiler(program, optimizer)
    known = parse_faults(job.config.recovery.faults)
    return Faults(job.run_dir, context.rank, context.generation, known, spoiler.spoil_gradient, spoiler.flip_bit)


def _feed(job: TrainJob, token_set: TokenSet, span: tuple[int, int], device: torch.device, start: int) -> TokenFeed:
    """Opens this rank's part of the text, from step ``start`` on."""
    data, train = job.config.data, job.config.train
    return TokenFeed(
        token_set,
        rows=train.batch,
        sequence=data.sequence,
        seed=train.seed,
        span=span,
        micro=job.plan.layout.microbatches,
        mask_documents=data.mask_documents,
        device=device,
        start=start,
    )
