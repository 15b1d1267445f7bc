"""The `ep` axis: ranks hold other experts of a mixture, and tokens travel to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel import expert_list
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.node_dispatch import NodeDispatch
from meshwright.parallel.token_dispatch import Dispatch, ExpertGroups, ExpertNode
from meshwright.parallel.transform import Transform, TransformContext, uses_axis
from meshwright.spec.axes.ep import AXIS
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import LayerExperts
from meshwright.spec.placement import LocalShard, Span


def check(experts: Sequence[LayerExperts], degree: int) -> None:
    """Refuses a degree that the model's experts can't fill.

    Raises:
        PlanError: with the numbers and the nearest degree that works.
    """
    if degree == 1:
        return
    if not experts:
        raise PlanError(
            f"ep={degree} spreads the experts of mixture layers over ranks, but the model has none that can be spread; "
            "leave ep out, or split every layer with tp"
        )
    fewest = min(experts, key=lambda rows: rows.experts)
    if degree > fewest.experts:
        raise PlanError(
            f"ep={degree}: {fewest.module} has {fewest.experts} experts, and each rank holds one at least; "
            f"nearest that works: ep={fewest.experts}"
        )


def wrap(module: nn.Module, rows: LayerExperts, groups: ExpertGroups, copies: int) -> dict[str, LocalShard]:
    """Leaves this rank its experts of one layer and lets tokens travel.

    Args:
        module: the layer's experts module, on the meta device or materialised; parameters, counts and forward are
            replaced. Of a list it has this rank's experts already.
        rows: what it is.
        groups: the ranks that hold its experts.
        copies: ranks of the world that hold the same experts.

    Returns:
        The shard of each of its parameters, by dotted name in the model.
    """
    axis_group = groups.axis_group
    start, stop = rows.span(axis_group.index, axis_group.size)
    shards = {}
    if rows.children:
        for key, parameter in module.named_parameters(prefix=rows.module):
            whole = LocalShard.unsharded(key, tuple(parameter.shape), copies)
            shards[key] = dataclasses.replace(whole, axes=(AXIS.name,))
    else:
        shards = _keep_rows(module, rows, (start, stop), copies)
    for attribute in rows.counts:
        setattr(module, attribute, stop - start)

    def dispatch(plain: Forward) -> Dispatch:
        return (NodeDispatch if groups.node else Dispatch)(module, rows, groups, plain)

    wrap_forward(module, ForwardLayer.EXPERT, "tokens go to the ranks of their experts", dispatch)
    return shards


def _keep_rows(module: nn.Module, rows: LayerExperts, span: Span, copies: int) -> dict[str, LocalShard]:
    """Cuts the rows of this rank's experts out of each parameter; returns their shards, by dotted name in the model."""
    start, stop = span
    shards = {}
    for attribute in rows.parameters:
        full_parameter = module.get_parameter(attribute)
        local_parameter = nn.Parameter(
            full_parameter.detach()[start:stop].clone(), requires_grad=full_parameter.requires_grad
        )
        local_parameter.__dict__.update(full_parameter.__dict__)
        setattr(module, attribute, local_parameter)
        spans = (((start, stop),), *(((0, size),) for size in full_parameter.shape[1:]))
        name = f"{rows.module}.{attribute}"
        shards[name] = LocalShard(
            name=name, global_shape=tuple(full_parameter.shape), spans=spans, copies=copies, axes=(AXIS.name,)
        )
    return shards


def _apply(context: TransformContext) -> None:
    """Spreads the experts of this rank's stages; run after the tensor axis has split what stays."""
    layout, mesh = context.layout, context.required_mesh
    check(context.source.experts, layout.degree(AXIS.name))
    # Ranks that split matrices read the same tokens, unless these are split too: each sends a part of them.
    shares_tokens = layout.degree(Mechanics.MATRICES) > 1 and not layout.sequence
    replicas = mesh.group_with(Mechanics.MATRICES) if shares_tokens else None
    groups = ExpertGroups(
        axis_group=mesh.axis_groups[AXIS.name],
        replicas=replicas,
        node=ExpertNode(*mesh.expert_node(layout.ep_node)) if layout.ep_node else None,
        chunks=max(1, layout.ep_overlap),
        codec=mesh.row_codec,
    )
    copies = mesh.axis_groups[f"{AXIS.name}_copies"].size
    for stage in context.stages:
        modules_by_name = dict(stage.module.named_modules())
        # Layers of other stages have no weights here.
        held = {name for name, child in modules_by_name.items() if next(child.parameters(), None) is not None}
        for rows in (rows for rows in context.source.experts if rows.module in held):
            experts = uncompiled = modules_by_name[rows.module]
            if rows.children:
                uncompiled = modules_by_name[rows.caller]
                experts = _spread_list(context, uncompiled, rows, groups.axis_group)
            stage.local_shards |= wrap(experts, rows, groups, copies)
            if layout.compile:
                # The number of tokens that arrive is known at run time alone.
                wrap_forward(uncompiled, ForwardLayer.COMPILE, "excluded from torch.compile", torch.compiler.disable)


def _spread_list(
    context: TransformContext, caller: nn.Module, rows: LayerExperts, axis_group: AxisGroup
) -> expert_list.LocalExperts:
    """Leaves this rank its experts of a list."""
    source = context.source
    return expert_list.spread(
        caller,
        rows,
        rows.span(axis_group.index, axis_group.size),
        MovingBuffers([caller], source.moving, rows.caller),
        lambda: context.dropout_rng,
        source.width,
    )


TRANSFORM = Transform(layer=ForwardLayer.EXPERT, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_apply)
