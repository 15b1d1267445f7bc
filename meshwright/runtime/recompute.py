"""Activation recompute: which layers keep what between forward and backward.

Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import PlanError

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


def apply(layers: Sequence[nn.Module], mode: str, keep_random_state: bool) -> None:
    """Makes layers recompute: their forward is replaced by one that drops what ``mode`` doesn't keep.

    Args:
        layers: the model's repeated blocks, in order.
        mode: ``none``, ``full``, ``selective``, or either with ``:K`` for K of the layers, evenly spaced.
        keep_random_state: whether the layers draw random numbers (dropout), which must be the same again.

    Raises:
        PlanError: when K is more than the layers there are, or there are none to recompute.
    """
    name, _, count = mode.partition(":")
    if name == "none":
        return
    number = int(count) if count else len(layers)
    if not layers or number > len(layers):
        raise PlanError(f"recompute={mode}: the model has {len(layers)} layers; K is at most that")
    contexts: dict[str, Any] = {}
    if name == "selective":
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for place in range(number):
        layer: Any = layers[place * len(layers) // number]
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=keep_random_state, **contexts
        )


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
