"""Makes a layout true: runs the layout's transforms over a meta module, in order, then gives it its memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import PlanError
from meshwright.parallel.compute_copies import MasterGradients
from meshwright.parallel.error_feedback import ErrorFeedback
from meshwright.parallel.expert_load import ExpertMeter
from meshwright.parallel.feedback_compressor import FeedbackCompressor
from meshwright.parallel.fsdp import FsdpSync
from meshwright.parallel.halves import Halves
from meshwright.parallel.keyed_random import DrawnStates
from meshwright.parallel.materialise import materialise
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_checkpointing import restore_first_run_in
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.partial_grads import PartialGradReducer
from meshwright.parallel.pipeline import PipelineProgram
from meshwright.parallel.pipeline_stages import PipelineStageModule
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.transform import TransformContext, transforms
from meshwright.parallel.turns import Held, Turns
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics, Reads
from meshwright.spec.layout import Layout


def check(layout: Layout, device_type: str, layers: int) -> None:
    """Refuses what a device or model can't run, before a rank starts.

    Raises:
        PlanError: with the rule and the nearest layout that works.
    """
    if layout.offload != "none" and device_type == "cpu":
        raise PlanError(
            f"offload={layout.offload} moves state from a GPU to host memory, but the ranks compute on the CPU, whose "
            "memory that is; leave offload out"
        )
    _check_mechanics(layout)
    for transform in transforms():
        transform.check(layout, layers)


def _check_mechanics(layout: Layout) -> None:
    """Refuses an axis of which nothing says how modules change: its ranks would all compute the same."""
    with_transform = {transform.axis for transform in transforms()}
    for axis in (known_axes()[name] for name in layout.degrees):
        if axis.mechanics is Mechanics.NONE and axis.reads is not Reads.ROWS:
            raise PlanError(
                f"axis {axis.name} reads {axis.reads.value} and changes no module (mechanics NONE), so its ranks would "
                f"compute the same; give its AXIS the mechanics that it has, or leave {axis.name} out"
            )
        if axis.mechanics is not Mechanics.NONE and axis.name not in with_transform:
            raise PlanError(
                f"axis {axis.name} changes modules ({axis.mechanics.name.lower()}), but no file of parallel/ has a "
                f"TRANSFORM with axis='{axis.name}'; add one, or leave {axis.name} out"
            )


def apply_transforms(source: ModelSource, layout: Layout, mesh: Mesh | None) -> TransformContext:
    """Runs every transform that the layout asks for over the source's module, which stays on the meta device.

    Args:
        source: the model.
        layout: what to make true.
        mesh: ranks and groups; None for one rank without a process group.

    Returns:
        This rank's stages and what the loss must know; no parameter has memory yet.
    """
    layers = [source.module.get_submodule(name) for name in source.layers]
    context = TransformContext(source, layout, mesh, [StageModule(source.module, layers)])
    for transform in transforms():
        if transform.applies(layout, source):
            transform.apply(context)
    # A layer that is computed again draws the numbers of its first time, as a model's own checkpoints do.
    snapshots = [context.dropout_rng.snapshot] if context.dropout_rng is not None else []
    for stage in context.stages:
        restore_first_run_in(stage.module, *snapshots)
        context.progress_hooks.watch(stage.layers, stage.first_layer)
    return context


def build(source: ModelSource, layout: Layout, mesh: Mesh | None, device: torch.device, clock: StepTimer) -> Program:
    """Builds the program of this rank.

    Args:
        source: the model.
        layout: what to make true.
        mesh: ranks and groups; None for one rank without a process group.
        device: where this rank computes.
        clock: books the parts of a step.

    Returns:
        The program, its weights materialised as this rank's parts.
    """
    context = apply_transforms(source, layout, mesh)
    master = torch.float64 if layout.precision == "float64" else torch.float32
    host = torch.device("cpu") if layout.offload == "parameters" else device
    for stage in context.stages:
        materialise(stage.module, stage.local_shards, host, master, source.fill)
        source.fill_buffers(stage.module, device)
        if layout.precision == "float64":
            MovingBuffers([stage.module], source.moving).widen()
        finalise_fsdp_shards(stage.module)
        for sync in stage.gradient_syncs:
            if isinstance(sync, MasterGradients):
                sync.make_compute_copies(device)
        stage.module.train()
    if context.make_program is not None:
        program = context.make_program(context, clock)
    else:
        program = Program(context.stages, source.compute, context.view, mesh, clock)
    if source.experts and not layout.compile:
        program.expert_counts = ExpertMeter(context.stages, source.experts)
    program.dropout_rng, program.rounding_key = context.dropout_rng, context.rounding_key
    program.error_feedback = _error_feedback(program)
    program.term_counts, program.loss_terms = source.weigh, tuple(source.terms)
    program.counts_targets = source.counts_targets
    program.moving_buffers = MovingBuffers([stage.module for stage in context.stages], source.moving)
    program.progress_hooks = context.progress_hooks
    if layout.ep_halves:
        program.halves = _halves(context, device)
    elif isinstance(program, PipelineProgram) and layout.degree(Mechanics.EXPERTS) > 1:
        program.pairs = _turns(context, device)
    return program


def _halves(context: TransformContext, device: torch.device) -> Halves:
    """Returns what runs the halves of a micro-batch, each with its own part of what a forward keeps."""
    if context.source.halve is None:
        raise PlanError(
            "ep_halves=true takes the rows of a micro-batch apart, which `meshwright train` does, and this loop is "
            "your own; nearest that works: ep_overlap=2"
        )
    for sync in (sync for stage in context.stages for sync in stage.gradient_syncs):
        if isinstance(sync, FsdpSync):
            sync.keep_for_pairs()
    return Halves(_turns(context, device), context.source.halve)


def _turns(context: TransformContext, device: torch.device) -> Turns:
    """Returns what runs two passes in turns, each with its own part of what a forward keeps."""
    cuts = (stage.cut for stage in context.stages if isinstance(stage, PipelineStageModule))
    shared = DrawnStates(), context.dropout_rng, context.view.head_cut, context.view.inner_loss, *cuts
    return Turns(device, [Held(item, item.OF_FORWARD) for item in shared if item is not None])


def _error_feedback(program: Program) -> ErrorFeedback | None:
    """Returns the state of sums with error feedback, known to what sums; None under any other layout."""
    mesh = program.mesh
    compressors = [item for item in mesh.compressors if isinstance(item, FeedbackCompressor)] if mesh else []
    if mesh is None or not compressors:
        return None
    # What ranks of tp add up after the copies is no gradient yet when the copies do.
    syncs = [sync for stage in program.stages for sync in stage.gradient_syncs]
    partial_names = {name for sync in syncs if isinstance(sync, PartialGradReducer) for name in sync.names}
    axes = (mesh.layout.axis(Mechanics.MATRICES), *mesh.layout.state_axes)
    groups = {axis: mesh.axis_groups[axis] for axis in axes if mesh.layout.degree(axis) > 1}
    feedback = ErrorFeedback(
        program.weights,
        compression=mesh.layout.compress,
        copies=compressors[0].copies.size,
        copy=compressors[0].copies.index,
        exact_names=partial_names,
        positions={axis: f"{axis}{group.index}of{group.size}" for axis, group in groups.items()},
        buffers=mesh.log.buffers,
    )
    for compressor in compressors:
        compressor.error_feedback = feedback
    return feedback


def finalise_fsdp_shards(module: nn.Module) -> None:
    """Lets FSDP2 take over the materialised shards, so that each parameter's local tensor is final from here on."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.unshard()
            submodule.reshard()
