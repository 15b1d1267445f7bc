"""The `ep` axis: ranks hold other experts of a mixture, and tokens travel to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.node_dispatch import ExpertNode, NodeDispatch
from meshwright.parallel.token_dispatch import Dispatch
from meshwright.parallel.transform import Transform, TransformContext, uses_axis
from meshwright.spec.axes.ep import AXIS
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import ExpertRows
from meshwright.spec.placement import LocalShard


def check(experts: Sequence[ExpertRows], degree: int) -> None:
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


def wrap(
    module: nn.Module,
    rows: ExpertRows,
    axis_group: AxisGroup,
    copies: int,
    replicas: AxisGroup | None = None,
    node: ExpertNode | None = None,
    chunks: int = 1,
) -> dict[str, LocalShard]:
    """Leaves this rank its experts of one layer and lets tokens travel.

    Args:
        module: the layer's experts module, on the meta device or materialised; parameters, counts and forward are
            replaced.
        rows: what it is.
        axis_group: the axis's collectives.
        copies: ranks of the world that hold the same experts.
        replicas: ranks whose tokens are equal (they send a share each); None where all tokens differ.
        node: ``axis_group`` as nodes, to each of which a token travels once; None sends it once for each expert.
        chunks: of tokens, one of which travels while the experts compute another.

    Returns:
        The shard of each of its parameters, by dotted name in the model.
    """
    start, stop = rows.span(axis_group.index, axis_group.size)
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
    for attribute in rows.counts:
        setattr(module, attribute, stop - start)

    def dispatch(plain: Forward) -> Dispatch:
        if node is None:
            return Dispatch(module, rows, axis_group, replicas, plain, chunks)
        return NodeDispatch(module, rows, axis_group, replicas, plain, node, chunks)

    wrap_forward(module, ForwardLayer.EXPERT, "tokens go to the ranks of their experts", dispatch)
    return shards


def _apply(context: TransformContext) -> None:
    """Spreads the experts of this rank's stages; run after the tensor axis has split what stays."""
    layout, mesh = context.layout, context.required_mesh
    check(context.source.experts, layout.degree(AXIS.name))
    # Ranks that split matrices read the same tokens, unless these are split too: each sends a part of them.
    shares_tokens = layout.degree(Mechanics.MATRICES) > 1 and not layout.sequence
    replicas = mesh.group_with(Mechanics.MATRICES) if shares_tokens else None
    group, copies = mesh.axis_groups[AXIS.name], mesh.axis_groups[f"{AXIS.name}_copies"].size
    node = ExpertNode(*mesh.expert_node(layout.ep_node)) if layout.ep_node else None
    for stage in context.stages:
        modules_by_name = {name: child for name, child in stage.module.named_modules() if child._parameters}
        for rows in (rows for rows in context.source.experts if rows.module in modules_by_name):
            experts = modules_by_name[rows.module]
            stage.local_shards |= wrap(experts, rows, group, copies, replicas, node, max(1, layout.ep_overlap))
            if layout.compile:
                # The number of tokens that arrive is known at run time alone.
                wrap_forward(experts, ForwardLayer.COMPILE, "excluded from torch.compile", torch.compiler.disable)


TRANSFORM = Transform(layer=ForwardLayer.EXPERT, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_apply)
