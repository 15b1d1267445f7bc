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

from meshwright.spec.model_shape import Operator
from meshwright.torch_compat.tensors import tree_flatten


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with the tensors that it read and wrote."""

    operator: Operator
    inputs: tuple[torch.Tensor, ...]
    """Read; referenced here, so that no other tensor gets their address."""
    outputs: tuple[torch.Tensor, ...]
    """Written."""

    @classmethod
    def of(cls, operator: Operator, inputs: Any, outputs: Any) -> Self:
        """Reads the tensors off an operator's arguments and results."""
        return cls(operator, _tensors(inputs), _tensors(outputs))


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
        for tensor in call.inputs:
            # written inside the run: stays in registers
            if _storage(tensor) not in written_bytes:
                read_bytes[_storage(tensor)] = max(read_bytes.get(_storage(tensor), 0), _bytes_of(tensor))
        for tensor in call.outputs:
            written_bytes[_storage(tensor)] = max(written_bytes.get(_storage(tensor), 0), _bytes_of(tensor))
    read_later = {_storage(tensor) for call in later_calls for tensor in call.inputs}
    # only tensors that are needed later leave the chip
    external_bytes = sum(
        size for storage, size in written_bytes.items() if storage in read_later or storage in live_storages
    )
    random_bytes = sum(call.operator.bytes for call in elementwise_run if call.operator.name == "draw")
    return [Operator("element", "fused", (), 0.0, sum(read_bytes.values()) + external_bytes + random_bytes)]


def _tensors(some: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors in nested arguments."""
    return tuple(tensor for tensor in tree_flatten(some)[0] if isinstance(tensor, torch.Tensor))


def _storage(item: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, by which views of one tensor are equal."""
    return int(item.untyped_storage()._cdata)


def _bytes_of(item: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    return item.numel() * item.element_size()
