"""What a compiler makes of a layer's operators: the element-wise ones between two products, as one kernel.

Such a kernel reads what enters the run and writes what somebody outside of it needs: a later product, backward, the
layer's caller. Norms and softmaxes are in it, since a row of theirs fits the chip. Source: Ansel et al., PyTorch 2
(ASPLOS 2024), section 4.4, on what TorchInductor fuses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_flatten

from meshwright.spec.model_shape import Operator


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with the tensors that it touched."""

    operator: Operator
    given: tuple[torch.Tensor, ...]
    """Read; kept here, so that no other tensor gets their place."""
    made: tuple[torch.Tensor, ...]
    """Written."""

    @classmethod
    def of(cls, operator: Operator, given: Any, made: Any) -> Self:
        """Reads the tensors off an operator's arguments and results."""
        return cls(operator, _tensors(given), _tensors(made))


def fused(calls: Sequence[Call], wanted: Collection[int]) -> list[Operator]:
    """Returns the operators with each run of element-wise ones as a single ``fused`` one.

    Args:
        calls: in order.
        wanted: storages that somebody needs after the last.
    """
    rows: list[Operator] = []
    run: list[Call] = []
    for at, call in enumerate(calls):
        if call.operator.kind == "element":
            run.append(call)
            continue
        rows += _one(run, calls[at:], wanted)
        rows.append(call.operator)
        run = []
    return rows + _one(run, (), wanted)


def _one(run: Sequence[Call], later: Sequence[Call], wanted: Collection[int]) -> list[Operator]:
    if not run:
        return []
    made, read = dict[int, int](), dict[int, int]()
    for call in run:
        for item in call.given:
            if _place(item) not in made:
                read[_place(item)] = max(read.get(_place(item), 0), _size(item))
        for item in call.made:
            made[_place(item)] = max(made.get(_place(item), 0), _size(item))
    needed = {_place(item) for call in later for item in call.given}
    written = sum(size for place, size in made.items() if place in needed or place in wanted)
    drawn = sum(call.operator.bytes for call in run if call.operator.name == "draw")
    return [Operator("element", "fused", (), 0.0, sum(read.values()) + written + drawn)]


def _tensors(some: Any) -> tuple[torch.Tensor, ...]:
    return tuple(item for item in tree_flatten(some)[0] if isinstance(item, torch.Tensor))


def _place(item: torch.Tensor) -> int:
    return int(item.untyped_storage()._cdata)


def _size(item: torch.Tensor) -> int:
    return item.numel() * item.element_size()
