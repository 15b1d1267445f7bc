"""Estimates a compiler's fusion of a layer's operators: the element-wise ones between two products become one kernel.

Such a kernel reads the tensors that enter the run and writes those that are needed outside of it: by a later product,
backward or the layer's caller. Norms and softmaxes are included, since one row fits the chip. Source: Ansel et al.,
PyTorch 2 (ASPLOS 2024), section 4.4, on TorchInductor's fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.spec.model_shape import Operator
from meshwright.torch_compat.tensors import tree_flatten


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that an operator read or wrote of a tensor."""

    storage: StorageWeakRef
    """Of the tensor, equal for its views. The address isn't used again while this refers to it, but the memory is freed
    when the tensor is."""
    bytes: int
    """Of the tensor's elements."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with the memory that it read and wrote."""

    operator: Operator
    inputs: tuple[Memory, ...]
    """Read."""
    outputs: tuple[Memory, ...]
    """Written."""

    @classmethod
    def of(cls, operator: Operator, inputs: Any, outputs: Any) -> Self:
        """Reads the tensors off an operator's arguments and results."""
        return cls(operator, _memories(inputs), _memories(outputs))


def fused(calls: Sequence[Call], live_storages: Collection[int]) -> list[Operator]:
    """Returns the operators with each run of element-wise ones as a single ``fused`` one.

    Args:
        calls: in order.
        live_storages: storages that are needed after the last call.
    """
    operators: list[Operator] = []
    elementwise_run: list[Call] = []
    for index, call in enumerate(calls):
        if call.operator.kind == "element":
            elementwise_run.append(call)
            continue
        operators += _fuse_run(elementwise_run, calls[index:], live_storages)
        operators.append(call.operator)
        elementwise_run = []
    return operators + _fuse_run(elementwise_run, (), live_storages)


def _fuse_run(
    elementwise_run: Sequence[Call], later_calls: Sequence[Call], live_storages: Collection[int]
) -> list[Operator]:
    """Returns the fused operator of a run; none for an empty run."""
    if not elementwise_run:
        return []
    written_bytes, read_bytes = dict[int, int](), dict[int, int]()
    for call in elementwise_run:
        for memory in call.inputs:
            # written inside the run: stays in registers
            storage = memory.storage.cdata
            if storage not in written_bytes:
                read_bytes[storage] = max(read_bytes.get(storage, 0), memory.bytes)
        for memory in call.outputs:
            storage = memory.storage.cdata
            written_bytes[storage] = max(written_bytes.get(storage, 0), memory.bytes)
    read_later = {memory.storage.cdata for call in later_calls for memory in call.inputs}
    # only tensors that are needed later leave the chip
    external_bytes = sum(
        size for storage, size in written_bytes.items() if storage in read_later or storage in live_storages
    )
    random_bytes = sum(call.operator.bytes for call in elementwise_run if call.operator.name == "draw")
    return [Operator("element", "fused", (), 0.0, sum(read_bytes.values()) + external_bytes + random_bytes)]


def _memories(some: Any) -> tuple[Memory, ...]:
    """Returns the memory of the tensors in nested arguments."""
    tensors = (tensor for tensor in tree_flatten(some)[0] if isinstance(tensor, torch.Tensor))
    return tuple(
        Memory(StorageWeakRef(tensor.untyped_storage()), tensor.numel() * tensor.element_size()) for tensor in tensors
    )
