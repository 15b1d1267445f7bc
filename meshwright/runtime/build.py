"""Makes a layout true: runs the layout's transforms over a meta module, in order, then gives it its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.axes import cp, ep, replicate, shard, wide
from meshwright.axes.comm.axis_group import AxisGroup
from meshwright.axes.comm.checkpoints import repeat_in
from meshwright.axes.comm.dropout_rng import DropoutRng
from meshwright.axes.comm.layers import layer_of
from meshwright.axes.experts import ExpertRows
from meshwright.axes.groups import gradient_axes
from meshwright.axes.layer_graph import LayerGraph
from meshwright.axes.table import ShardingTable
from meshwright.errors import PlanError
from meshwright.plan import Layout
from meshwright.runtime import dropout_rng, pipeline, recompute, tensor
from meshwright.runtime.buffers import MovingBuffers
from meshwright.runtime.clock import StepTimer
from meshwright.runtime.expert_load import ExpertMeter
from meshwright.runtime.materialise import Fill, materialise
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Compute, LossView, Program, StageModule

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Compute dtype by a layout's precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The model as `build` takes it."""

    module: nn.Module
    """On the meta device (or materialised, when ``fill`` is None)."""
    layers: Sequence[str]
    """Names of its repeated blocks, in order: the units of gathering, recompute, compilation and splitting."""
    compute: Compute
    """Forward and loss of one micro-batch."""
    fill: Fill
    """Values of a part of a weight, by name and box."""
    fill_buffers: Callable[[nn.Module, torch.device], None]
    """Puts the module's buffers on a device, with their values."""
    random: bool = False
    """Whether forward may draw random numbers."""
    ties: Sequence[Sequence[str]] = ()
    """Groups of parameter names that are one parameter."""
    table: ShardingTable | None = None
    """What axes do to each weight; needed by layouts with an axis that splits layers."""
    layer_graph: LayerGraph | None = None
    """How forward goes through the layers; needed by layouts with a pipeline."""
    attention: str = "heads"
    """How ``cp`` computes attention: ``heads`` or ``gather``."""
    experts: Sequence[ExpertRows] = ()
    """Its experts modules; needed by layouts with ``ep``."""
    weigh: Callable[[Any], torch.Tensor] | None = None
    """What a micro-batch counts for in each term of the model's own loss, where it has any."""
    terms: Sequence[str] = ()
    """Names of the terms that ``compute`` reports beside the cross-entropy."""
    moving: Sequence[str] = ()
    """Names of the buffers that forward changes while it trains."""


@dataclass(slots=True)
class TransformContext:
    """What the transforms pass along."""

    source: ModelSource
    layout: Layout
    mesh: Mesh | None
    parts: list[StageModule]
    view: LossView = field(default_factory=LossView)
    dropout_rng: DropoutRng | None = None


def _split(work: TransformContext) -> None:
    if work.layout.degree("pp") > 1:
        assert work.mesh is not None
        work.parts = pipeline.split(work.source, work.layout, work.mesh)


def _tensor(work: TransformContext) -> None:
    layout = work.layout
    if layout.degree("tp") == 1:
        return
    assert work.mesh is not None and work.source.table is not None
    apart = [rows.module for rows in work.source.experts] if layout.degree("ep") > 1 else []
    work.view.vocab = tensor.split(work.parts, work.source.table, work.mesh, apart)


def _expert(work: TransformContext) -> None:
    layout, mesh = work.layout, work.mesh
    if layout.degree("ep") == 1:
        return
    assert mesh is not None
    ep.check(work.source.experts, layout.degree("ep"))
    same = mesh.axis_groups["tp"] if layout.degree("tp") > 1 and not layout.sequence else None
    for part in work.parts:
        held = {name: child for name, child in part.module.named_modules() if child._parameters}
        for rows in (rows for rows in work.source.experts if rows.module in held):
            experts: Any = held[rows.module]
            part.places |= ep.wrap(experts, rows, mesh.axis_groups["ep"], mesh.axis_groups["ep_copies"].size, same)
            if layout.compile:  # how many tokens come is known at run time alone
                experts.forward = torch.compiler.disable(experts.forward)


