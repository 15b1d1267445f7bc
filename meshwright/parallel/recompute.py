"""Activation recompute: which layers keep what between forward and backward.

Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.kept_exchange import keeping_contexts
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.selective import is_kept, run_and_release, selective_contexts
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import PROFILER_MARKS


def apply(
    layers: Sequence[nn.Module],
    mode: str,
    make_repeatable: Callable[[Forward], Forward] | None,
    keeps_exchange: bool = False,
    is_compiled: bool = False,
    width: int = 0,
) -> None:
    """Makes layers recompute: their forward is replaced by one that drops what the mode doesn't keep.

    Args:
        layers: those that recompute.
        mode: ``full`` or ``selective``; how many is decided by ``layers``.
        make_repeatable: for layers that change buffers: maps a forward, at each call, to one whose repeated calls start
            from the same values and change none. `parallel.model_checkpointing` restores random numbers.
        keeps_exchange: whether what layers receive from their experts' ranks is kept (`Layout.ep_keep`).
        is_compiled: whether the compiler traces layers with their recompute, for which it knows torch's contexts alone.
        width: D, of the hidden state; products that sum fewer values aren't kept by ``selective``.
    """
    contexts: dict[str, Any] = {}
    if mode == "selective" and not is_compiled:
        contexts["context_fn"] = functools.partial(selective_contexts, width)
    elif mode == "selective":
        # A profiler's marks, as FSDP2 sets around what it gathers, compute nothing, and needn't be in both runs.
        SAC_IGNORED_OPS.update(PROFILER_MARKS)
        contexts["context_fn"] = partial(_compiled_contexts, width)
    if keeps_exchange:
        contexts["context_fn"] = functools.partial(keeping_contexts, contexts.get("context_fn"))
    for layer in layers:
        wrap_forward(
            layer,
            ForwardLayer.RECOMPUTE,
            f"recompute={mode}",
            partial(_recomputing, make_repeatable, contexts, mode == "selective"),
        )


def _recomputing(
    make_repeatable: Callable[[Forward], Forward] | None,
    contexts: dict[str, Any],
    is_selective: bool,
    layer_forward: Forward,
) -> Forward:
    plain = partial(run_and_release, layer_forward) if is_selective else layer_forward
    options = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
    if make_repeatable is None:
        return functools.partial(checkpoint, plain, **options)
    repeatable_forward = make_repeatable
    return lambda *args, **kwargs: checkpoint(repeatable_forward(plain), *args, **options, **kwargs)


def selective_policy(operator: object, arguments: Sequence[Any], width: int) -> CheckpointPolicy:
    """Returns whether ``selective`` keeps what an operator returns, or may compute it again (`selective.is_kept`)."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, arguments, width) else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled_contexts(width: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    # Where its code has what the compiler can't trace, a layer runs as it is.
    if torch.compiler.is_compiling():
        contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
        contexts = create_selective_checkpoint_contexts(_policy(width))
        return contexts
    return selective_contexts(width)


def _policy(width: int) -> Callable[..., CheckpointPolicy]:
    def policy(_context: object, operator: object, *arguments: object, **_kwargs: object) -> CheckpointPolicy:
        return selective_policy(operator, arguments, width)

    return policy


def check(layout: Layout, layers: int) -> None:
    """Refuses more recomputed layers than the model has.

    Raises:
        PlanError: with the number that there are.
    """
    layout.recompute.modes(layers)


def _apply(context: TransformContext) -> None:
    names, width = context.source.layers, context.source.width
    modes = dict(zip(names, context.layout.recompute.modes(len(names))))
    for stage in context.stages:
        for name, layer in [(name, child) for name, child in stage.module.named_modules() if name in modes]:
            if layer in stage.layers and modes[name] != "none":
                moving = MovingBuffers([layer], context.source.moving, name)
                repeatable = moving.with_saved_values if moving else None
                apply([layer], modes[name], repeatable, context.layout.ep_keep, context.layout.compile, width)


TRANSFORM = Transform(
    layer=ForwardLayer.RECOMPUTE,
    applies=lambda layout, _source: bool(layout.recompute),
    apply=_apply,
    check=check,
)
