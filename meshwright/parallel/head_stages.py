"""Lets the loss into the stage with the head: its forward may end in front of that, or the loss is read inside it."""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.head_cut import HeadCut
from meshwright.parallel.inner_loss import InnerLoss
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.schedules.file import find_choice
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE
from meshwright.torch_compat.pipelining import splits_custom_functions


def whole_logits_reason(layout: Layout) -> str:
    """Returns why a layout's loss has whole logits though its head could be cut, in a clause; "" where it hasn't."""
    is_piped = layout.degree(Mechanics.STAGES) > 1 and not layout.recompute
    if splits_custom_functions() or not (is_piped and find_choice(layout.schedule or DEFAULT_SCHEDULE).splits_backward):
        return ""
    return f"schedule={layout.schedule} splits backward, and torch before 2.13 can't split that of a loss in chunks"


def check(layout: Layout, _layers: int) -> None:
    """Refuses a number of tokens where the loss would have whole logits all the same.

    Raises:
        PlanError: with the nearest that works.
    """
    if layout.loss_chunk.tokens > 0 and (reason := whole_logits_reason(layout)):
        raise PlanError(f"loss_chunk={layout.loss_chunk}: {reason}; leave loss_chunk out, or take schedule=1f1b")


def _applies(layout: Layout, source: ModelSource) -> bool:
    is_cut = bool(source.head) and layout.loss_chunk.on and not whole_logits_reason(layout)
    return is_cut or source.counts_targets


def _apply(context: TransformContext) -> None:
    # Of a rank's pipeline stages the last one may have the head; the others end at their boundary before it.
    stage, source = context.stages[-1], context.source
    if not source.counts_targets:
        context.view.head_cut = HeadCut(stage.module, source.head)
    elif stage.is_last:
        context.view.inner_loss = InnerLoss(stage.module)


TRANSFORM = Transform(
    layer=ForwardLayer.HEAD,
    applies=_applies,
    apply=_apply,
    check=check,
)
