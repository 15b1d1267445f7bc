"""Sums of the largest values of gradients: which weights they are for, and what travels.

Of each tensor of n values a copy sends those n / D of the largest magnitude, with their indices: top-k.
Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent (EMNLP 2017); Lin et al., Deep Gradient
Compression (ICLR 2018), section 3.1, for vectors and matrices, each with a threshold of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP_K = "topk"
"""Name of the method in ``compress=``."""
_INT32_VALUES = 1 << 31
"""Elements that indices of 4 bytes can name."""


def sums_largest_values(shape: Sequence[int]) -> bool:
    """Returns whether of a weight's gradient the largest values are summed: of vectors all are.

    Args:
        shape: of the whole weight, before any axis splits it.
    """
    return len(shape) >= 2 and math.prod(shape) > max(shape)


def count_largest_values(elements: int, inverse_density: int) -> int:
    """Returns how many values of a tensor travel: one in ``inverse_density``, at least one.

    Args:
        elements: of this rank's part.
        inverse_density: of the layout.
    """
    return -(-elements // inverse_density)


def index_bytes(elements: int) -> int:
    """Returns the bytes of an index into a tensor of so many elements."""
    return 4 if elements <= _INT32_VALUES else 8
