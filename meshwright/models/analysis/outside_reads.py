"""Finds by trial which weights of layers a model's forward reads outside of a call of their layer.

ZeRO gathers a layer's weights as the layer is called, and may free them behind the call. Other code has shards there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.models.analysis.clone import Clone, duplicate_module
from meshwright.torch_compat.tensors import TorchDispatchMode, tree_leaves

ROWS = 2
"""Rows of a trial's batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideRead:
    """A weight of a layer that an operator reads while the layer isn't running."""

    weight: str
    """Its name in the model."""
    layer: str
    """The name of its layer."""
    early: bool
    """Whether its layer hasn't been called yet in this forward."""


def find_outside_reads(clone: Clone, length: int) -> tuple[OutsideRead, ...]:
    """Returns the reads of a forward of a model as it is trained, in order, each weight once.

    Types, shapes and devices of weights may be asked for anywhere.

    Args:
        clone: of the model; it stays unchanged.
        length: tokens of a row.
    """
    module = duplicate_module(clone.module)
    reads = _Reads(module, clone.structure.layers)
    try:
        with torch.enable_grad(), reads:
            clone.run(ROWS, module, tokens=length)
    except Exception:
        # The watched forward is the one of every other trial; what a watch itself breaks says nothing about reads.
        return ()
    return tuple(reads.found.values())


class _Reads(TorchDispatchMode):
    """Writes down such reads, of views of a weight too.

    Args:
        module: its layers get hooks.
        layers: names of its layers.
    """

    def __init__(self, module: nn.Module, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.found: dict[str, OutsideRead] = {}
        self._running: Counter[str] = Counter()
        self._called: set[str] = set()
        self._owners: dict[int, list[OutsideRead]] = {}
        for layer in layers:
            submodule = module.get_submodule(layer)
            # Around all other hooks of the layer, as FSDP2's.
            submodule.register_forward_pre_hook(partial(self._enter, layer), prepend=True)
            submodule.register_forward_hook(partial(self._leave, layer))
            for name, parameter in submodule.named_parameters():
                if (storage := _storage(parameter)) is not None:
                    read = OutsideRead(weight=f"{layer}.{name}", layer=layer, early=True)
                    self._owners.setdefault(storage, []).append(read)

    def _enter(self, layer: str, *_: object) -> None:
        self._running[layer] += 1
        self._called.add(layer)

    def _leave(self, layer: str, *_: object) -> None:
        self._running[layer] -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        for leaf in tree_leaves((args, kwargs or {})):
            # A weight that layers share has several owners.
            owners = self._owners.get(_storage(leaf) or 0, []) if isinstance(leaf, torch.Tensor) else []
            if owners and not any(self._running[read.layer] for read in owners):
                read = dataclasses.replace(owners[0], early=not any(read.layer in self._called for read in owners))
                self.found.setdefault(read.weight, read)
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's numbers; None where it has none of its own."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()
