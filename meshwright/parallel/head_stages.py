"""Lets the loss compute its logits in chunks: the stage with the head may end its forward in front of it."""

from __future__ import annotations

from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.head_cut import HeadCut
from meshwright.parallel.transform import Transform, TransformContext


def _apply(context: TransformContext) -> None:
    # Of a rank's pipeline stages the last one may have the head; the others end at their boundary before it.
    context.view.head_cut = HeadCut(context.stages[-1].module, context.source.head)


TRANSFORM = Transform(
    layer=ForwardLayer.HEAD, applies=lambda layout, source: bool(source.head) and layout.loss_chunk.on, apply=_apply
)
