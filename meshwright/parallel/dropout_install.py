"""Makes the random numbers of forward, dropout's above all, those of their place in the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwright.parallel.activation_boxes import TokenSplit, Units
from meshwright.parallel.context import local_group
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import ExpertRows
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import ShardingGroup, ShardingTable

ROUTED = "its tokens are those that a router chose, in an order that depends on the layout"
"""Why nothing inside experts can be drawn by place."""


def install(
    parts: Sequence[StageModule],
    layers: Sequence[str],
    table: ShardingTable | None,
    experts: Sequence[ExpertRows],
    mesh: Mesh | None,
    attention: str,
) -> DropoutRng:
    """Gives the forwards of a rank's stages their numbers.

    Args:
        parts: stages of this rank, split by all axes that split layers.
        layers: names of the model's layers: what is drawn in them is named by them, all else by its module.
        table: of the model.
        experts: of the model.
        mesh: ranks and groups.
        attention: how ``cp`` computes attention.
    """
    chance = DropoutRng(_tokens(mesh, attention) if mesh is not None else TokenSplit())
    inside = tuple(f"{name}." for name in layers)
    for part in parts:
        held = {name: module for name, module in part.module.named_modules() if _runs(module)}
        for name, module in held.items():
            if name in layers:
                if module in part.layers:
                    chance.own(module, name)
                    if table is not None and mesh is not None:
                        _own_units(chance, module, table.layers[name].groups, mesh, attention)
            elif not name.startswith(inside):
                chance.own(module, name)
        for rows in (rows for rows in experts if rows.module in held):
            chance.forbid(held[rows.module], ROUTED)
    return chance


def _runs(module: Any) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _tokens(mesh: Mesh, attention: str) -> TokenSplit:
    context, tensor = (mesh.axis_groups[mesh.layout.axis(one)] for one in (Mechanics.TOKENS, Mechanics.MATRICES))
    return TokenSplit(
        index=context.index,
        ranks=context.size,
        balanced=attention == "gather",
        part=tensor.index if mesh.layout.sequence else 0,
        parts=tensor.size if mesh.layout.sequence else 1,
    )


def _own_units(
    chance: DropoutRng, layer: nn.Module, groups: Sequence[ShardingGroup], mesh: Mesh, attention: str
) -> None:
    """States what this rank has of each group's units, where it hasn't all."""
    for group in groups:
        units = held_units(group, mesh, mesh.layout, attention)
        if units is not None and group.column_linears:
            first = (group.column_inputs or group.column_linears)[0]
            chance.in_shard(layer.get_submodule(first), layer.get_submodule(group.row_linear), units)


def held_units(group: ShardingGroup, mesh: Mesh, layout: Layout, attention: str) -> Units | None:
    """Returns the units of a group that this rank computes; None where it computes all."""
    tensor, context = (mesh.axis_groups[layout.axis(one)] for one in (Mechanics.MATRICES, Mechanics.TOKENS))
    shares = group.shares(tensor.size) if tensor.size > 1 else None
    first, last = shares[tensor.index] if shares is not None else (0, group.units)
    if context.size > 1 and attention != "gather" and group.heads:
        local = local_group(group, tensor.index, tensor.size).shares(context.size)
        if local is not None:
            start, stop = local[context.index]
            first, last = first + start, first + stop
    return None if (first, last) == (0, group.units) else Units(first, last, group.units)


def _apply(work: TransformContext) -> None:
    source = work.source
    work.dropout_rng = install(work.stages, source.layers, source.table, source.experts, work.mesh, source.attention)


TRANSFORM = Transform(layer=ForwardLayer.DROPOUT, applies=lambda _layout, source: source.random, apply=_apply)
