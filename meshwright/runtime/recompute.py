"""Activation recompute: which layers keep what between forward and backward.

Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import PlanError

Forward = Callable[..., Any]
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
            is called once more, and moves none. Random numbers are `axes.comm.checkpoints`' to bring back.
    """
    contexts: dict[str, Any] = {}
    if mode.startswith("selective"):
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for item in layers:
        layer: Any = item
        layer.forward = _recomputing(layer.forward, again, contexts)


def _recomputing(plain: Forward, again: Callable[[Forward], Forward] | None, contexts: dict[str, Any]) -> Forward:
    options = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
    if again is None:
        return functools.partial(checkpoint, plain, **options)
    repeated = again
    return lambda *args, **kwargs: checkpoint(repeated(plain), *args, **options, **kwargs)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
