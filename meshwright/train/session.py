"""What every rank of a run does: join the group, build the layout, train, say how it ended."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.axes.comm.wire import TrafficLog
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.tokens import TokenSet
from meshwright.events import Event
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import BuiltModel, use_float64
from meshwright.models.forward import model_output
from meshwright.monitor.display import RunHeader
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import PROGRESS, ProgressWriter
from meshwright.plan import Plan
from meshwright.runtime.build import DTYPES, Source, build
from meshwright.runtime.clock import Clock
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.peak import measure_peak
from meshwright.runtime.program import Compute, Program
from meshwright.train.feed import MicroBatch, TokenFeed
from meshwright.train.hooks import Hook
from meshwright.train.loss import IGNORED, cross_entropy_sums
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from meshwright.train.trainer import Parts, Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
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
    flops_per_token: float
    """Model FLOPs of one token, forward and backward."""
    hooks: tuple[Hook, ...] = ()
    """Called after each step, on every rank."""


def model_compute(model: BuiltModel) -> Compute:
    """Returns the computation of one micro-batch: forward, and cross-entropy summed over target tokens.

    A module that gives nothing but its own loss is taken at its word: a mean over its targets, of which no hits are
    known.
    """

    def compute(module: nn.Module, batch: MicroBatch, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        output = model_output(
            module, model.anatomy, batch.tokens, batch.targets, batch.positions, batch.positions is not None
        )
        if output.logits is not None:
            return cross_entropy_sums(output.logits, batch.targets, scale)
        assert output.loss is not None
        count = (batch.targets != IGNORED).sum()
        loss_sum = output.loss.detach().to(torch.float64) * count
        sums = torch.stack([loss_sum, count.to(torch.float64), torch.zeros_like(loss_sum)])
        return output.loss * (count * scale), sums

    return compute


def build_program(model: BuiltModel, plan: Plan, device: torch.device, random: bool) -> Program:
    """Builds this rank's program; the default process group must stand.

    Args:
        model: on meta; its module is wrapped and becomes the program's.
        plan: the layout.
        device: where this rank computes.
        random: whether forward draws random numbers (dropout).
    """
    layout = plan.layout
    if layout.precision == "float64":
        use_float64(model.module)
    source = Source(
        module=model.module,
        layers=[model.module.get_submodule(name) for name in model.anatomy.layers],
        compute=model_compute(model),
        fill=model.tensor,
        fill_buffers=model.fill_buffers,
        random=random,
    )
    mesh = Mesh(layout, device.type, TrafficLog())
    return build(source, layout, mesh, device, Clock(device.type))


def _progress(context: RankContext, job: Job) -> Path:
    """Returns the file of this host's stamps: clocks and shared memory end at a host's edge."""
    return job.run_dir / (PROGRESS if context.nodes == 1 else f"{socket.gethostname()}-{PROGRESS}")


def _peak(stepper: Stepper, device: torch.device, precision: str) -> float:
    """Returns the matrix-product rate of all ranks together, measured while all of them multiply."""
    best = max(measure_peak(device, dtype) for dtype in {DTYPES[precision], torch.float32})
    own = torch.tensor([best], dtype=torch.float64, device=device)
    return float(stepper.world_sum(own))


def run_rank(context: RankContext, job: Job) -> dict[str, Any]:
    """Trains on this rank; the same call on every rank.

    Returns:
        How the run ended (the same on every rank).
    """
    config = job.config
    init_group(context, timeout_s=config.launch.collective_s, group_s=config.launch.group_s)
    progress = ProgressWriter(_progress(context, job), context.rank, context.generation)
    progress.stamp("start", 0, 0)
    try:
        with contextlib.ExitStack() as stack:
            return _train(context, job, progress, stack)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(context: RankContext, job: Job, progress: ProgressWriter, stack: contextlib.ExitStack) -> dict[str, Any]:
    config, layout = job.config, job.plan.layout
    device = torch.device(context.device)
    program = build_program(job.model, job.plan, device, config.model.dropout > 0)
    optimizer = LocalAdamW(program.weights, config.optimizer, on_host=layout.offload == "optimizer")
    reader = layout.reader(context.rank)
    stepper = Stepper(
        program,
        optimizer,
        LossScaler(layout.precision == "fp16"),
        clip=config.optimizer.clip,
        seed=config.train.seed,
        reader=reader[0],
    )
    token_set = TokenSet.open(job.data_dir)
    store = CheckpointStore.build(job.run_dir / "checkpoints", config.checkpoint)
    latest = store.latest()
    header = RunHeader(
        steps=config.train.steps, rows=job.header, progress=_progress(context, job), describe=layout.describe_rank
    )
    monitor = Monitor.build(
        config.monitor, job.run_dir, header, rank=context.rank, resumed_step=latest.step if latest else None
    )
    stack.callback(monitor.close)
    monitor.event(Event(kind="rank_started", rank=context.rank, data={"device": context.device}))
    origin = Origin(model=job.fingerprint, data=token_set.fingerprint, layout=layout, config=config.to_dict())
    parts = Parts(
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
        peak_flops=_peak(stepper, device, layout.precision),
    )
    trainer = Trainer(parts)
    start = trainer.resume()
    feed = _feed(job, token_set, reader, device, start)
    stack.callback(feed.close)
    parts.feed = feed
    if context.rank == 0:
        monitor.event(Event(kind="run_started", rank=0, data={"step": start, "layout": str(layout)}))
    return trainer.run()


def _feed(job: Job, token_set: TokenSet, reader: tuple[int, int], device: torch.device, start: int) -> TokenFeed:
    """Opens this rank's part of the text, from step ``start`` on."""
    data, train = job.config.data, job.config.train
    return TokenFeed(
        token_set,
        rows=train.batch,
        sequence=data.sequence,
        seed=train.seed,
        reader=reader,
        micro=job.plan.layout.microbatches,
        mask_documents=data.mask_documents,
        device=device,
        start=start,
    )
