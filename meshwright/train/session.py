# long: what a rank of a run does from its start to its end is one noun
"""The work of every rank: join the process group, build the layout's program, train, return the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cluster import catalogue
from meshwright.data.tokens import TokenSet
from meshwright.errors import ClusterError, ConfigError, RankError
from meshwright.events import Event
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import allowed_core_time
from meshwright.launch.rendezvous import init_group
from meshwright.models.analysis.objective import Objective
from meshwright.models.analysis.objective_trial import ForwardTrial
from meshwright.models.attention import VARLEN, use_varlen
from meshwright.models.build import BuiltModel, use_float64
from meshwright.models.forward import call_model, model_output
from meshwright.models.random_draws import may_draw
from meshwright.monitor.display import RunHeader
from meshwright.monitor.flight import find_recorder
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import PROGRESS, ProgressWriter, node_progress
from meshwright.monitor.timeline import TimelineWriter
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build
from meshwright.parallel.context import local_tokens
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.peak_memory import forget_peak
from meshwright.parallel.peak_rate import measure_peak
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.tf32 import float32_products
from meshwright.parallel.transform import DTYPES
from meshwright.parallel.wire import AUTO, WireOptions
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import LossChunk
from meshwright.spec.placement import Box
from meshwright.spec.plan import Plan
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.config import OuterConfig
from meshwright.train.faults import Faults, parse_faults
from meshwright.train.feed import MicroBatch, TokenFeed
from meshwright.train.hooks import Hook
from meshwright.train.loss import cross_entropy_sums
from meshwright.train.memory import RankMemory, RecoveryMemory
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.outcome import TrainOutcome
from meshwright.train.outer import OuterOptimizer
from meshwright.train.own_loss import own_loss_compute
from meshwright.train.page_requests import PageRequests
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import LossScaler
from meshwright.train.share_balance import ShareBalancer, ShareChange, fixed_shares_reason
from meshwright.train.shortage import is_shortage, report
from meshwright.train.site_optimizer import SiteOptimizer
from meshwright.train.spoiler import Spoiler
from meshwright.train.stage_times import TimePublisher
from meshwright.train.step import Stepper
from meshwright.train.trainer import Trainer
from meshwright.train.trainer_deps import TrainerDeps


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """A training job, as the command passes it to every rank."""

    config: RunConfig
    plan: Plan
    model: BuiltModel
    run_dir: Path
    data_dir: Path
    fingerprint: str
    """Fingerprint of the model's architecture."""
    header: dict[str, str]
    """Lines of the display's header."""
    analysis: ModelAnalysis
    """The model's sharding table, layer graph and own loss, as far as the layout needs them."""
    flops_per_token: float
    """Model FLOPs of one token, forward and backward."""
    hooks: tuple[Hook, ...] = ()
    """Called after each step, on every rank."""
    memory: RecoveryMemory | None = None
    """Memory shared with the supervisor; None without one."""
    page_requests: PageRequests | None = None
    """What the page asks for, where this node's command serves it."""

    @property
    def outer(self) -> OuterConfig:
        """How islands join: as the user said, and else as planned."""
        return self.config.outer.filled(self.plan.outer)


