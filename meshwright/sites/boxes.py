"""How weights lie on the server's shard processes: each holds a run of rows of every weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""A run of indices, (start, stop), in every dim of the whole weight; () of a number."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NamedBox:
    """A box of one weight."""

    name: str
    box: Box

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(stop - start for start, stop in self.box)


def shard_rows(shape: Sequence[int], shard: int, shards: int) -> tuple[int, int]:
    """Returns the rows, (start, stop) of dim 0, of a weight that a shard holds; a number is one row."""
    rows = shape[0] if shape else 1
    return rows * shard // shards, rows * (shard + 1) // shards


def cut_for_shard(box: Box, shape: Sequence[int], shard: int, shards: int) -> Box | None:
    """Returns the part of a box that lies on a shard; None where none of it does."""
    start, stop = shard_rows(shape, shard, shards)
    if not shape:
        return () if start < stop else None
    first, last = max(start, box[0][0]), min(stop, box[0][1])
    return ((first, last), *box[1:]) if first < last else None


def fits(box: Box, shape: Sequence[int], rows: tuple[int, int]) -> bool:
    """Returns whether a box is one of a weight of this shape and lies within some of its rows.

    Args:
        box: as another process named it.
        shape: of the whole weight.
        rows: (start, stop) of dim 0.
    """
    if len(box) != len(shape):
        return False
    if not shape:
        return rows[0] < rows[1]
    inside = all(0 <= start < stop <= size for (start, stop), size in zip(box, shape))
    return inside and rows[0] <= box[0][0] and box[0][1] <= rows[1]


def relative_slices(box: Box, rows: tuple[int, int]) -> tuple[slice, ...]:
    """Returns a box's slices in an array that begins at ``rows[0]`` of dim 0; of a number, in one of shape (1,)."""
    if not box:
        return (slice(0, 1),)
    (start, stop), *others = box
    return (slice(start - rows[0], stop - rows[0]), *(slice(*span) for span in others))
