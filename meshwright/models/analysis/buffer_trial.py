"""Finds by trial which buffers a model's forward changes, and which of them by the rows that it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from meshwright.models.analysis.clone import copy_buffers, equal_tensors, restore_buffers

WORDS = 8
"""Words of which a batch each is made."""
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Tokens and targets of a batch, (B, S) int64 each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingBuffer:
    """A buffer that forward changes in training, such as running statistics."""

    name: str
    data: bool
    """Whether its new value depends on the tokens, or on the number of rows."""


def find_moving_buffers(
    module: nn.Module, run_forward: Callable[[Rows], object], first: Rows, second: Rows
) -> tuple[MovingBuffer, ...]:
    """Returns the buffers that forward changes.

    Args:
        module: a clone; its buffers are as before afterwards.
        run_forward: runs a forward that trains on a batch and leaves the buffers as they are then.
        first: random tokens and targets, (B, S) int64 each.
        second: others.
    """
    buffers_before = copy_buffers(module)
    if not buffers_before:
        return ()

    def buffers_after(rows: Rows) -> dict[str, torch.Tensor]:
        run_forward(rows)
        buffers = copy_buffers(module)
        restore_buffers(module, buffers_before)
        return buffers

    after_first = buffers_after(first)
    changed_names = [
        name for name, buffer in after_first.items() if not equal_tensors(buffer, buffers_before.get(name))
    ]
    if not changed_names:
        return ()
    # all from the same start: a buffer that ends equal each time doesn't depend on the rows
    others = [buffers_after(rows) for rows in _unlike_rows(*second)]
    return tuple(
        MovingBuffer(name=name, data=not all(equal_tensors(after_first[name], other.get(name)) for other in others))
        for name in changed_names
    )


def _unlike_rows(tokens: torch.Tensor, targets: torch.Tensor) -> Iterator[Rows]:
    """Yields a batch, (B, S) int64 each, one row of it, and batches of one word.

    Batches of many random words are alike in their averages: the sign of an expert's load beside the mean, by which
    routers are balanced without a loss, is mostly the same. Source: Wang 2024, 3.1. One word alone goes to few experts.
    """
    yield tokens, targets
    yield tokens[:1], targets[:1]
    for word in tokens.unique()[:WORDS]:
        yield torch.full_like(tokens, int(word)), targets