def model_compute(model: BuiltModel, trial: ForwardTrial, loss_chunk: LossChunk) -> Compute:
    """Returns the computation of one micro-batch: forward, and cross-entropy summed over target tokens.

    Args:
        model: on the meta device.
        trial: of its forward: its own loss, if that is more than the cross-entropy of its logits, and its head.
        loss_chunk: tokens whose logits exist at once, where the forward may end in front of the head.
    """
    if not trial.objective.plain:
        return own_loss_compute(model.structure, trial.objective)

    def compute(
        module: nn.Module, batch: MicroBatch, scale: float, view: LossView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Under cp this rank has some tokens of each row: targets are cut like them (`local_tokens`).
        targets = local_tokens(batch.targets, *view.tokens)
        has_documents = batch.positions is not None
        arguments = (module, model.structure, batch.tokens, batch.targets, batch.positions, has_documents)
        if view.head_cut is not None:

            def chunked_loss(head: HeadInput) -> tuple[torch.Tensor, torch.Tensor]:
                chunk = loss_chunk.size(targets.numel(), len(head.weight), head.hidden.device.type == "cpu")
                return head_cross_entropy_sums(head, targets, scale, chunk, trial.head.logit_map, view.vocab)

            return view.head_cut.run(lambda: call_model(*arguments, bounds=batch.bounds), chunked_loss)
        output = model_output(*arguments, token_parts=batch.tokens.shape[1] // targets.shape[1], bounds=batch.bounds)
        if output.logits is None:
            raise ConfigError("the model's forward gives only a loss, which no trial has read")
        # Models that reshape to full rows give the same elements in the same order: a reshape restores (B, S_local, V).
        logits = output.logits.reshape(*targets.shape, output.logits.shape[-1])
        return cross_entropy_sums(logits, targets, scale, view.vocab)

    return compute


def _weights(objective: Objective, batch: MicroBatch) -> torch.Tensor:
    """Returns a micro-batch's weight in each term of the loss (`Objective.weights`)."""
    return objective.weights(batch.targets)


def _no_values(name: str, box: Box) -> torch.Tensor:
    """Returns a box of NaN for weights that a checkpoint will fill: an element that it misses shows at once."""
    return torch.full([stop - start for start, stop in box], math.nan)


def build_program(
    model: BuiltModel,
    plan: Plan,
    device: torch.device,
    facts: ModelAnalysis | None = None,
    filled: bool = True,
    wire: WireOptions = AUTO,
) -> Program:
    """Builds this rank's program; the default process group must be initialised.

    Args:
        model: on the meta device; its module is wrapped and becomes the program's.
        plan: the layout.
        device: where this rank computes.
        facts: from `analyse_model`; read here when not given.
        filled: whether to draw or read initial weights; NaN otherwise.
        wire: how collectives of CPU ranks travel.
    """
    layout = plan.layout
    source = make_model_source(model, layout, facts or analyse_model(model, layout), filled)
    mesh = Mesh(layout, device.type, TrafficLog(), wire)
    return build(source, layout, mesh, device, StepTimer(device.type))


def make_model_source(model: BuiltModel, layout: Layout, facts: ModelAnalysis, filled: bool = True) -> ModelSource:
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
    # Gathering cuts dense masks, and keeps the model's own; a ring needs masks that say what they hide.
    in_ring = facts.attention == "ring" and model.structure.transformers
    if in_ring or (model.config.attention == VARLEN and facts.attention != "gather"):
        use_varlen(model.module, in_ring)
    return ModelSource(
        module=model.module,
        layers=model.structure.layers,
        compute=model_compute(model, trial, layout.loss_chunk),
        halve=MicroBatch.halves,
        head=trial.head.name,
        ends=trial.ends,
        weigh=None if trial.objective.plain else partial(_weights, trial.objective),
        terms=tuple(term.name for term in trial.objective.reported),
        width=model.structure.width or 0,
        counts_targets=trial.objective.counts_targets,
        moving=tuple(buffer.name for buffer in trial.moving),
        fill=model.tensor if filled else _no_values,
        fill_buffers=model.fill_buffers,
        keeps_copies=True,
        random=may_draw(model) and not layout.compile,
        ties=model.structure.ties,
        table=facts.table,
        layer_graph=facts.layer_graph,
        attention=facts.attention,
        experts=facts.experts,
    )


def _progress_path(context: RankContext, job: TrainJob) -> Path:
    """Returns the path of this host's progress file; clocks and shared memory aren't shared between hosts."""
    if context.node is not None:
        return job.run_dir / node_progress(context.node)
    return job.run_dir / (PROGRESS if context.nodes == 1 else f"{socket.gethostname()}-{PROGRESS}")


def _local_peak_flops(job: TrainJob, device: torch.device) -> float | None:
    """Returns the FLOP/s of this rank's matrix products, measured on all at once; None where previous ranks did.

    Measured before anything else is on the device, whose memory of that is no part of what the run has used.
    """
    if job.memory is not None and job.memory.peak_flops is not None:
        return None
    best = max(measure_peak(device, dtype) for dtype in {DTYPES[job.plan.layout.precision], torch.float32})
    forget_peak()
    return best


def _peak_flops(job: TrainJob, stepper: Stepper, device: torch.device, local_best: float | None) -> float:
    """Returns the FLOP/s of all ranks' matrix products."""
    if local_best is None:
        assert job.memory is not None and job.memory.peak_flops is not None
        return job.memory.peak_flops * job.plan.layout.world
    local_rate = torch.tensor([local_best], dtype=torch.float64, device=device)
    return float(stepper.world_sum(local_rate))


def _agree_on_kernels(stepper: Stepper, optimizer: LocalAdamW, device: torch.device) -> None:
    """Has one kernel run the updates of all ranks: copies of a weight would else drift apart by their last bits."""
    lacking = stepper.world_sum(torch.tensor([optimizer.lacks_kernels], dtype=torch.float64, device=device))
    if float(lacking):
        optimizer.leave_kernels()


def _data_sheet_flops(layout: Layout, stepper: Stepper, device: torch.device) -> float | None:
    """Returns the dense FLOP/s of all ranks' devices by their data sheets; None where one has none.

    Source: Chowdhery et al., PaLM (2022), section 4.1, measures utilisation against the theoretical peak.
    """
    local_peak = math.nan
    if device.type == "cuda":
        with contextlib.suppress(ClusterError):  # a GPU that the catalogue doesn't know, or without such a rate
            data_sheet = catalogue.device(torch.cuda.get_device_name(device))
            local_peak = data_sheet.peak(layout.product_precision or layout.compute_precision)
    peak = float(stepper.world_sum(torch.tensor([local_peak], dtype=torch.float64, device=device)))
    return None if math.isnan(peak) else peak


def run_rank(context: RankContext, job: TrainJob) -> TrainOutcome:
    """Trains on this rank; the same call on every rank.

    Returns:
        How the run ended (the same on every rank).
    """
    config = job.config
    # Before anything that may hang: its limit also reports ranks that never started.
    init_group(context, timeout_s=config.launch.collective_s, group_s=config.launch.group_s)
    progress = ProgressWriter(_progress_path(context, job), context.rank, context.generation)
    # The watcher's limits for the start count from this stamp.
    progress.stamp("start", 0, 0)
    if job.memory is not None and job.memory.flight is not None:
        job.memory.flight.answer(context.local_rank, find_recorder())
    try:
        with contextlib.ExitStack() as stack:
            return _train(context, job, progress, stack)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(context: RankContext, job: TrainJob, progress: ProgressWriter, stack: contextlib.ExitStack) -> TrainOutcome:
    config, layout, device = job.config, job.plan.layout, torch.device(context.device)
    if layout.precision == "tf32":
        # Also while the rate of products is measured; where the process goes on, as under torchrun, it is as before.
        stack.enter_context(float32_products(rounded=True))
    local_peak_flops = _local_peak_flops(job, device)
    filled = job.memory is None or job.memory.state is None
    program = build_program(job.model, job.plan, device, job.analysis, filled, _wire_options(context, config))
    optimizer = LocalAdamW(program.weights, config.optimizer, on_host=layout.offload == "optimizer")
    scaler = LossScaler(layout.precision == "fp16")
    stepper = Stepper(program, optimizer, scaler, clip=config.optimizer.clip, seed=config.train.seed)
    _agree_on_kernels(stepper, optimizer, device)
    optimizer.outer = outer = _make_outer(job, program, optimizer)
    stepper.outer = outer if isinstance(outer, OuterOptimizer) else None
    token_set = TokenSet.open(job.data_dir)
    faults = _make_faults(context, job, program, optimizer)
    folder, fence = job.run_dir / "checkpoints", job.memory.fence if job.memory is not None else None
    store = CheckpointStore.build(folder, config.checkpoint, lambda phase: faults.reach(f"checkpoint.{phase}"), fence)
    memory = _open_memory(context, job, store, stack)
    latest = memory.state if memory is not None and memory.state is not None else store.latest()
    header = RunHeader(
        steps=config.train.steps, rows=job.header, progress=_progress_path(context, job), describe=layout.describe_rank
    )
    monitor = Monitor.build(
        config.monitor, job.run_dir, header, rank=context.rank, resumed_step=latest.step if latest else None
    )
    monitor.on_shown = job.memory.control.publish_shown if job.memory is not None else None
    stack.callback(monitor.close)
    monitor.event(Event(kind="rank_started", rank=context.rank, data={"device": context.device}))
    faults.refuse = partial(_report_refused_fault, monitor, context.rank)
    origin = Origin(model=job.fingerprint, data=token_set.fingerprint, layout=layout, config=config.to_dict())
    deps = TrainerDeps(
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
        peak_flops=_peak_flops(job, stepper, device, local_peak_flops),
        data_sheet_flops=_data_sheet_flops(job.plan.layout, stepper, device),
        memory=memory,
        faults=faults,
        outer=outer,
        timeline=_make_timeline(context, job, monitor, stack),
        page_requests=job.page_requests if context.local_rank == 0 else None,
        anomalous_step=job.memory.anomalous_step if job.memory is not None else 0,
        reads_late=device.type == "cuda",
    )
    trainer = Trainer(deps)
    stack.enter_context(_reporting_shortage(job.plan, trainer))
    start = trainer.resume() + trainer.passed_over
    stack.enter_context(trainer.dialled_in())
    feed = deps.feed = _make_feed(job, token_set, layout.span(context.rank, config.train.batch), device, start)
    stack.callback(feed.close)
    deps.hooks = (*deps.hooks, *_speed_hooks(context, job, program, feed, monitor))
    if context.rank == 0:
        monitor.event(Event(kind="run_started", rank=0, data=_started_facts(trainer, program, layout, device)))
    return trainer.run()


def _wire_options(context: RankContext, config: RunConfig) -> WireOptions:
    """Returns how this rank's collectives travel."""
    node = "" if context.node is None else str(context.node)
    limit_s, cores = config.launch.collective_s, allowed_core_time()
    return WireOptions(choice=config.launch.wire, node=node, timeout_s=limit_s, cores=cores)


def _started_facts(trainer: Trainer, program: Program, layout: Layout, device: torch.device) -> dict[str, object]:
    """Returns what the event of a run's start says."""
    facts: dict[str, object] = {"step": trainer.step, "layout": str(layout)}
    if program.mesh is not None and device.type == "cpu":
        facts["wire"] = program.mesh.describe_wire()
    return facts


def _open_memory(
    context: RankContext, job: TrainJob, store: CheckpointStore, stack: contextlib.ExitStack
) -> RankMemory | None:
    """Returns the memory that outlives this rank; None without a supervisor."""
    if job.memory is None:
        return None
    memory = RankMemory(job.memory, context.rank, context.generation, store.agreement, context.local_rank)
    stack.callback(memory.close)  # what was copied counts, whatever ends this rank
    return memory


def _make_timeline(
    context: RankContext, job: TrainJob, monitor: Monitor, stack: contextlib.ExitStack
) -> TimelineWriter | None:
    """Returns what records this rank's steps; None where they aren't wanted, or the disk refuses."""
    every = job.config.monitor.timeline_every
    if not every:
        return None
    try:
        timeline = TimelineWriter(job.run_dir, context.rank, every)
    except OSError as error:
        monitor.event(Event(kind="monitor_failed", rank=context.rank, data={"part": "timeline", "error": str(error)}))
        return None
    stack.callback(timeline.close)
    return timeline


@contextlib.contextmanager
def _reporting_shortage(plan: Plan, trainer: Trainer) -> Iterator[None]:
    """Turns an allocator's error into a report of planned and measured bytes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise RankError(report(plan, trainer.state_bytes(), trainer.position, error)) from error


def _report_refused_fault(monitor: Monitor, rank: int, path: Path, reason: str) -> None:
    """Reports a fault request that can't be parsed."""
    if rank == 0:
        monitor.event(Event(kind="fault_refused", rank=0, data={"path": str(path), "reason": reason}))


def _speed_hooks(
    context: RankContext, job: TrainJob, program: Program, feed: TokenFeed, monitor: Monitor
) -> list[Hook]:
    """Returns the hooks that follow the ranks' speeds: one that moves rows, one that publishes times."""
    hooks: list[Hook] = []
    train, layout = job.config.train, job.plan.layout
    # After a loss of ranks a layout may be left whose shares can't change.
    if train.rebalance and not fixed_shares_reason(train, layout, job.analysis.rows):
        hooks.append(_make_balancer(context, job, program, feed, monitor))
    if job.memory is not None and job.memory.times is not None:
        assert program.mesh is not None  # `can_replan`: there are several ranks
        hooks.append(TimePublisher(job.memory.times, context.local_rank, train.replan, program.mesh.log))
    return hooks


def _make_balancer(
    context: RankContext, job: TrainJob, program: Program, feed: TokenFeed, monitor: Monitor
) -> ShareBalancer:
    """Returns the hook that moves rows between readers; rank 0 reports the changes, which all ranks know."""
    assert program.mesh is not None  # `fixed_shares_reason`: there are several readers

    def report_change(change: ShareChange) -> None:
        if context.rank == 0:
            monitor.event(Event(kind="shares_changed", rank=0, data=dataclasses.asdict(change)))

    return ShareBalancer(
        program,
        program.mesh,
        feed,
        job.config.train,
        report_change,
        local_ranks=context.local_world,
        unit=job.analysis.rows,
    )


def _make_faults(context: RankContext, job: TrainJob, program: Program, optimizer: LocalAdamW) -> Faults:
    """Returns this rank's injected faults; those at its start strike here."""
    spoiler = Spoiler(program, optimizer)
    configured = parse_faults(job.config.recovery.faults)
    return Faults(job.run_dir, context.rank, context.generation, configured, spoiler.spoil_gradient, spoiler.flip_bit)


def _make_outer(job: TrainJob, program: Program, optimizer: LocalAdamW) -> OuterOptimizer | SiteOptimizer | None:
    """Returns what joins the islands, or this site with others; None where there is neither."""
    if job.config.outer.meet:
        return SiteOptimizer(program, job.config, job.fingerprint, optimizer.weights_changed)
    if job.plan.layout.islands == 1:
        return None
    return OuterOptimizer(program, job.outer, optimizer.weights_changed)


def _make_feed(
    job: TrainJob, token_set: TokenSet, span: tuple[int, int], device: torch.device, start: int
) -> TokenFeed:
    """Opens this rank's rows of the data, from step ``start`` on."""
    data, train = job.config.data, job.config.train
    return TokenFeed(
        token_set,
        rows=train.batch,
        sequence=data.sequence,
        seed=train.seed,
        span=span,
        micro=job.plan.layout.microbatches,
        mask_documents=data.mask_documents,
        packing=data.resolved_packing,
        device=device,
        start=start,
        site=(job.config.outer.site, job.config.outer.sites) if job.config.outer.meet else (0, 1),
    )
