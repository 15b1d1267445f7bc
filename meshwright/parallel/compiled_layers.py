"""torch.compile, layer by layer: collectives inside of a layer are operators of its graph (`group_operators`)."""

from __future__ import annotations

import torch

from meshwright.errors import PlanError
from meshwright.parallel import group_operators
from meshwright.parallel.document_attention import is_packed_mask
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.layout import Layout
from meshwright.torch_compat.varlen import mark_dynamic_sizes


def check(layout: Layout, layers: int) -> None:
    """Refuses to compile a model without repeated layers.

    Raises:
        PlanError: there is none.
    """
    if layout.compile and layers == 0:
        raise PlanError("compile=true compiles layer by layer, but no repeated layers were found in the model")


def _apply(context: TransformContext) -> None:
    for axis_group in context.mesh.axis_groups.values() if context.mesh is not None else ():
        group_operators.register(axis_group)
    for layer in (layer for stage in context.stages for layer in stage.layers):
        wrap_forward(layer, ForwardLayer.COMPILE, "torch.compile", _compiled)


def _compiled(plain: Forward) -> Forward:
    compiled: Forward = torch.compile(plain)

    def forward(*args: object, **kwargs: object) -> object:
        # The number of documents and the longest one's tokens differ from batch to batch: one graph serves all.
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and is_packed_mask(value):
                mark_dynamic_sizes(value, 0, 1)
        return compiled(*args, **kwargs)

    return forward


TRANSFORM = Transform(
    layer=ForwardLayer.COMPILE, applies=lambda layout, _source: layout.compile, apply=_apply, check=check
)
