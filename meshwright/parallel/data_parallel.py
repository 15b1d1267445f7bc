"""The axes whose ranks read other rows: gradients are summed over copies, or state is sharded by FSDP2.

Which axes these are, and over which groups each weight's gradient is summed, follows from their facts (`spec.groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from meshwright.errors import ConfigError
from meshwright.parallel import fsdp
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.comm_hook import CommHook
from meshwright.parallel.compression import GradientSum, RoundingKey
from meshwright.parallel.compute_copies import MasterGradients
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.gradient_reducer import GradientReducer
from meshwright.parallel.layer_names import layer_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.transform import DTYPES, Transform, TransformContext
from meshwright.spec.axes import known_axes
from meshwright.spec.axes import shard as shard_axis
from meshwright.spec.axis import Mechanics
from meshwright.spec.end_units import EndUnits
from meshwright.spec.groups import gradient_axes


def _apply(context: TransformContext) -> None:
    """Applies the data axes: FSDP2 where the layout shards, offloads or computes in a lower precision, else copies.

    Copies may compute in a lower precision without FSDP2, and a single rank with masters in host memory, where the
    optimizer keeps up the weights that compute.
    """
    layout = context.layout
    for stage in context.stages:
        if (layout.has_compute_copies or layout.has_host_masters) and context.source.keeps_copies:
            dtype, is_summed = DTYPES[layout.compute_precision], not layout.sums_no_gradients
            stage.gradient_syncs.insert(0, MasterGradients(stage, dtype, is_summed, layout.has_host_masters))
            _sum_copies(context, stage)
        elif layout.zero or layout.is_mixed_precision or layout.offload == "parameters":
            _shard(context, stage)
        else:
            _sum_copies(context, stage)


def _shard(context: TransformContext, stage: StageModule) -> None:
    """Shards a stage by FSDP2."""
    layout, mesh = context.layout, context.required_mesh
    # ZeRO-0 shards over the one rank of an unused axis: copies that compute in another type than they keep.
    shard_group = mesh.combined_group(layout.state_axes or (shard_axis.AXIS.name,))
    options = fsdp.ShardOptions(
        zero=layout.zero,
        compute=DTYPES[layout.compute_precision] if layout.is_mixed_precision else None,
        offload=layout.offload == "parameters",
        first_layer=stage.first_layer,
        secondary=mesh.secondary_shards(shard_group),
    )
    copies = mesh.combined_group(gradient_axes(layout.state_axes))
    axis_groups = _groups_in_use(shard_group, copies)
    expert_names = {rows.module for rows in context.source.experts}
    expert_group = _expert_fsdp_group(stage, mesh, expert_names, context.rounding_key)
    # A schedule gathers and frees a stage as a whole.
    ends = EndUnits() if layout.degree(Mechanics.STAGES) > 1 else context.source.ends
    fsdp_sync = fsdp.wrap(
        stage.module,
        stage.layers,
        mesh.axis_device_mesh(shard_group),
        options,
        axis_groups,
        fsdp.EndModules.of(stage.module, ends),
        expert_group,
        _compressors(shard_group, copies, mesh, context.rounding_key, stage.stage_index),
    )
    stage.gradient_syncs.insert(0, fsdp_sync)


def _sum_copies(context: TransformContext, stage: StageModule) -> None:
    """Sums a stage's gradients over its copies; experts are copied over fewer ranks than all other weights."""
    layout, mesh = context.layout, context.mesh
    if mesh is None:
        return
    expert_axis = layout.axis(Mechanics.EXPERTS)
    expert_names = {name for name, shard in stage.local_shards.items() if expert_axis in shard.axes}
    names = [name for name, _ in stage.module.named_parameters()]
    dense_names = [name for name in names if name not in expert_names]
    for axis_group, group_names in (
        (mesh.combined_group(gradient_axes(())), dense_names),
        (mesh.axis_groups.get(f"{expert_axis}_copies"), [name for name in names if name in expert_names]),
    ):
        if axis_group is None or axis_group.size == 1:
            continue
        # On every rank, also of a stage without experts: it makes groups.
        compressor = mesh.compressor(axis_group, context.rounding_key, stage.stage_index)
        if group_names:
            # Ranks that exchange tokens in backward must not wait in its hooks: their graphs may differ.
            waits = layout.degree(Mechanics.TOKENS) == layout.degree(Mechanics.EXPERTS) == 1
            layers = context.source.layers
            stage.gradient_syncs.insert(
                0, LateGradientReducer(stage, group_names, axis_group, layers, compressor, waits)
            )


