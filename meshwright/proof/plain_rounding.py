"""Compressed sums and gathers written down plainly in numpy, one block at a time, sharing no code with the runtime.

A format is the sorted list of all its numbers. A value lies between two of them; its share of the way to the upper one
is the probability of rounding up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.proof.masks import plain_bits

BLOCK = 256
ROW_RUN = 128
"""Values of a token that share a scale."""
Floats = NDArray[Any]
"""float32 or float64."""


@cache
def representable(name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns a format's finite numbers in order, (M,), and which of them a tie goes to, (M,): the even ones."""
    if name == "int8":
        numbers = np.arange(-127.0, 128.0)
        return numbers, numbers % 2 == 0
    codes = np.arange(256 if name == "fp8" else 65536)
    # Of the 16 bit formats an exponent of ones means infinity or NaN; e4m3 has one NaN of either sign, all ones.
    special = {"fp8": codes & 127 == 127, "fp16": codes >> 10 & 31 == 31, "bf16": codes >> 7 & 255 == 255}[name]
    # Zero has two signs, of which one is enough.
    codes = codes[~special & (codes != 1 << (7 if name == "fp8" else 15))]
    if name == "fp8":
        # A sign, four bits of exponent with bias 7, three of mantissa.
        exponent, mantissa = codes >> 3 & 15, codes & 7
        sizes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        numbers = np.where(codes & 128, -sizes, sizes)
    elif name == "fp16":
        numbers = codes.astype(np.uint16).view(np.float16).astype(np.float64)
    else:
        numbers = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    order = np.argsort(numbers)
    return numbers[order], (codes % 2 == 0)[order]


def round_block(block: Floats, name: str, fractions: NDArray[np.float64] | None) -> Floats:
    """Returns what is decoded of a block of values, (n,) each.

    Args:
        block: at most `BLOCK` values.
        name: of the format.
        fractions: (n,) random numbers in [0, 1); None rounds to the nearest.
    """
    numbers, is_even = representable(name)
    scale: Any = np.float32(1.0)
    if name != "bf16":
        with np.errstate(over="ignore"):
            scale = np.float32(np.abs(block).max(initial=0) / block.dtype.type(numbers[-1]))
        if not np.isfinite(scale):
            return np.full_like(block, np.nan)
    scaled = block / block.dtype.type(scale if scale else 1.0)
    finite = np.isfinite(scaled)
    clipped = np.clip(np.where(finite, scaled, 0), numbers[0], numbers[-1]).astype(np.float64)
    upper = np.clip(np.searchsorted(numbers, clipped, side="right"), 1, len(numbers) - 1)
    low, high = numbers[upper - 1], numbers[upper]
    share = (clipped - low) / (high - low)
    goes_up = share > 0.5 if fractions is None else fractions < share
    if fractions is None:
        goes_up |= (share == 0.5) & is_even[upper]
    rounded = np.where(goes_up, high, low).astype(block.dtype) * block.dtype.type(scale)
    return np.where(finite, rounded, np.nan).astype(block.dtype)


def round_rows(rows: Floats) -> Floats:
    """Returns what is decoded of tokens that travel in float8, (N, D) each, rounded to the nearest.

    The scale of each 128 values is the least power of two, of at least 2**-126, by which e4m3 holds all of them as
    float32 has them.
    """
    numbers, _ = representable("fp8")
    rounded = np.empty_like(rows)
    for first in range(0, rows.shape[1], ROW_RUN):
        run = rows[:, first : first + ROW_RUN].astype(np.float64)
        with np.errstate(over="ignore"):
            largest = np.abs(run).max(axis=1, initial=0, keepdims=True).astype(np.float32).astype(np.float64)
        is_finite = np.isfinite(largest)
        fraction, exponent = np.frexp(np.where(is_finite, largest, 0) / numbers[-1])
        # A fraction of exactly a half is a power of two itself.
        exponent = np.where(largest > 0, exponent - (fraction == 0.5), -126)
        scale = np.exp2(np.maximum(exponent, -126).astype(np.float64))
        values = _to_nearest(np.where(is_finite, run / scale, 0), "fp8") * scale
        rounded[:, first : first + ROW_RUN] = np.where(is_finite, values, np.nan).astype(rows.dtype)
    return rounded


def _to_nearest(values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Returns the format's numbers next to values, of any shape; of two that are as near, the even one."""
    numbers, is_even = representable(name)
    upper = np.clip(np.searchsorted(numbers, values, side="right"), 1, len(numbers) - 1)
    low, high = numbers[upper - 1], numbers[upper]
    goes_up = (values - low > high - values) | ((values - low == high - values) & is_even[upper])
    return np.where(goes_up, high, low)


def random_fractions(draw: str, weight: str, block: int) -> NDArray[np.float64]:
    """Returns the random numbers in [0, 1) of a block of a weight, (256,): the upper 24 bits of each."""
    base = int.from_bytes(hashlib.blake2b(f"compress,{draw}".encode(), digest_size=8).digest(), "little")
    number = int.from_bytes(hashlib.blake2b(weight.encode(), digest_size=4).digest(), "little") * 2**31 + block
    bits = plain_bits(
        base + (number + 1) * 0x9E3779B97F4A7C15, np.zeros(BLOCK, np.uint64), np.arange(BLOCK, dtype=np.uint64)
    )
    return (bits >> np.uint64(8)).astype(np.float64) / 2**24


def round_weight(values: Floats, name: str, draw: str, weight: str) -> Floats:
    """Returns what is decoded of a weight's values, (n,); to the nearest where ``draw`` is empty."""
    rounded = np.empty_like(values)
    for block in range(-(-len(values) // BLOCK)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        fractions = random_fractions(draw, weight, block)[: len(values[part])] if draw else None
        rounded[part] = round_block(values[part], name, fractions)
    return rounded


def compressed_sum(terms: Sequence[Floats], name: str, run: int, draw: str, weight: str) -> Floats:
    """Returns the compressed sum of a weight's gradients, (n,).

    Args:
        terms: (n,) of each copy, in order.
        name: of the format.
        run: neighbours that sum exactly first.
        draw: seed, step, first rank of the copies and stage: ``3,0,4.1``.
        weight: its name.
    """
    nodes = [sum_in_order(terms[start : start + run]) for start in range(0, len(terms), run)]
    rounded = [round_weight(node, name, f"{draw},{index}", weight) for index, node in enumerate(nodes)]
    return round_weight(sum_in_order(rounded), name, f"{draw},sum", weight)


def sum_in_order(terms: Sequence[Floats]) -> Floats:
    """Returns the sum of arrays, (n,) each, from the first to the last."""
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total
