"""Activation recompute: which layers keep what between forward and backward.

Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import PlanError
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.plan import Layout

KEPT = tuple(
    getattr(namespace, name)
    for namespace, name in (
        (torch.ops.aten.mm, "default"),
        (torch.ops.aten.addmm, "default"),
        (torch.ops.aten.bmm, "default"),
        (torch.ops.aten.baddbmm, "default"),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, "default"),
        (torch.ops.aten._scaled_dot_product_flash_attention, "default"),
        (torch.ops.aten._scaled_dot_product_efficient_attention, "default"),
        (torch.ops.aten._scaled_dot_product_cudnn_attention, "default"),
    )
)
"""Operators whose outputs ``selective`` keeps: matrix products and fused attention, dear to compute, small to hold."""


def chosen(layers: int, mode: str) -> frozenset[int]:
    """Returns which of a model's layers recompute, evenly spaced: none, all, or the K of ``full:K``.

    Raises:
        PlanError: when K is more than the layers there are, or there are none to recompute.
    """
    name, _, count = mode.partition(":")
    if name == "none":
        return frozenset()
    number = int(count) if count else layers
    if not layers or number > layers:
        raise PlanError(f"recompute={mode}: the model has {layers} layers; K is at most that")
    return frozenset(place * layers // number for place in range(number))


def apply(layers: Sequence[nn.Module], mode: str, again: Callable[[Forward], Forward] | None) -> None:
    """Makes layers recompute: their forward is replaced by one that drops what ``mode`` doesn't keep.

    Args:
        layers: those that `chosen` names.
        mode: ``full`` or ``selective``, with or without ``:K``.
        again: where layers change buffers: a forward, at each call, to one that starts from the same values whenever it
            is called once more, and moves none. Random numbers are `parallel.model_checkpointing`' to bring back.
    """
    contexts: dict[str, Any] = {}
    if mode.startswith("selective"):
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        wrap_forward(layer, ForwardLayer.RECOMPUTE, f"recompute={mode}", partial(_recomputing, again, contexts))


def _recomputing(again: Callable[[Forward], Forward] | None, contexts: dict[str, Any], plain: Forward) -> Forward:
    options = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
    if again is None:
        return functools.partial(checkpoint, plain, **options)
    repeated = again
    return lambda *args, **kwargs: checkpoint(repeated(plain), *args, **options, **kwargs)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def check(layout: Layout, layers: int) -> None:
    """Refuses more recomputed layers than the model has.

    Raises:
        PlanError: with the number that there are.
    """
    mode, _, count = layout.recompute.partition(":")
    if mode != "none" and (layers == 0 or int(count or 0) > layers):
        raise PlanError(f"recompute={layout.recompute}: the model has {layers} repeated layers; K is at most that")


def _apply(work: TransformContext) -> None:
    names, mode = work.source.layers, work.layout.recompute
    recomputed = {names[number] for number in chosen(len(names), mode)}
    for stage in work.stages:
        for name, layer in [(name, child) for name, child in stage.module.named_modules() if name in recomputed]:
            if layer in stage.layers:
                moving = MovingBuffers([layer], work.source.moving, name)
                apply([layer], mode, moving.again if moving else None)


TRANSFORM = Transform(
    layer=ForwardLayer.RECOMPUTE,
    applies=lambda layout, _source: layout.recompute != "none",
    apply=_apply,
    check=check,
)
