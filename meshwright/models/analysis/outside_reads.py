"""Finds by trial which weights of layers a model's forward reads outside of a call of their layer.

ZeRO gathers a layer's weights as the layer is called, and may free them behind the call. Other code has shards there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.errors import ConfigError
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


def find_outside_reads(clone: Clone, length: int, layers: Sequence[str] = ()) -> tuple[OutsideRead, ...]:
    """Returns the reads of a forward of a model as it is trained, in order, each weight once.

    Types, shapes and devices of weights may be asked for anywhere.

    Args:
        clone: of the model; it stays unchanged.
        length: tokens of a row.
        layers: names of other modules to take for layers.
    """
    module = duplicate_module(clone.module)
    found: dict[str, OutsideRead] = {}

    def seen(_: torch.Tensor, read: OutsideRead | None) -> None:
        if read is not None:
            found.setdefault(read.weight, read)

    try:
        # By the address of its numbers, views of a weight are reads of it too.
        with torch.enable_grad(), ReadWatch(module, layers or clone.structure.layers, _storage, seen):
            clone.run(ROWS, module, tokens=length)
    except Exception:
        # The watched forward is the one of every other trial; what a watch itself breaks says nothing about reads.
        return ()
    return tuple(found.values())


class _StrayWatch(TorchDispatchMode):
    """Collects the shapes of parameters that operators read and a module doesn't hold.

    Args:
        module: whose forward is watched.
        with_values: whether parameters with values count too. A frozen model that its owner hides in a list has them.
    """

    def __init__(self, module: nn.Module, with_values: bool) -> None:
        super().__init__()
        self._held, self._with_values = {id(parameter) for parameter in module.parameters()}, with_values
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        for leaf in tree_leaves((args, kwargs or {})):
            is_stray = isinstance(leaf, nn.Parameter) and id(leaf) not in self._held
            if is_stray and (leaf.is_meta or self._with_values):
                self.shapes.append(leaf.shape)
        return func(*args, **(kwargs or {}))


def refuse_replaced_weights(clone: Clone, length: int, model: str, has_failed: bool = False) -> None:
    """Refuses a model whose forward reads a parameter that was replaced as its weights got their values.

    The model is made on the meta device, and a parameter with values takes the place of each. A list or a closure that
    had the first one still has it, and operators compute with whatever lies in memory.

    Args:
        clone: of the model, with values; it stays unchanged.
        length: tokens of a row.
        model: its name for the message.
        has_failed: whether its forward doesn't run: a parameter of its own values and type may be why.

    Raises:
        ConfigError: with weights of that shape, and the nearest that works.
    """
    module = duplicate_module(clone.module)
    watch = _StrayWatch(module, has_failed)
    with contextlib.suppress(Exception), torch.no_grad(), watch:
        clone.run(ROWS, module, tokens=length)
    if not watch.shapes:
        return
    shape = watch.shapes[0]
    alike = [f"'{name}'" for name, item in clone.module.named_parameters() if item.shape == shape]
    raise ConfigError(
        f"model '{model}': forward reads a weight of {tuple(shape)} ({' or '.join(alike[:3]) or 'of no module'}) from "
        "a list, a closure or another place than its module, where it is never replaced by a rank's own part; nearest "
        "that works: read it as an attribute of its module, as self.linear.weight"
    )


def unreadable_sharding(clone: Clone, length: int, model: str, error: Exception) -> ConfigError:
    """Returns the refusal of a model whose clone doesn't run, by weights that it reads from elsewhere if it does so."""
    try:
        refuse_replaced_weights(clone, length, model, has_failed=True)
    except ConfigError as refusal:
        return refusal
    return ConfigError(
        f"model '{model}': its sharding can't be read, since a small clone, called with tokens alone, doesn't run: "
        f"{error}; nearest that works: replicate or shard, which needn't read it, or a module around it whose forward "
        "computes logits of tokens (B, S) alone, and more with more arguments"
    )


class ReadWatch(TorchDispatchMode):
    """Tells the reads of layers' weights while their layers aren't running.

    Args:
        module: its layers get hooks.
        layers: names of its layers.
        key_of: what a weight and a tensor that is read have in common; None for no such thing.
        seen: takes each tensor that an operator reads, and what of a layer's weight that is outside of its call.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        key_of: Callable[[torch.Tensor], int | None],
        seen: Callable[[torch.Tensor, OutsideRead | None], None],
    ) -> None:
        super().__init__()
        self._key_of, self._seen = key_of, seen
        self._running: Counter[str] = Counter()
        self.called: list[str] = []
        """Names of the layers that were called, in order."""
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
                if (key := self._key_of(parameter)) is not None:
                    read = OutsideRead(weight=f"{layer}.{name}", layer=layer, early=True)
                    self._owners.setdefault(key, []).append(read)

    def remove(self) -> None:
        """Removes the hooks of the layers."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: str, *_: object) -> None:
        self._running[layer] += 1
        self.called.append(layer)

    def _leave(self, layer: str, *_: object) -> None:
        self._running[layer] -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._seen(leaf, self._outside_read(leaf))
        return func(*args, **(kwargs or {}))

    def _outside_read(self, tensor: torch.Tensor) -> OutsideRead | None:
        # A weight that layers share has several owners.
        key = self._key_of(tensor)
        owners = self._owners.get(key, []) if key is not None else []
        if not owners or any(self._running[owner.layer] for owner in owners):
            return None
        return dataclasses.replace(owners[0], early=not any(owner.layer in self.called for owner in owners))


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's numbers; None where it has none of its own."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()
