"""Rows that go to several places as copies, and the sum by row of what comes back from there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Which of T rows are copied, n copies in all, at most c of a row."""

    source: torch.Tensor
    """(n,) row that each copy is of."""
    positions: torch.Tensor
    """(T, c) copies of each row, in their order; n where it has fewer than c."""

    def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the copies, (n, D), of ``rows: (T, D)``; a row's gradient is the sum over them, in their order."""
        copies: torch.Tensor = _Copy.apply(rows, self.source, self.positions)
        return copies

    def total(self, copies: torch.Tensor) -> torch.Tensor:
        """Returns the sum by row, (T, D), of ``copies: (n, D)``; always in the same order."""
        total: torch.Tensor = _Total.apply(copies, self.source, self.positions)
        return total

    def by_row(self, copies: torch.Tensor) -> torch.Tensor:
        """Returns (T, c, D) of ``copies: (n, D)``; 0 where a row has fewer than c."""
        return _by_row(copies, self.positions)


@dataclass(frozen=True, slots=True)
class PlacedCopies(RowCopies):
    """Copies of rows for P places, those for place 0 first, each place's in the order of the rows."""

    order: torch.Tensor
    """(n,) place x T + row of each copy."""

    @classmethod
    def at(cls, wanted: torch.Tensor, count: int, most: int) -> PlacedCopies:
        """Returns the copies of rows wherever they are wanted; it doesn't wait for the device.

        Args:
            wanted: bool (T, P).
            count: how often it is true: n, known on the host.
            most: c, bound of how often it is true in a row.
        """
        by_place = wanted.t().reshape(-1)
        # Stable, so that copies for a place keep the order of the rows.
        order = torch.sort(by_place.to(torch.uint8), descending=True, stable=True).indices[:count]
        position = torch.where(by_place, by_place.cumsum(0) - 1, count).view(wanted.shape[1], -1).t()
        return cls(order % max(1, len(wanted)), position.sort(dim=1).values[:, :most], order)

    def choose(self, values: torch.Tensor) -> torch.Tensor:
        """Returns what ``values: (T, P)`` hold for each copy, (n,)."""
        return values.t().reshape(-1).index_select(0, self.order)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return _by_row(upstream[0], positions).sum(dim=1), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, copies: torch.Tensor, source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source)
        return _by_row(copies, positions).sum(dim=1)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return upstream[0].index_select(0, source), None, None


def _by_row(copies: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if len(copies) < positions.numel():
        copies = torch.cat([copies, copies.new_zeros(1, copies.shape[1])])
    return copies.index_select(0, positions.reshape(-1)).view(*positions.shape, copies.shape[1])
