"""Low-rank sums of gradients: which weights they are for, and their sizes.

A weight of two dims or more is a matrix of its first dim times the product of the others. Of a matrix M of n x m, R
columns of n and R of m travel instead of n m values: PowerSGD, rank R.
Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression (NeurIPS 2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

POWER_SGD = "powersgd"
"""Name of the method in ``compress=``."""
LEAST_SAVING = 2
"""A weight of which fewer than half of the values would be saved is summed exactly."""


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (rows, columns) of a weight as a matrix; a vector has one column."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def sums_in_low_rank(shape: Sequence[int], local_shape: Sequence[int], rank: int) -> bool:
    """Returns whether the gradient of a rank's part of a weight is summed in low rank.

    A part of so few rows that its two thin matrices would be no fewer values is summed exactly.

    Args:
        shape: of the whole weight, before any axis splits it.
        local_shape: of this rank's part.
        rank: of the sum.
    """
    rows, columns = matrix_size(shape)
    local_rows, local_columns = matrix_size(local_shape)
    saves = LEAST_SAVING * rank * (rows + columns) < rows * columns
    return (
        len(shape) >= 2
        and saves
        and local_rank(local_shape, rank) * (local_rows + local_columns) < local_rows * local_columns
    )


def local_rank(shape: Sequence[int], rank: int) -> int:
    """Returns the rank in which this rank's part of a weight is summed: a small part's is smaller.

    Args:
        shape: of this rank's part.
        rank: of the layout.
    """
    return min(rank, *matrix_size(shape))
