"""Sizes of gradients that are summed with error feedback: what travels, and what a rank keeps of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshwright.spec.compression import Compression
from meshwright.spec.low_rank import local_rank, matrix_size
from meshwright.spec.top_k import count_largest_values, index_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackBytes:
    """Bytes of a rank's gradients under a sum with error feedback."""

    summed: int
    """In messages that are all-reduced: thin matrices, and the gradients that are summed exactly."""
    gathered: int
    """In messages that are all-gathered: a copy's largest values and their indices."""
    owed: int
    """Of the errors of one copy, and of bases."""
    selection: int
    """To select the largest values of one weight: magnitudes, and the order of equal ones."""

    @property
    def kept(self) -> int:
        """Bytes that a rank keeps at most: errors and bases, and those of the step that runs."""
        return 2 * self.owed


def count_feedback_bytes(
    names: Iterable[str],
    shapes: Mapping[str, Shape],
    local_shapes: Mapping[str, Shape],
    exact_names: Collection[str],
    compression: Compression,
    element_bytes: int,
    shard: tuple[int, int] = (0, 1),
) -> FeedbackBytes:
    """Counts the bytes of some weights.

    Args:
        names: of the weights.
        shapes: of the whole weights.
        local_shapes: of a rank's parts, before ZeRO shards them.
        exact_names: weights that are summed exactly whatever their shape.
        compression: of the layout.
        element_bytes: of a gradient.
        shard: the rank's index among those that share the state, and their number.
    """
    summed = gathered = owed = selection = 0
    for name in names:
        local_shape, padded_shape = shard_shapes(local_shapes[name], *shard)
        elements = math.prod(local_shape)
        if name in exact_names or not compression.leaves_out(shapes[name], local_shape):
            summed += math.prod(padded_shape) * element_bytes
        elif compression.is_low_rank:
            (rows, columns), width = matrix_size(local_shape), local_rank(local_shape, compression.rank)
            summed += width * (rows + columns) * element_bytes
            owed += (elements + width * columns) * element_bytes
        else:
            entry_bytes = element_bytes + index_bytes(elements)
            gathered += count_largest_values(elements, compression.inverse_density) * entry_bytes
            owed += elements * element_bytes
            selection = max(selection, elements * entry_bytes)
    return FeedbackBytes(summed=summed, gathered=gathered, owed=owed, selection=selection)


def shard_shapes(shape: Shape, index: int, count: int) -> tuple[Shape, Shape]:
    """Returns the shapes of a shard by rows as FSDP2 cuts it, and as it travels: as long as the first rank's.

    Args:
        shape: of the weight; a number is one row.
        index: of the rank among those that share it.
        count: of these ranks.
    """
    if count == 1:
        return shape, shape
    rows, *rest = shape or (1,)
    most = -(-rows // count)
    return (max(0, min(most, rows - index * most)), *rest), (most, *rest)
