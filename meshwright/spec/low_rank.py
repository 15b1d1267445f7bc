"""Low-rank sums of gradients: which weights they are for, their sizes, and the layouts that can have them.

A weight of two dims or more is a matrix of its first dim times the product of the others. Of a matrix M of n x m, R
columns of n and R of m travel instead of n m values: PowerSGD, rank R.
Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression (NeurIPS 2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.errors import PlanError
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import axis_with, gradient_axes, island_count, state_axes

POWER_SGD = "powersgd"
"""Name of the method in ``compress=``."""
LEAST_SAVING = 2
"""A weight of which fewer than half of the values would be saved is summed exactly."""


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (rows, columns) of a weight as a matrix; a vector has one column."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def sums_in_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Returns whether a weight's gradient is summed in low rank.

    Args:
        shape: of the whole weight, before any axis splits it.
        rank: of the sum.
    """
    rows, columns = matrix_size(shape)
    return len(shape) >= 2 and LEAST_SAVING * rank * (rows + columns) < rows * columns


def local_rank(shape: Sequence[int], rank: int) -> int:
    """Returns the rank in which this rank's part of a weight is summed: a small part's is smaller.

    Args:
        shape: of this rank's part.
        rank: of the layout.
    """
    return min(rank, *matrix_size(shape))


def low_rank_refusal(degrees: Mapping[str, int], zero: int, offload: str) -> str:
    """Returns why a layout can't sum gradients in low rank, with the nearest that works; empty where it can."""
    copies = math.prod(degrees.get(name, 1) for name in gradient_axes(state_axes(zero)))
    if zero:
        total = copies * math.prod(degrees.get(name, 1) for name in state_axes(zero))
        return (
            f"zero={zero} sums flat shards, which are no matrices; nearest that works: replicate={total} without "
            "shard, or compress=int8"
        )
    for mechanics, why in (
        (Mechanics.EXPERTS, "an expert's weights have copies of their own"),
        (Mechanics.STAGES, "a tied weight of two stages would owe twice"),
    ):
        axis = axis_with(mechanics, degrees)
        if degrees.get(axis, 1) > 1:
            return f"{why} under {axis}={degrees[axis]}; nearest that works: compress=int8, or drop {axis}"
    if island_count(degrees) > 1:
        return "islands keep no errors of copies; nearest that works: compress=int8"
    if offload == "parameters":
        return "offload=parameters has gradients in host memory; nearest that works: offload=optimizer"
    return ""


def check_low_rank(text: str, degrees: Mapping[str, int], zero: int, offload: str) -> None:
    """Refuses layouts that can't sum gradients in low rank.

    Args:
        text: of the choice, for the message.
        degrees: of the axes.
        zero: level of ZeRO.
        offload: of the layout.

    Raises:
        PlanError: with the rule and the nearest layout that works.
    """
    if refusal := low_rank_refusal(degrees, zero, offload):
        raise PlanError(f"compress={text}: {refusal}")