def _context(work: TransformContext) -> None:
    layout, mesh, table = work.layout, work.mesh, work.source.table
    if layout.degree("cp") == 1:
        return
    assert mesh is not None and table is not None
    for part in work.parts:
        tensor_place = (mesh.axis_groups["tp"].index, layout.degree("tp"))
        splits = layout.degree("tp") if layout.sequence else 1
        cp.wrap_model(part.module, table, mesh.axis_groups["cp"], tensor_place, work.source.attention, splits)
    work.view.tokens = (mesh.axis_groups["cp"].index, layout.degree("cp"), work.source.attention == "gather")


def _chance(work: TransformContext) -> None:
    source = work.source
    if source.random:
        work.dropout_rng = dropout_rng.install(
            work.parts, source.layers, source.table, source.experts, work.mesh, source.attention
        )


def _widen(work: TransformContext) -> None:
    if work.layout.precision == "float64":
        for part in work.parts:
            wide.apply([part.module, *part.layers])


def _recompute(work: TransformContext) -> None:
    names = work.source.layers
    wanted = {names[place] for place in recompute.chosen(len(names), work.layout.recompute)}
    for part in work.parts:
        held = [(name, child) for name, child in part.module.named_modules() if name in wanted]
        for name, layer in held:
            if layer in part.layers:
                moving = MovingBuffers([layer], work.source.moving, name)
                recompute.apply([layer], work.layout.recompute, moving.again if moving else None)


def _compile(work: TransformContext) -> None:
    if work.layout.compile:
        for axis_group in work.mesh.axis_groups.values() if work.mesh is not None else ():
            axis_group.hide_from_compiler()
        for layer in (layer for part in work.parts for layer in part.layers):
            compiled: Any = torch.compile(layer.forward)
            layer.forward = compiled  # type: ignore[method-assign]


def _shard_data(work: TransformContext) -> None:
    """Data axes: sharded state where the layout shards, or computes in another type than it keeps, else copies."""
    layout, mesh = work.layout, work.mesh
    for part in work.parts:
        if layout.zero or layout.mixed or layout.offload == "parameters":
            assert mesh is not None
            options = shard.ShardOptions(
                zero=layout.zero,
                compute=DTYPES[layout.precision] if layout.mixed else None,
                offload=layout.offload == "parameters",
                first=part.first,
            )
            # ZeRO-0 shards over the one rank of an unused axis: copies that compute in another type than they keep.
            shards = mesh.across(layout.state_axes or (shard.AXIS.name,))
            axis_groups = _used(shards, mesh.across(gradient_axes(layout.state_axes)))
            apart = _apart(part, mesh)
            part.sync.insert(0, shard.wrap(part.module, part.layers, mesh.line(shards), options, axis_groups, apart))
        elif mesh is not None:
            experts = {name for name, place in part.places.items() if ep.AXIS.name in place.axes}
            names = [name for name, _ in part.module.named_parameters()]
            for axis_group, own in (
                (mesh.across(gradient_axes(())), [name for name in names if name not in experts]),
                (mesh.axis_groups.get("ep_copies"), [name for name in names if name in experts]),
            ):
                if own and axis_group is not None and axis_group.size > 1:
                    part.sync.insert(0, _LateReplicate(part.module, own, axis_group, work.source.layers))


def _used(shards: AxisGroup, copies: AxisGroup) -> list[AxisGroup]:
    """The groups of a unit: over the ranks that share its state and, where these have copies, over the copies."""
    return [shards, copies] if copies.size > 1 else [shards]


