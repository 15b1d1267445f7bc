"""Rows that go to several places as copies, and the sum by row of what comes back from there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Which of T rows are copied wherever they are wanted, n copies in all."""

    order: torch.Tensor
    """(n,) place x T + row of each copy: those for place 0 first, each place's in the order of the rows."""
    source: torch.Tensor
    """(n,) row of each copy."""
    by_row: torch.Tensor
    """(n,) the copies in the order of their rows, of a row in that of the places."""
    starts: torch.Tensor
    """(T,) where a row's copies begin in ``by_row``."""

    @classmethod
    def at(cls, wanted: torch.Tensor, count: int) -> RowCopies:
        """Returns the copies of rows; it doesn't wait for the device.

        Args:
            wanted: bool (T, P), whether a row is wanted at a place.
            count: how often it is true: n, known on the host.
        """
        by_place = wanted.t().reshape(-1)
        # Stable, so that copies for a place keep the order of the rows.
        order = torch.sort(by_place.to(torch.uint8), descending=True, stable=True).indices[:count]
        source = order % max(1, len(wanted))
        copies_of_row = wanted.sum(dim=1)
        starts = copies_of_row.cumsum(0) - copies_of_row
        return cls(order, source, torch.sort(source, stable=True).indices, starts)

    def choose(self, values: torch.Tensor) -> torch.Tensor:
        """Returns what ``values: (T, P)`` hold for each copy, (n,)."""
        return values.t().reshape(-1).index_select(0, self.order)

    def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the copies, (n, D), of ``rows: (T, D)``; a row's gradient is the sum over them, in their order."""
        copies: torch.Tensor = _Copy.apply(rows, self.source, self.by_row, self.starts)
        return copies

    def total(self, copies: torch.Tensor) -> torch.Tensor:
        """Returns the sum by row, (T, D), of ``copies: (n, D)``; always in the same order."""
        total: torch.Tensor = _Total.apply(copies, self.source, self.by_row, self.starts)
        return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, source: torch.Tensor, by_row: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(by_row, starts)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum_by_row(upstream[0], *ctx.saved_tensors), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, copies: torch.Tensor, source: torch.Tensor, by_row: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(source)
        return _sum_by_row(copies, by_row, starts)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return upstream[0].index_select(0, source), None, None, None


def _sum_by_row(copies: torch.Tensor, by_row: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns (T, D); reads each of ``copies: (n, D)`` once, and makes no room for copies that a row hasn't."""
    if not len(copies):
        return copies.new_zeros(len(starts), copies.shape[1])
    return functional.embedding_bag(by_row, copies.contiguous(), starts, mode="sum")
