"""A shuffle without a list: a keyed permutation of 0..n-1 that gives any place at once."""

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


def derive_key(*parts: Any) -> int:
    """Hashes values to 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatters 64-bit values evenly.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 20 (SplitMix64).
    """
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def permute(places: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns where each place goes under the permutation of 0..size-1 that its key names.

    A Feistel network over Z_a x Z_b with a * b >= size, walked on until the result is inside.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 (cycle walking) and 4.

    Args:
        places: (n,) each in 0..size-1.
        size: how many places there are, at least 1.
        keys: (n,) or (1,) keys; places with equal keys never collide.
    """
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    result = places.astype(np.uint64)
    keys = np.broadcast_to(keys, result.shape)
    moving = np.arange(len(result))
    while len(moving):
        result[moving] = _feistel(result[moving], keys[moving], np.uint64(left_size), np.uint64(right_size))
        moving = moving[result[moving] >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(
    places: NDArray[np.uint64], keys: NDArray[np.uint64], left_size: np.uint64, right_size: np.uint64
) -> NDArray[np.uint64]:
    left, right = places % left_size, places // left_size
    for number in range(_ROUNDS):
        # Each half is shifted by a hash of the other, which a walk backwards could subtract again: a bijection.
        salt = mix(keys + np.uint64(number))
        if number % 2 == 0:
            left = (left + mix(right ^ salt) % left_size) % left_size
        else:
            right = (right + mix(left ^ salt) % right_size) % right_size
    return left + right * left_size
