"""Dropout by place as one kernel of Triton: the numbers of `parallel.keyed_random`, bit by bit, and no mask in memory.

A thread hashes the places of its elements and drops them as it reads them; backward hashes them again. Importing this
imports Triton, an optional package: `keyed_random.device_kernel` does so, where there is a GPU to run it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx

from meshwright.parallel.keyed_random import FACTOR_1, FACTOR_2, GOLDEN, MURMUR

TILE = 2048
"""Elements of a program: 16 for each of 128 threads."""
MOST_COLUMNS = 1024
_GOLDEN, _MURMUR = tl.constexpr(GOLDEN), tl.constexpr(MURMUR)
_FACTOR_1, _FACTOR_2 = tl.constexpr(FACTOR_1), tl.constexpr(FACTOR_2)


@triton.jit
def _mix(x, addend):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x *= _FACTOR_1
    x ^= x >> 15
    x += addend
    x *= _FACTOR_2
    return x ^ (x >> 16)


@triton.jit
def _load_words(pointer, index, is_inside):  # type: ignore[no-untyped-def]
    return tl.load(pointer + index, mask=is_inside, other=0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["bound", "all_lines", "row_lines"])  # type: ignore[untyped-decorator]
def _drop(  # type: ignore[no-untyped-def]
    x, output, row_keys, lines, columns, bound, scale, all_lines, row_lines, row_columns,
    HAS_INPUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line_is_inside, column_is_inside = line < all_lines, column < row_columns
    first_key = 2 * (line // row_lines)
    number = _load_words(lines, line % row_lines, line_is_inside)
    u = _mix(number * _GOLDEN + _load_words(row_keys, first_key, line_is_inside), 0)
    v = _mix(number * _MURMUR + _load_words(row_keys, first_key + 1, line_is_inside), 0)
    bits = _mix((_load_words(columns, column, column_is_inside) * _GOLDEN)[None, :] + u[:, None], v[:, None])
    keep = bits >= bound.to(tl.uint32)
    # 64 bits: a tensor may have more than 2^31 elements.
    place = line[:, None].to(tl.int64) * row_columns + column[None, :]
    is_inside = line_is_inside[:, None] & column_is_inside[None, :]
    if HAS_INPUT:
        # As x * keep does, so that NaN stays NaN.
        kept = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32) * keep.to(tl.float32)
        tl.store(output + place, (kept * scale).to(output.dtype.element_ty), mask=is_inside)
    else:
        tl.store(output + place, keep.to(tl.uint8), mask=is_inside)


def _launch(
    x: torch.Tensor | None,
    output: torch.Tensor,
    row_keys: torch.Tensor,
    lines: torch.Tensor,
    columns: torch.Tensor,
    bound: int,
    scale: float,
) -> None:
    """Fills ``output``, contiguous, with what is kept of ``x``, of its shape, or with 1 for kept and 0 for dropped."""
    if not output.numel():
        return
    all_lines, row_columns = len(row_keys) * len(lines), len(columns)
    tile_columns = min(MOST_COLUMNS, triton.next_power_of_2(row_columns))
    tile_rows = TILE // tile_columns
    grid = triton.cdiv(all_lines, tile_rows), triton.cdiv(row_columns, tile_columns)
    _drop[grid](
        output if x is None else x, output, row_keys, lines, columns, bound, scale, all_lines, len(lines),
        row_columns, HAS_INPUT=x is not None, ROWS=tile_rows, COLUMNS=tile_columns,
    )  # fmt: skip


@torch.library.custom_op("meshwright::keyed_dropout", mutates_args=())
def drop(
    x: torch.Tensor, row_keys: torch.Tensor, lines: torch.Tensor, columns: torch.Tensor, bound: int, scale: float
) -> torch.Tensor:
    """Returns ``x`` x scale where an element's bits are ``bound`` or more, else 0.

    Args:
        x: B L J elements in any shape, float32, bf16 or fp16.
        row_keys: (B, 2) int32, the keys of its rows (`keyed_random.row_keys`).
        lines: (L,) int32, of each row's box.
        columns: (J,) int32, of each row's box.
        bound: below 2^32.
        scale: factor on what is kept.
    """
    x = x.contiguous()
    output = torch.empty_like(x)
    _launch(x, output, row_keys, lines, columns, bound, scale)
    return output


@drop.register_fake
def _(
    x: torch.Tensor, row_keys: torch.Tensor, lines: torch.Tensor, columns: torch.Tensor, bound: int, scale: float
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save(
    ctx: FunctionCtx,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float],
    output: torch.Tensor,
) -> None:
    _, *places, bound, scale = inputs
    ctx.save_for_backward(*places)  # type: ignore[arg-type]
    ctx.numbers = bound, scale  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad = drop(upstream, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[attr-defined]
    return grad, None, None, None, None, None


drop.register_autograd(_differentiate, setup_context=_save)


def mask(row_keys: torch.Tensor, lines: torch.Tensor, columns: torch.Tensor, bound: int) -> torch.Tensor:
    """Returns (B, L, J) bool: True where an element's bits are ``bound`` or more.

    Args:
        row_keys: (B, 2) int32.
        lines: (L,) int32.
        columns: (J,) int32.
        bound: below 2^32.
    """
    shape = len(row_keys), len(lines), len(columns)
    keep = torch.empty(shape, dtype=torch.uint8, device=lines.device)
    _launch(None, keep, row_keys, lines, columns, bound, 1.0)
    return keep.view(torch.bool)


def probe() -> None:
    """Draws one element on the current GPU; fails where Triton doesn't run."""
    one = torch.zeros(1, dtype=torch.int32, device="cuda")
    mask(one.new_zeros(1, 2), one, one, 1)
