"""Cross-entropy of logits on a GPU in three passes over them: two reads, and the gradient written into their memory.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), for maximum and sum in one pass;
Hsu et al., Liger Kernel (2024), section 3.2, for the gradient in the logits' memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Columns of a row that a program reads at a time."""
WARPS = 8


@triton.jit
def _statistics(logits, columns, found, rows, stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a row's maximum, the sum of exp(x - maximum) and the logit of its column (0 for column -1)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest, total = -float("inf"), 0.0
    for first in range(0, width, block):
        place = first + tl.arange(0, block)
        x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, axis=0))
        # While all are -inf there is nothing to sum, and no difference of infinities to take.
        shift = tl.where(above == -float("inf"), 0.0, above)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), axis=0)
        largest = above
    column = tl.load(columns + row)
    tl.store(found + row, largest)
    tl.store(found + rows + row, total)
    at_column = tl.load(start + tl.maximum(column, 0)).to(tl.float32)
    tl.store(found + 2 * rows + row, tl.where(column < 0, 0.0, at_column))


@triton.jit
def _gradient(logits, gradient, columns, shifts, factors, scales, stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes exp(x - shift) x factor, less the scale at the row's column."""
    row = tl.program_id(0).to(tl.int64)
    shift, factor, scale = tl.load(shifts + row), tl.load(factors + row), tl.load(scales + row)
    column = tl.load(columns + row)
    for first in range(0, width, block):
        place = first + tl.arange(0, block)
        inside = place < width
        x = tl.load(logits + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.exp(x - shift) * factor
        slope = tl.where(place == column, slope - scale, slope)
        tl.store(gradient + row * stride + place, slope.to(gradient.dtype.element_ty), mask=inside)


def row_statistics(logits: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what a softmax's loss needs of each row, (N,) float32 each.

    Args:
        logits: (N, V) of at most 32 bits, contiguous.
        columns: (N,) int64, of each row's target; -1 for none.

    Returns:
        The row's maximum; the sum of exp(x - maximum); the logit of its target, 0 where there is none.
    """
    rows, width = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](
            logits, columns, found, rows, logits.stride(0), width=width, block=_block(width), num_warps=WARPS
        )
    return found[0], found[1], found[2]


def write_gradient(
    logits: torch.Tensor,
    gradient: torch.Tensor,
    columns: torch.Tensor,
    shifts: torch.Tensor,
    factors: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Fills ``gradient`` with exp(logits - shifts) x factors, less ``scales`` at each row's column.

    Args:
        logits: (N, V), contiguous.
        gradient: like ``logits``; may be their memory.
        columns: (N,) int64; -1 for none.
        shifts: (N,) float32.
        factors: (N,) float32.
        scales: (N,) float32.
    """
    rows, width = logits.shape
    if rows:
        _gradient[(rows,)](
            logits,
            gradient,
            columns,
            shifts,
            factors,
            scales,
            logits.stride(0),
            width=width,
            block=_block(width),
            num_warps=WARPS,
        )


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


def probe() -> None:
    """Reads one logit on the current GPU; fails where Triton doesn't run."""
    row_statistics(torch.zeros(1, 1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"))
