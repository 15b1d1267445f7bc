"""Refuses reads of a layer's weights outside of its call, in the first forward of a custom loop that trains.

A custom loop's inputs are known in its forwards alone, so that there is nothing to try beforehand. ZeRO gathers a
layer's weights as the layer is called; elsewhere a rank has its shards of them, or memory that was freed behind the
call, whose reading would end the process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshwright.errors import PlanError
from meshwright.models.analysis.outside_reads import OutsideRead
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import TorchDispatchMode, tree_leaves
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
            watch = _OutsideReadWatch(module, layers, layout)
            try:
                with watch:
                    output = plain(*args, **kwargs)
            finally:
                watch.remove()
            is_watched = False
            return output

        return forward

    wrap_forward(module, ForwardLayer.PROGRESS, "reads of weights outside of their layer are refused", watching)


class _OutsideReadWatch(TorchDispatchMode):
    """Raises at the first such read.

    Args:
        module: its layers get hooks.
        layers: names of its layers.
        layout: for the message.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self._running: Counter[str] = Counter()
        self._called: list[str] = []
        self._owners: dict[int, list[OutsideRead]] = {}
        self._handles: list[RemovableHandle] = []
        for layer in layers:
            submodule = module.get_submodule(layer)
            # Around all other hooks of the layer, as FSDP2's.
            self._handles += [
                submodule.register_forward_pre_hook(partial(self._enter, layer), prepend=True),
                submodule.register_forward_hook(partial(self._leave, layer), always_call=True),
            ]
            for name, parameter in submodule.named_parameters():
                if isinstance(parameter, DTensor):
                    read = OutsideRead(weight=f"{layer}.{name}", layer=layer, early=True)
                    self._owners.setdefault(id(parameter), []).append(read)

    def remove(self) -> None:
        """Removes the hooks of the layers."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: str, *_: object) -> None:
        self._running[layer] += 1
        self._called.append(layer)

    def _leave(self, layer: str, *_: object) -> None:
        self._running[layer] -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._check(leaf)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuses a shard of a layer's weight, and a view of memory that was freed."""
        owners = self._owners.get(id(tensor), [])
        if owners and not any(self._running[owner.layer] for owner in owners):
            read = OutsideRead(
                weight=owners[0].weight,
                layer=owners[0].layer,
                early=not any(owner.layer in self._called for owner in owners),
            )
            refuse_outside_read(read, self._layout)
        elif _is_freed(tensor):
            where = f", of '{self._called[-1]}' or a layer before it," if self._called else ""
            raise PlanError(
                f"a view of a layer's weight{where} is read after the call of its layer, behind which "
                f"{self._layout} frees its weights; nearest that works: zero=2, or have its layer's own forward "
                "compute what is needed of it, and return that"
            )


def _is_freed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory was given back: FSDP2 frees a gathered weight, and views of it stay."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