def _groups_in_use(shards: AxisGroup, copies: AxisGroup) -> list[AxisGroup]:
    """Returns a unit's groups: of the ranks that share its state and, where the shards have copies, of the copies."""
    return [shards, copies] if copies.size > 1 else [shards]


def _compressors(
    shards: AxisGroup, copies: AxisGroup, mesh: Mesh, key: RoundingKey, stage_index: int
) -> fsdp.Compressors:
    return fsdp.Compressors(mesh.compressor(copies, key, stage_index), mesh.weight_compressor(shards))


def _expert_fsdp_group(
    stage: StageModule, mesh: Mesh, expert_names: Collection[str], key: RoundingKey
) -> fsdp.ExpertFsdpGroup | None:
    """Returns a stage's experts modules, whose shards lie on the ranks that hold the same experts; None without any."""
    expert_axis = mesh.layout.axis(Mechanics.EXPERTS)
    if mesh.layout.degree(Mechanics.EXPERTS) == 1:
        return None
    modules = ((name, module) for name, module in stage.module.named_modules() if name in expert_names)
    # Layers of other stages have no weights here.
    expert_modules = [module for _, module in modules if next(module.parameters(), None) is not None]
    axis_groups = [mesh.combined_group((shard_axis.AXIS.name,)), mesh.axis_groups[f"{expert_axis}_copies"]]
    if mesh.layout.zero:
        axis_groups = [
            mesh.axis_groups[f"{expert_axis}_shard"],
            mesh.combined_group(gradient_axes(known_axes()[expert_axis].carves)),
        ]
    # On every rank, also of a stage without experts: it makes groups.
    compressors = _compressors(axis_groups[0], axis_groups[1], mesh, key, stage.stage_index)
    if not expert_modules:
        return None
    return fsdp.ExpertFsdpGroup(
        modules=expert_modules,
        mesh=mesh.axis_device_mesh(axis_groups[0]),
        axis_groups=_groups_in_use(*axis_groups),
        compressors=compressors,
    )


class LateGradientReducer:
    """Attaches a reducer's hooks to parameters once they are materialised (hooks don't survive that)."""

    def __init__(
        self,
        stage: StageModule,
        names: Sequence[str],
        axis_group: AxisGroup,
        layers: Sequence[str],
        compressor: GradientSum | None,
        waits_in_backward: bool,
    ) -> None:
        self._stage, self._axis_group, self._compressor = stage, axis_group, compressor
        self._waits_in_backward = waits_in_backward
        numbers = {name: number for number, name in enumerate(layers)}
        self._layers = {name: layer_of(name, numbers) for name in names}

    @cached_property
    def _reducer(self) -> GradientReducer:
        layers, sources = {}, {}
        for name, number in self._layers.items():
            source = self._stage.module.get_parameter(name)
            parameter = self._stage.masters.get(source, source)
            layers[parameter], sources[parameter] = number, source
        names, waits = list(self._layers), self._waits_in_backward
        return GradientReducer(list(layers), self._axis_group, layers, self._compressor, names, waits, sources)

    def set_comm_hook(self, hook: CommHook) -> None:
        """Communicates by a hook from now on.

        Raises:
            ConfigError: there is one already.
        """
        if self._reducer.comm_hook is not None:
            raise ConfigError("register_comm_hook: a hook is registered already, and a model has one")
        self._reducer.comm_hook = hook

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Announces a micro-batch."""
        self._reducer.begin_microbatch(is_last)

    def finish(self) -> None:
        """Waits for the sums."""
        self._reducer.finish()

    def discard_accumulated(self) -> None:
        """Does nothing: until the last micro-batch the gradients themselves hold the sums."""


TRANSFORM = Transform(layer=ForwardLayer.DATA, applies=lambda _layout, _source: True, apply=_apply)
