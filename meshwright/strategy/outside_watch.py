"""Refuses reads of a layer's weights outside of its call, in the first forward of a custom loop that trains.

A custom loop's inputs are known in its forwards alone, so that there is nothing to try beforehand. ZeRO gathers a
layer's weights as the layer is called; elsewhere a rank has its shards of them, or memory that was freed behind the
call, whose reading would end the process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import PlanError
from meshwright.models.analysis.outside_reads import OutsideRead, ReadWatch
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import has_layer_units, refuse_outside_read


def watch_outside_reads(module: nn.Module, layers: Sequence[str], layout: Layout) -> None:
    """Watches a sharded module's forwards until one that trains has come to its end.

    Args:
        module: built for the layout; user code calls it.
        layers: names of its layers.
        layout: compiled layers aren't watched, since the compiler doesn't trace them under a watch.
    """
    if not has_layer_units(layout) or layout.compile or not layers:
        return
    is_watched = True

    def watching(plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            nonlocal is_watched
            if not is_watched or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            watch = _refusing_watch(module, layers, layout)
            try:
                with watch:
                    output = plain(*args, **kwargs)
            finally:
                watch.remove()
            is_watched = False
            return output

        return forward

    wrap_forward(module, ForwardLayer.PROGRESS, "reads of weights outside of their layer are refused", watching)


def _refusing_watch(module: nn.Module, layers: Sequence[str], layout: Layout) -> ReadWatch:
    """Returns a watch that raises at the first such read, of a weight's shards or of memory that was freed."""

    def seen(tensor: torch.Tensor, read: OutsideRead | None) -> None:
        if read is not None:
            refuse_outside_read(read, layout)
        elif _is_freed(tensor):
            where = f", of '{watch.called[-1]}' or a layer before it," if watch.called else ""
            raise PlanError(
                f"a view of a layer's weight{where} is read after the call of its layer, behind which {layout} frees "
                "its weights; nearest that works: zero=2, or have its layer's own forward compute what is needed of "
                "it, and return that"
            )

    watch = ReadWatch(module, layers, lambda tensor: id(tensor) if isinstance(tensor, DTensor) else None, seen)
    return watch


def _is_freed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory was given back: FSDP2 frees a gathered weight, and views of it stay."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
