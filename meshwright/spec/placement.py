"""Which part of a weight a rank holds before the data axes shard it: what tensor, expert and pipeline axes decide.

A DTensor placement says "an even, contiguous run of one dim". Fused q|k|v weights, grouped heads with fewer key heads
than ranks, and heads that don't divide are none of that, so a `LocalShard` lists runs. What a data axis shards
afterwards is the local tensor, whose dim 0 it cuts once more; `LocalShard.boxes` composes both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

Span = tuple[int, int]
"""(start, stop) of a run of indices."""
Box = tuple[Span, ...]
"""A rectangular region of a tensor: one span for each dim."""


def halved(span: Span) -> tuple[Span, Span]:
    """Returns the first and the second half of a run, of which the second may have one more."""
    start, stop = span
    middle = start + (stop - start) // 2
    return (start, middle), (middle, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardBox:
    """A box of a weight that lies in one box of a rank's local tensor."""

    local_box: Box
    """Where it lies in the local tensor."""
    global_box: Box
    """Where it belongs in the whole weight."""
    copies: int
    """Ranks of the world that hold it, before a data axis shards it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """The part of one weight that this rank's local tensor holds."""

    name: str
    """Name of the weight in the whole model; of tied names the first."""
    global_shape: tuple[int, ...]
    """Shape of the whole weight."""
    spans: tuple[tuple[Span, ...], ...]
    """For each dim, the runs of the whole weight that follow one another in the local tensor."""
    copies: int
    """Ranks of the world that hold each element, before a data axis shards it."""
    copied: tuple[tuple[int, int, int], ...] = ()
    """(start, stop, copies) of indices of the local dim `copied_dim` that more ranks hold."""
    copied_dim: int = 0
    """The dim that `copied` counts in."""
    axes: tuple[str, ...] = ()
    """Axes that split the weight."""

    @classmethod
    def unsharded(cls, name: str, shape: tuple[int, ...], copies: int) -> LocalShard:
        """Returns the shard of a weight that no axis splits."""
        return cls(name=name, global_shape=shape, spans=tuple(((0, size),) for size in shape), copies=copies)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.spans)

    @property
    def is_unsharded(self) -> bool:
        """Whether the local tensor is the weight itself."""
        return self.local_shape == self.global_shape

    def boxes(self, rows: Span | None = None) -> tuple[ShardBox, ...]:
        """Returns the boxes that the local tensor is made of.

        Args:
            rows: only these indices of local dim 0, where a data axis holds no more; boxes then count from its start.
        """
        if not self.global_shape:
            return (ShardBox(local_box=(), global_box=(), copies=self.copies),)
        # Every combination of one run per dim is a box, in local and in whole coordinates.
        runs_by_dim = [self._runs(dim, rows if dim == 0 else None) for dim in range(len(self.global_shape))]
        boxes = []
        for runs in product(*runs_by_dim):
            copies = next((run[2] for dim, run in enumerate(runs) if dim == self.copied_dim), self.copies)
            local = tuple(run[0] for run in runs)
            boxes.append(ShardBox(local_box=local, global_box=tuple(run[1] for run in runs), copies=copies))
        return tuple(boxes)

    def _runs(self, dim: int, rows: Span | None) -> list[tuple[Span, Span, int]]:
        """Returns (local span, full span, copies) of each run of a dim, cut where the copies change."""
        first_row, stop_row = rows if rows is not None else (0, self.local_shape[dim])
        # A box has one number of copies and lies on one side of the data axis's cut, so both cut the runs.
        cuts = {first_row, stop_row}
        if dim == self.copied_dim:
            cuts |= {edge for start, stop, _ in self.copied for edge in (start, stop) if first_row < edge < stop_row}
        runs, local_start = [], 0
        for start, stop in self.spans[dim]:
            edges = sorted(
                {
                    local_start,
                    local_start + stop - start,
                    *(cut for cut in cuts if local_start < cut < local_start + stop - start),
                }
            )
            for start_edge, stop_edge in pairwise(edges):
                if first_row <= start_edge and stop_edge <= stop_row:
                    # From local to whole: shift by the run's start; from local to the data shard: by its first row.
                    span = (start + start_edge - local_start, start + stop_edge - local_start)
                    runs.append(((start_edge - first_row, stop_edge - first_row), span, self._copies(dim, start_edge)))
            local_start += stop - start
        return runs

    def _copies(self, dim: int, index: int) -> int:
        if dim == self.copied_dim:
            for start, stop, copies in self.copied:
                if start <= index < stop:
                    return copies
        return self.copies


def element_count(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)
