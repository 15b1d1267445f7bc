"""torch.compile, layer by layer: collectives inside of a layer are operators of its graph (`group_operators`).

A layer that recomputes is traced with its recompute around it, so that the compiler chooses what to keep. Dynamo can't
trace a checkpoint in which ranks exchange something (the operators are ordered by an effect) or whose operations a mode
changes (float64): it would run the layer as it is, without a word. Such a layer is compiled inside of its recompute.
"""

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
    """Refuses to compile a model without repeated layers, and layers of which the compiler would skip each.

    Raises:
        PlanError: there is none; what they recompute can't be traced.
    """
    if layout.compile and layers == 0:
        raise PlanError("compile=true compiles layer by layer, but no repeated layers were found in the model")
    if layout.uncompiled_reason:
        raise PlanError(f"{layout.uncompiled_reason}; nearest that works: recompute=full, or leave compile out")


def _apply(context: TransformContext) -> None:
    for axis_group in context.mesh.axis_groups.values() if context.mesh is not None else ():
        group_operators.register(axis_group)
    layout, names = context.layout, context.source.layers
    untraced = "full" if layout.layers_communicate or layout.precision == "float64" else ""
    modes = dict(zip(names, layout.recompute.modes(len(names))))
    for stage in context.stages:
        mode_of = {layer: modes.get(name) for name, layer in stage.module.named_modules()}
        for layer in stage.layers:
            is_inside = mode_of.get(layer) == untraced
            place = ForwardLayer.COMPILE_RECOMPUTED if is_inside else ForwardLayer.COMPILE
            wrap_forward(layer, place, "torch.compile", _compiled)


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
