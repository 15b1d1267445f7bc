"""torch.compile, layer by layer: collectives between layers stay out of the graphs."""

from __future__ import annotations

import torch

from meshwright.errors import PlanError
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.layout import Layout


def check(layout: Layout, layers: int) -> None:
    """Refuses to compile a model without repeated layers.

    Raises:
        PlanError: there is none.
    """
    if layout.compile and layers == 0:
        raise PlanError("compile=true compiles layer by layer, but no repeated layers were found in the model")


def _apply(context: TransformContext) -> None:
    for axis_group in context.mesh.axis_groups.values() if context.mesh is not None else ():
        axis_group.hide_from_compiler()
    for layer in (layer for stage in context.stages for layer in stage.layers):
        wrap_forward(layer, ForwardLayer.COMPILE, "torch.compile", _compiled)


def _compiled(plain: Forward) -> Forward:
    return torch.compile(plain)


TRANSFORM = Transform(
    layer=ForwardLayer.COMPILE, applies=lambda layout, _source: layout.compile, apply=_apply, check=check
)
