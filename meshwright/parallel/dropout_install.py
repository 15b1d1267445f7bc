"""Makes the random numbers of forward, dropout's above all, those of their place in the global batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.parallel.activation_boxes import TokenSplit, Units
from meshwright.parallel.context import local_group
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import LayerExperts
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import BALANCED_ATTENTIONS
from meshwright.spec.sharding_table import ShardingGroup, ShardingTable

ROUTED = "its tokens are those that a router chose, in an order that depends on the layout"
"""Why nothing inside experts can be drawn by place."""


def install(
    stages: Sequence[StageModule],
    layers: Sequence[str],
    table: ShardingTable | None,
    experts: Sequence[LayerExperts],
    mesh: Mesh | None,
    attention: str,
) -> DropoutRng:
    """Gives the forwards of a rank's stages their numbers.

    Args:
        stages: stages of this rank, split by all axes that split layers.
        layers: names of the model's layers: what is drawn in them is named by them, all else by its module.
        table: of the model.
        experts: of the model.
        mesh: ranks and groups.
        attention: how ``cp`` computes attention.
    """
    dropout_rng = DropoutRng(_token_split(mesh, attention) if mesh is not None else TokenSplit())
    layer_prefixes = tuple(f"{name}." for name in layers)
    for stage in stages:
        modules_by_name = {name: module for name, module in stage.module.named_modules() if _has_forward(module)}
        for name, module in modules_by_name.items():
            if name in layers:
                if module in stage.layers:
                    dropout_rng.track_module(module, name)
                    if table is not None and mesh is not None:
                        _set_unit_shards(dropout_rng, module, table.layers[name].groups, mesh, attention)
            elif not name.startswith(layer_prefixes):
                dropout_rng.track_module(module, name)
        for rows in (rows for rows in experts if rows.module in modules_by_name):
            dropout_rng.forbid(modules_by_name[rows.module], ROUTED)
    return dropout_rng


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _token_split(mesh: Mesh, attention: str) -> TokenSplit:
    context, tensor = (
        mesh.axis_groups[mesh.layout.axis(mechanics)] for mechanics in (Mechanics.TOKENS, Mechanics.MATRICES)
    )
    return TokenSplit(
        cp_index=context.index,
        cp_degree=context.size,
        balanced=attention in BALANCED_ATTENTIONS,
        tp_index=tensor.index if mesh.layout.sequence else 0,
        tp_degree=tensor.size if mesh.layout.sequence else 1,
    )


def _set_unit_shards(
    dropout_rng: DropoutRng, layer: nn.Module, groups: Sequence[ShardingGroup], mesh: Mesh, attention: str
) -> None:
    """States what this rank has of each group's units, where it hasn't all."""
    for group in groups:
        units = local_units(group, mesh, mesh.layout, attention)
        if units is not None and group.column_linears:
            first_linear = (group.column_inputs or group.column_linears)[0]
            last_linear = group.row_linears[-1]
            dropout_rng.in_shard(layer.get_submodule(first_linear), layer.get_submodule(last_linear), units)


def local_units(group: ShardingGroup, mesh: Mesh, layout: Layout, attention: str) -> Units | None:
    """Returns the units of a group that this rank computes; None where it computes all."""
    tensor, context = (mesh.axis_groups[layout.axis(mechanics)] for mechanics in (Mechanics.MATRICES, Mechanics.TOKENS))
    shares = group.shares(tensor.size) if tensor.size > 1 else None
    unit_start, unit_stop = shares[tensor.index] if shares is not None else (0, group.units)
    if context.size > 1 and attention not in BALANCED_ATTENTIONS and group.heads:
        local = local_group(group, tensor.index, tensor.size).shares(context.size)
        if local is not None:
            start, stop = local[context.index]
            unit_start, unit_stop = unit_start + start, unit_start + stop
    return None if (unit_start, unit_stop) == (0, group.units) else Units(unit_start, unit_stop, group.units)


def _apply(context: TransformContext) -> None:
    source, table = context.source, context.source.table
    if table is not None and context.layout.degree(Mechanics.EXPERTS) > 1:
        table = table.without_experts([rows.module for rows in source.experts])
    context.dropout_rng = install(context.stages, source.layers, table, source.experts, context.mesh, source.attention)


TRANSFORM = Transform(layer=ForwardLayer.DROPOUT, applies=lambda _layout, source: source.random, apply=_apply)
