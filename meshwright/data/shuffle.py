"""A shuffle without a list: a keyed permutation of 0..n-1 whose entries are computed one by one."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive_key(*values: Any) -> int:
    """Hashes values to 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes 64-bit values.

    Args:
        values: any shape, uint64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 20 (SplitMix64).
    """
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def permute(positions: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Permutes positions under the permutation of 0..size-1 that each one's key selects.

    A Feistel network over Z_a x Z_b with a * b >= size, walked on until the result is inside.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 (cycle walking) and 4.

    Args:
        positions: (n,) int64, each in 0..size-1.
        size: number of positions, at least 1.
        keys: (n,) or (1,) uint64; positions with equal keys never collide.

    Returns:
        (n,) int64, each in 0..size-1.
    """
    # a = ceil(sqrt(size)) and b = ceil(size / a): the smallest balanced rectangle that holds all positions.
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    result = positions.astype(np.uint64)
    keys = np.broadcast_to(keys, result.shape)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], keys[outside], np.uint64(left_size), np.uint64(right_size))
        # Cycle walking: results beyond size are encrypted again until they fall inside.
        outside = outside[result[outside] >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(
    positions: NDArray[np.uint64], keys: NDArray[np.uint64], left_size: np.uint64, right_size: np.uint64
) -> NDArray[np.uint64]:
    """Encrypts positions by a Feistel network over Z_a x Z_b.

    Args:
        positions: (n,) uint64, each below a * b.
        keys: (n,) uint64.
        left_size: a.
        right_size: b.

    Returns:
        (n,) uint64, each below a * b.
    """
    # A position as a pair (left, right) of Z_a x Z_b.
    left, right = positions % left_size, positions // left_size
    for round_number in range(_ROUNDS):
        # Each half is shifted by a hash of the other, which the inverse could subtract again: a bijection.
        salt = mix(keys + np.uint64(round_number))
        if round_number % 2 == 0:
            left = (left + mix(right ^ salt) % left_size) % left_size
        else:
            right = (right + mix(left ^ salt) % right_size) % right_size
    return left + right * left_size
