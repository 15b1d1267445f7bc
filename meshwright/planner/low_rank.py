"""Sizes of gradients that are summed in low rank: what travels, and what a rank keeps of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshwright.spec.low_rank import local_rank, matrix_size, sums_in_low_rank

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankElements:
    """Elements of a rank's gradients under a sum in low rank."""

    sent: int
    """In messages: two thin matrices of each weight, and the gradients that are summed exactly."""
    owed: int
    """Of the errors of one copy."""
    bases: int
    """Of the bases."""

    @property
    def kept(self) -> int:
        """Elements that a rank keeps at most: errors and bases, and those of the step that runs."""
        return 2 * (self.owed + self.bases)


def count_low_rank_elements(
    names: Iterable[str],
    shapes: Mapping[str, Shape],
    local_shapes: Mapping[str, Shape],
    exact_names: Collection[str],
    rank: int,
) -> LowRankElements:
    """Counts the elements of some weights.

    Args:
        names: of the weights.
        shapes: of the whole weights.
        local_shapes: of a rank's parts.
        exact_names: weights that are summed exactly whatever their shape.
        rank: of the layout.
    """
    sent = owed = bases = 0
    for name in names:
        local_shape = local_shapes[name]
        if name in exact_names or not sums_in_low_rank(shapes[name], rank):
            sent += math.prod(local_shape)
            continue
        (rows, columns), width = matrix_size(local_shape), local_rank(local_shape, rank)
        sent += width * (rows + columns)
        owed += rows * columns
        bases += width * columns
    return LowRankElements(sent=sent, owed=owed, bases=bases)
