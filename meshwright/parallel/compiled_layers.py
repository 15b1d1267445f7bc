"""torch.compile, layer by layer: collectives inside of a layer are operators of its graph (`group_operators`).

Recompute needs no checkpoint there: in the graph of a layer's both passes each operator of forward is marked as kept or
as computed again, of selective recompute by the rule of eager layers (`selective.is_kept`), and the compiler cuts
forward from backward by these marks. Tokens that a product of backward needs are gathered again, sums over ranks are
kept by ``selective``, and what backward doesn't read is neither kept nor computed.

A layer whose tokens travel to experts between its graphs can't be marked as a whole. With ``full`` it is compiled
inside of a checkpoint, and all of it runs again. With ``selective`` its graphs are marked, experts recompute by
themselves, and what is handed to them is kept.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import PlanError
from meshwright.parallel import group_operators, head_exchange, overlapped_products, recompute, selective
from meshwright.parallel.document_attention import is_packed_mask
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.recompute import can_be_whole, recompute_all, recomputing, repeatable, selective_policy
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.layout import Layout
from meshwright.torch_compat import compiler as torch_compat_compiler
from meshwright.torch_compat import tensors
from meshwright.torch_compat.compiler import (
    graph_options,
    keep_before_changes,
    keep_own_copies,
    mark_recompute,
    mark_returned,
    tracing_errors,
)
from meshwright.torch_compat.varlen import mark_dynamic_sizes

_REWRITERS = (group_operators, head_exchange, overlapped_products, recompute, selective, tensors, torch_compat_compiler)
"""Modules that decide, with this one, what becomes of a graph: one on disk that others made is not found again."""


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
    names, width = context.source.layers, context.source.width
    modes = dict(zip(names, context.layout.recompute.modes(len(names))))
    for stage in context.stages:
        name_of = {layer: name for name, layer in stage.module.named_modules()}
        for layer in stage.layers:
            name = name_of.get(layer, "")
            mode = modes.get(name, "none")
            place, wrap = ForwardLayer.COMPILE, partial(compiled, mode, width)
            if mode != "none" and can_be_whole(context.layout):
                checkpointed = recomputing(mode, repeatable(context, name, [layer]), False, width)
                wrap = partial(compiled_whole, mode, width, checkpointed)
            elif mode == "full":
                place, wrap = ForwardLayer.COMPILE_RECOMPUTED, partial(compiled, "none", width)
            wrap_forward(layer, place, "torch.compile", wrap)


def compiled(mode: str, width: int, plain: Forward) -> Forward:
    """Returns a layer's forward as torch.compile makes it.

    Args:
        mode: of recompute, by which each of its graphs is marked.
        width: D, of the hidden state.
        plain: the layer's forward.
    """
    return _with_dynamic_documents(torch.compile(plain, options=_options(mode, width)))


def compiled_whole(mode: str, width: int, checkpointed: Callable[[Forward], Forward], plain: Forward) -> Forward:
    """Returns the same of a layer that is one graph.

    What lies between graphs would keep all that it computes. So a layer that can't be one is compiled inside of a
    checkpoint with ``full``, and not at all with ``selective``, whose checkpoint sees no operators of compiled code.

    Args:
        mode: of recompute.
        width: D, of the hidden state.
        checkpointed: makes of a layer's forward one that recomputes.
        plain: the layer's forward.
    """
    whole = torch.compile(plain, options=_options(mode, width), fullgraph=True)
    otherwise = plain if mode == "selective" else compiled("none", width, plain)
    return _Whole(_with_dynamic_documents(whole), checkpointed(otherwise))


class _Whole:
    """A layer's forward as one graph; another one from when it can't be one."""

    def __init__(self, whole: Forward, otherwise: Forward) -> None:
        self._forward, self._otherwise = whole, otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is not self._otherwise:
            try:
                return self._forward(*args, **kwargs)
            except tracing_errors() as error:
                reason = str(error).strip().partition("\n")[0]
                logging.getLogger(__name__).warning("a layer that recomputes isn't compiled as one graph: %s", reason)
                self._forward = self._otherwise
        return self._otherwise(*args, **kwargs)


@functools.cache
def _options(mode: str, width: int) -> dict[str, Any]:
    """Returns the compiler's options, the same for layers that may share a graph."""

    def rewrite(graph: torch.fx.Graph) -> None:
        group_operators.number_calls(graph)
        if mode != "none":
            mark_recompute(graph, recompute_all if mode == "full" else partial(selective_policy, width=width))
        keep_before_changes(graph)
        mark_returned(graph)

    def rewrite_each(graph: torch.fx.Graph) -> None:
        group_operators.keep_in_order(graph)
        keep_own_copies(graph)

    files = (__file__, *(module.__file__ or "" for module in _REWRITERS))
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    return graph_options(rewrite, rewrite_each, f"{mode} {width} {digest}")


def _with_dynamic_documents(compiled_forward: Any) -> Forward:
    def forward(*args: object, **kwargs: object) -> object:
        # The number of documents and the longest one's tokens differ from batch to batch: one graph serves all.
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and is_packed_mask(value):
                mark_dynamic_sizes(value, 0, 1)
        return compiled_forward(*args, **kwargs)

    return forward


TRANSFORM = Transform(
    layer=ForwardLayer.COMPILE, applies=lambda layout, _source: layout.compile, apply=_apply, check=check
)
