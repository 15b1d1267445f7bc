"""The order in which autograd runs what was recorded: by a number of each node, the highest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName("torch._C._autograd:_get_sequence_nr", "how many nodes this thread has recorded: they are their order"),
    PrivateName(
        "torch.autograd.graph:Node._sequence_nr", "a node's place in the order, of its own thread", of_instances=True
    ),
    PrivateName(
        "torch.autograd.graph:Node._set_sequence_nr", "one order for what two threads recorded", of_instances=True
    ),
)

Span = tuple[int, int, int]
"""Nodes from the first number to the second, as their thread counts, and what is added to them."""


def sequence_number() -> int:
    """Returns the number of the next node that this thread records."""
    return int(_get_sequence_nr())


def renumber(tensors: Iterable[torch.Tensor], spans: Sequence[Span]) -> None:
    """Adds to the numbers of the nodes behind some tensors what their span says; those of no span, and theirs, stay.

    Args:
        tensors: of any shapes.
        spans: in the order of their numbers.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        for start, stop, shift in spans:
            if start <= number < stop:
                node._set_sequence_nr(number + shift)
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        waiting.append(following)
                break
