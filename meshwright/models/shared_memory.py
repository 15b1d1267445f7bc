"""Refuses trained weights that lie in the memory of another tensor: a rank holds each tensor in memory of its own.

One `nn.Parameter` under two names is tied, and stays so under every layout. Two of them over one memory, as peft's
``ensure_weight_tying`` makes for adapters of a tied embedding, are two weights for an optimizer: each of its updates
changes both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


def shared_memory_refusal(module: nn.Module) -> str:
    """Returns why a module's weights can't be held apart, "" where they can.

    Args:
        module: as its code made it, on any device, meta included.
    """
    tensors_by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _held_tensors(module):
        if tensor.layout == torch.strided and tensor.numel():
            # meta tensors have no address, but views of one of them have its storage
            tensors_by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for held in tensors_by_storage.values():
        for index, (name, tensor) in enumerate(held):
            for other_name, other in held[:index]:
                is_trained = any(isinstance(item, nn.Parameter) and item.requires_grad for item in (tensor, other))
                if is_trained and _overlap(tensor, other):
                    return (
                        f"'{other_name}' and '{name}' are two tensors in one memory, so that an update of a weight "
                        "changes the other, and a rank holds each in its own; nearest that works: one nn.Parameter "
                        "under both names, which forward transposes or slices (of peft: ensure_weight_tying=False), "
                        "or .clone() for weights of their own"
                    )
    return ""


def _held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter, buffer and plain tensor attribute once, with its first name.

    A module with a hook before its forward may compute its attributes there, as `torch.nn.utils.spectral_norm` does,
    which starts with the weight's own memory: these are no weights.
    """
    seen: set[int] = set()
    for path, child in module.named_modules():
        values = {} if child._forward_pre_hooks else vars(child)
        attributes = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        for tensors in (child._parameters, child._buffers, attributes):
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}" if path else key, tensor


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two non-empty tensors of any shapes and strides over one storage have an element in common."""
    first, last = zip(_byte_range(one), _byte_range(other))
    if max(first) >= min(last):
        return False
    if one.element_size() != other.element_size() or one.storage_offset() == other.storage_offset():
        return True
    # columns of one matrix lie between each other: mark the elements themselves
    start = min(first) // one.element_size()
    is_element = np.zeros(max(last) // one.element_size() - start, dtype=bool)
    _elements(is_element, one, start)[...] = True
    return bool(_elements(is_element, other, start).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor of any shape in its storage, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start, size = tensor.storage_offset(), tensor.element_size()
    return start * size, (start + last + 1) * size


def _elements(flags: np.ndarray, tensor: torch.Tensor, start: int) -> np.ndarray:
    """Returns a view of flags (one an element of the storage from ``start`` on) with a tensor's shape and strides."""
    return np.lib.stride_tricks.as_strided(flags[tensor.storage_offset() - start :], tensor.shape, tensor.stride())