def _apart(part: StageModule, mesh: Mesh) -> shard.ExpertFsdpGroup | None:
    """The experts modules of a part, whose shards lie on the ranks that hold the same experts."""
    owners = {name.rpartition(".")[0]: None for name, place in part.places.items() if ep.AXIS.name in place.axes}
    if not owners:
        return None
    axis_groups = [mesh.across((shard.AXIS.name,)), mesh.axis_groups["ep_copies"]]
    if mesh.layout.zero:
        axis_groups = [mesh.axis_groups["ep_shard"], mesh.across(gradient_axes(ep.AXIS.carves))]
    return shard.ExpertFsdpGroup(
        modules=[part.module.get_submodule(name) for name in owners],
        mesh=mesh.line(axis_groups[0]),
        axis_groups=_used(*axis_groups),
    )


class _LateReplicate:
    """Attaches a reducer's hooks to parameters once they are materialised (hooks don't survive that)."""

    def __init__(self, module: nn.Module, names: Sequence[str], axis_group: AxisGroup, layers: Sequence[str]) -> None:
        self._module, self._axis_group = module, axis_group
        numbers = {name: number for number, name in enumerate(layers)}
        self._layers = {name: layer_of(name, numbers) for name in names}
        self._reducer: Any = None

    def begin(self, last: bool, fresh: bool = False) -> None:
        """Announces a micro-batch."""
        if self._reducer is None:
            layers = {self._module.get_parameter(name): number for name, number in self._layers.items()}
            self._reducer = replicate.wrap(list(layers), self._axis_group, layers)
        self._reducer.begin(last)

    def finish(self) -> None:
        """Waits for the sums."""
        self._reducer.finish()


TRANSFORMS: tuple[Callable[[TransformContext], None], ...] = (
    _split,
    _tensor,
    _expert,
    _context,
    _chance,
    _widen,
    _recompute,
    _compile,
    _shard_data,
)
"""In this order; an axis that changes modules adds its own."""


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
    mode, _, count = layout.recompute.partition(":")
    if mode != "none" and (layers == 0 or int(count or 0) > layers):
        raise PlanError(f"recompute={layout.recompute}: the model has {layers} repeated layers; K is at most that")
    if layout.compile and layers == 0:
        raise PlanError("compile=true compiles layer by layer, but no repeated layers were found in the model")
    pipeline.check(layout, layers)


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
    layers = [source.module.get_submodule(name) for name in source.layers]
    work = TransformContext(source, layout, mesh, [StageModule(source.module, layers)])
    for transform in TRANSFORMS:
        transform(work)
    master = torch.float64 if layout.precision == "float64" else torch.float32
    host = torch.device("cpu") if layout.offload == "parameters" else device
    for part in work.parts:
        # A layer that is computed again draws the numbers of its first time, as a model's own checkpoints do.
        repeat_in(part.module, *([work.dropout_rng.snapshot] if work.dropout_rng is not None else []))
        materialise(part.module, part.places, host, master, source.fill)
        source.fill_buffers(part.module, device)
        if layout.precision == "float64":
            MovingBuffers([part.module], source.moving).widen()
        settle(part.module)
        part.module.train()
    program: Program
    if mesh is not None and layout.degree("pp") > 1:
        program = pipeline.PipelineProgram(work.parts, source.compute, work.view, mesh, clock, layout)
    else:
        program = Program(work.parts, source.compute, work.view, mesh, clock)
    if source.experts and not layout.compile:
        program.experts = ExpertMeter(work.parts, source.experts)
    program.chance = work.dropout_rng
    program.weigh, program.terms = source.weigh, tuple(source.terms)
    program.moving = MovingBuffers([part.module for part in work.parts], source.moving)
    for part in work.parts:
        # Outside of what is compiled or run again for backward, inside of what gathers.
        program.progress_hooks.watch(part.layers, part.first)
    return program


def settle(module: nn.Module) -> None:
    """Lets FSDP2 take over the materialised shards, so that each parameter's local tensor is final from here on."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            part.reshard()
