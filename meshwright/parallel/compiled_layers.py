"""torch.compile, layer by layer: collectives inside of a layer are operators of its graph (`group_operators`).

Of a layer that recomputes fully the compiler sees the recompute around it, and chooses what to keep. Dynamo can't trace
a checkpoint in which ranks exchange something or whose operations a mode changes (float64): it would run the layer as
it is, without a word. Such a layer is compiled inside of its recompute.

Selective recompute needs no checkpoint: in the graph of a layer's both passes each operator is marked as kept or as
computed again, by the rule of eager layers (`selective.is_kept`), and the compiler cuts forward from backward by these
marks. Tokens that a product of backward needs are gathered again, sums over ranks are kept, and what backward doesn't
read is neither. A part of a layer that the compiler leaves as it is, experts whose tokens travel, recomputes by itself.
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
from meshwright.parallel import group_operators, overlapped_products, recompute, selective
from meshwright.parallel.document_attention import is_packed_mask
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.recompute import recomputing, repeatable, selective_policy
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.torch_compat import compiler as torch_compat_compiler
from meshwright.torch_compat import tensors
from meshwright.torch_compat.compiler import graph_options, keep_before_changes, mark_recompute, tracing_errors
from meshwright.torch_compat.varlen import mark_dynamic_sizes

_REWRITERS = (group_operators, overlapped_products, recompute, selective, tensors, torch_compat_compiler)
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
    layout, names, width = context.layout, context.source.layers, context.source.width
    untraced = "full" if layout.layers_communicate or layout.precision == "float64" else ""
    # Experts' tokens, and heads', travel between graphs.
    is_whole = layout.degree(Mechanics.EXPERTS) == layout.degree(Mechanics.TOKENS) == 1
    modes = dict(zip(names, layout.recompute.modes(len(names))))
    for stage in context.stages:
        name_of = {layer: name for name, layer in stage.module.named_modules()}
        for layer in stage.layers:
            name = name_of.get(layer, "")
            mode = modes.get(name)
            place = ForwardLayer.COMPILE_RECOMPUTED if mode == untraced else ForwardLayer.COMPILE
            wrap = compiled
            if mode == "selective":
                eager = recomputing("selective", repeatable(context, name, [layer]), False, width) if is_whole else None
                wrap = partial(compiled_selectively, width, eager)
            wrap_forward(layer, place, "torch.compile", wrap)


def compiled(plain: Forward) -> Forward:
    """Returns a layer's forward as torch.compile makes it."""
    return _with_dynamic_documents(torch.compile(plain, options=_options()))


def compiled_selectively(width: int, eager: Callable[[Forward], Forward] | None, plain: Forward) -> Forward:
    """Returns the same, with selective recompute.

    Args:
        width: D, of the hidden state.
        eager: has a layer that can't be one graph recompute as it is, since what lies between graphs would keep all
            that it computes. None where what lies there recomputes by itself.
        plain: the layer's forward.
    """
    options = _options(width)
    if eager is None:
        return _with_dynamic_documents(torch.compile(plain, options=options))
    return _WholeOrEager(_with_dynamic_documents(torch.compile(plain, options=options, fullgraph=True)), eager(plain))


class _WholeOrEager:
    """A layer's forward as one graph; as it is, from when it can't be one."""

    def __init__(self, whole: Forward, eager: Forward) -> None:
        self._forward, self._eager = whole, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is not self._eager:
            try:
                return self._forward(*args, **kwargs)
            except tracing_errors() as error:
                reason = str(error).strip().partition("\n")[0]
                logging.getLogger(__name__).warning("a layer that recomputes isn't compiled: %s", reason)
                self._forward = self._eager
        return self._eager(*args, **kwargs)


@functools.cache
def _options(width: int | None = None) -> dict[str, Any]:
    """Returns the compiler's options, the same for layers that may share a graph.

    Args:
        width: D, of the hidden state, where the layers recompute selectively.
    """

    def rewrite(graph: torch.fx.Graph) -> None:
        group_operators.number_calls(graph)
        if width is not None:
            mark_recompute(graph, partial(selective_policy, width=width))
        keep_before_changes(graph)

    files = (__file__, *(module.__file__ or "" for module in _REWRITERS))
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    return graph_options(rewrite, group_operators.keep_in_order, f"{width} {digest}")


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
