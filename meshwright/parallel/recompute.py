"""Activation recompute: which layers keep what between forward and backward.

Source: Chen et al., Sublinear Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from meshwright.parallel import group_operators
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.kept_exchange import keeping_contexts
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.selective import is_kept, run_and_release, selective_contexts
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

Wrap = Callable[[Forward], Forward]


def apply(
    layers: Sequence[nn.Module],
    mode: str,
    make_repeatable: Wrap | None,
    keeps_exchange: bool = False,
    width: int = 0,
) -> None:
    """Makes layers recompute: their forward is replaced by that of `recomputing`, whose arguments these are.

    Args:
        layers: those that recompute.
        mode: ``full`` or ``selective``; how many is decided by ``layers``.
        make_repeatable: for layers that change buffers.
        keeps_exchange: whether what layers receive from their experts' ranks is kept.
        width: D.
    """
    wrap = recomputing(mode, make_repeatable, keeps_exchange, width)
    for layer in layers:
        wrap_forward(layer, ForwardLayer.RECOMPUTE, f"recompute={mode}", wrap)


def recomputing(mode: str, make_repeatable: Wrap | None, keeps_exchange: bool, width: int) -> Wrap:
    """Returns what makes of a layer's forward one that drops what the mode doesn't keep.

    Args:
        mode: ``full`` or ``selective``.
        make_repeatable: for layers that change buffers: maps a forward, at each call, to one whose repeated calls start
            from the same values and change none. `parallel.model_checkpointing` restores random numbers.
        keeps_exchange: whether what layers receive from their experts' ranks is kept (`Layout.ep_keep`).
        width: D, of the hidden state; products that sum fewer values aren't kept by ``selective``.
    """
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = partial(selective_contexts, width)
    if keeps_exchange:
        contexts["context_fn"] = partial(keeping_contexts, contexts.get("context_fn"))
    options = {"use_reentrant": False, "preserve_rng_state": False, **contexts}

    def wrap(layer_forward: Forward) -> Forward:
        plain = partial(run_and_release, layer_forward) if mode == "selective" else layer_forward
        if make_repeatable is None:
            return partial(checkpoint, plain, **options)
        repeatable_forward = make_repeatable
        return lambda *args, **kwargs: checkpoint(repeatable_forward(plain), *args, **options, **kwargs)

    return wrap


def repeatable(context: TransformContext, layer: str, modules: Sequence[nn.Module]) -> Wrap | None:
    """Returns ``make_repeatable`` of some modules of a layer; None where they change no buffers."""
    moving = MovingBuffers(modules, context.source.moving, layer)
    return moving.with_saved_values if moving else None


def selective_policy(operator: object, arguments: Sequence[Any], width: int) -> CheckpointPolicy:
    """Returns whether ``selective`` keeps what an operator returns, or may compute it again (`selective.is_kept`)."""
    is_saved = operator in group_operators.KEPT or is_kept(operator, arguments, width)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_all(_operator: object, _arguments: object) -> CheckpointPolicy:
    """Returns that ``full`` computes again what any operator returns."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def can_be_whole(layout: Layout) -> bool:
    """Returns whether a compiled layer may be one graph: no tokens travel to experts."""
    return layout.degree(Mechanics.EXPERTS) == 1


def check(layout: Layout, layers: int) -> None:
    """Refuses more recomputed layers than the model has.

    Raises:
        PlanError: with the number that there are.
    """
    layout.recompute.modes(layers)


def _apply(context: TransformContext) -> None:
    names, layout = context.source.layers, context.layout
    modes = dict(zip(names, layout.recompute.modes(len(names))))
    for stage in context.stages:
        for name, layer in [(name, child) for name, child in stage.module.named_modules() if name in modes]:
            if layer not in stage.layers or modes[name] == "none":
                continue
            # Of a compiled layer's graphs the compiler is told what to keep (`compiled_layers`).
            is_told = layout.compile and (modes[name] == "selective" or can_be_whole(layout))
            recomputed = _uncompiled_parts(context, stage.module, name) if is_told else [layer]
            again = repeatable(context, name, recomputed)
            apply(recomputed, modes[name], again, layout.ep_keep, context.source.width)


def _uncompiled_parts(context: TransformContext, module: nn.Module, layer: str) -> list[nn.Module]:
    """Returns the modules of a layer that run as they are though it is compiled."""
    if context.layout.degree(Mechanics.EXPERTS) == 1:
        return []
    names = (rows.caller if rows.children else rows.module for rows in context.source.experts)
    return [module.get_submodule(name) for name in names if name.startswith(f"{layer}.")]


TRANSFORM = Transform(
    layer=ForwardLayer.RECOMPUTE,
    applies=lambda layout, _source: bool(layout.recompute),
    apply=_apply,
    check=check,
)
