"""Tensor shards: the boxes that a rank holds, the rank that saves each, and resharding between layouts.

Every tier of a run's state (shared memory, a peer's memory, disk) is a list of boxes with a checksum each. A target is
filled from all boxes that overlap it, and only when every element of it is written exactly once. A box is a
(start, stop) span in every dim of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.spec.placement import Box, element_count
from meshwright.torch_compat.dtensors import local_box
from meshwright.torch_compat.tensors import local_tensor


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of one tensor, without its values."""

    name: str
    """The tensor's name, as ``weights/model.norm.weight``."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: str
    """Element type as torch names it, without the prefix: ``float32``."""
    box: Box
    """(start, stop) of each dim; empty for a scalar."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def size_bytes(self) -> int:
        """Bytes of the box's elements."""
        return element_count(self.box) * itemsize(self.dtype)

    def to_json(self) -> list[object]:
        """Returns plain values: name, shape, dtype, and (start, stop) of each dim."""
        return [self.name, list(self.shape), self.dtype, [list(span) for span in self.box]]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> TensorShard:
        """Builds a shard from `to_json`'s values.

        Raises:
            CheckpointError: for values of another form.
        """
        try:
            name, shape, dtype, box = values
            return cls(str(name), tuple(map(int, shape)), str(dtype), tuple((int(a), int(b)) for a, b in box))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{str(values)[:80]} doesn't describe a shard of a tensor") from error


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element.

    Raises:
        CheckpointError: for a name that isn't a torch dtype.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise CheckpointError(f"'{dtype}' is no element type of torch")
    return torch_dtype.itemsize


def collect_local_shards(tensors: Mapping[str, StateTensor]) -> list[tuple[TensorShard, Tensor]]:
    """Returns every non-empty shard that this rank holds, with a view of its memory.

    Args:
        tensors: name to an unsharded tensor, a DTensor of any placements, or `parallel.dcp_shards.LocalBoxes`.

    Returns:
        (shard, view) pairs; a view has the shape of its box and the tensor's dtype and device, and needs no gradient.
    """
    local_shards: list[tuple[TensorShard, torch.Tensor]] = []
    for name, tensor in tensors.items():
        boxes: Iterable[tuple[Box, torch.Tensor]]
        if isinstance(tensor, DTensor):
            boxes = [(local_box(tensor), local_tensor(tensor.detach()))]
        elif isinstance(tensor, torch.Tensor):
            boxes = [(tuple((0, size) for size in tensor.shape), tensor.detach())]
        else:
            boxes = [(box, view.detach()) for box, view in tensor.boxes]
        dtype = str(tensor.dtype).removeprefix("torch.")
        local_shards += [
            (TensorShard(name, tuple(tensor.shape), dtype, box), view) for box, view in boxes if view.numel()
        ]
    return local_shards


def assign_saved_shards(tables: Sequence[Sequence[TensorShard]]) -> list[list[tuple[int, TensorShard]]]:
    """Assigns every element to the one rank that saves it, and balances bytes over ranks.

    Args:
        tables: for each rank the shards that it holds.

    Returns:
        For each rank the (index, shard) pairs that it saves, ascending: an index into its table, and that shard or a
        box of it. Shards that overlap without being equal (heads and FSDP shards split at different rows) are split
        into cells.
    """
    shard_holders: dict[TensorShard, list[tuple[int, int]]] = {}
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for rank, table in enumerate(tables):
        for index, shard in enumerate(table):
            shard_holders.setdefault(shard, []).append((rank, index))
            boxes.setdefault((shard.name, shard.shape), set()).add(shard.box)
    # Shards that overlap partly are split into disjoint cells; equal cells of several ranks are replicas.
    cells: dict[TensorShard, list[tuple[int, int]]] = {}
    cells_by_box = {
        (name, shape): split_into_cells(shape, tensor_boxes) for (name, shape), tensor_boxes in boxes.items()
    }
    for shard, holders in shard_holders.items():
        for box in cells_by_box[shard.name, shard.shape][shard.box]:
            cells.setdefault(replace(shard, box=box), []).extend(holders)
    # Greedy balance: bytes assigned so far, by rank.
    rank_bytes = [0] * len(tables)
    kept_by_rank: list[list[tuple[int, TensorShard]]] = [[] for _ in tables]
    # Cells of a single holder leave no choice and come first; replicated ones go, largest first, to the least loaded.
    for shard, holders in sorted(cells.items(), key=lambda item: (len(item[1]) > 1, -item[0].size_bytes)):
        rank, index = min(holders, key=lambda holder: (rank_bytes[holder[0]], holder[0]))
        rank_bytes[rank] += shard.size_bytes
        kept_by_rank[rank].append((index, shard))
    return [sorted(kept_shards, key=lambda item: (item[0], item[1].box)) for kept_shards in kept_by_rank]


def split_into_cells(shape: Sequence[int], boxes: set[Box]) -> dict[Box, list[Box]]:
    """Splits overlapping boxes of one tensor into disjoint cells.

    Args:
        shape: of the full tensor.
        boxes: of its shards on all ranks; they may overlap.

    Returns:
        For each box its cells; the box itself where the boxes already partition the tensor.
    """
    if find_coverage_fault(shape, boxes) is None:
        return {box: [box] for box in boxes}
    # The grid of all boxes' edges: no box crosses a line of it, so its cells are shared entirely or not at all.
    edges = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(shape))]
    cells_by_box = {}
    for box in boxes:
        # The grid lines inside this box, dim by dim; consecutive pairs of them bound its cells.
        inner_edges = [
            [edge for edge in dim_edges if start <= edge <= stop] for (start, stop), dim_edges in zip(box, edges)
        ]
        cells_by_box[box] = [tuple(cell) for cell in product(*(pairwise(dim_edges) for dim_edges in inner_edges))]
    return cells_by_box


def digest(shards: Iterable[TensorShard]) -> str:
    """Returns a sha256 over names, shapes and dtypes of the tensors behind the shards; boxes don't enter."""
    signatures = sorted({(shard.name, shard.shape, shard.dtype) for shard in shards})
    return hashlib.sha256(json.dumps(signatures).encode()).hexdigest()


def find_coverage_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Returns the reason why boxes aren't a partition of a tensor of this shape, or None."""
    # Empty boxes, of ranks beyond the end of an uneven dim, cover nothing.
    filled_boxes = sorted(box for box in boxes if element_count(box))
    for box in filled_boxes:
        if len(box) != len(shape) or any(start < 0 or stop > size for (start, stop), size in zip(box, shape)):
            return f"has a part {box} outside its shape {tuple(shape)}"
    # Right total and no overlap make a partition; the total is the cheaper test.
    box_elements, tensor_elements = sum(map(element_count, filled_boxes)), math.prod(shape)
    if box_elements != tensor_elements:
        return f"has {box_elements} of {tensor_elements} elements"
    # Boxes are sorted by their start in dim 0, so the search stops at the first one that starts behind this one's end.
    for index, box in enumerate(filled_boxes):
        for later_box in filled_boxes[index + 1 :]:
            if not box or later_box[0][0] >= box[0][1]:
                break
            if intersect(box, later_box) is not None:
                return f"has two parts at {later_box}"
    return None


def intersect(first_box: Box, second_box: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor, or None when it is empty."""
    shared_spans = tuple(
        (max(start_1, start_2), min(stop_1, stop_2))
        for (start_1, stop_1), (start_2, stop_2) in zip(first_box, second_box)
    )
    return None if any(start >= stop for start, stop in shared_spans) else shared_spans


def check_covered(shards: Iterable[TensorShard]) -> None:
    """Refuses shards that don't hold every element of each of their tensors exactly once.

    Raises:
        CheckpointError: naming the tensor.
    """
    shards_by_name: dict[str, list[TensorShard]] = {}
    for shard in shards:
        shards_by_name.setdefault(shard.name, []).append(shard)
    for name, tensor_shards in shards_by_name.items():
        if len({(shard.shape, shard.dtype) for shard in tensor_shards}) > 1:
            raise CheckpointError(f"'{name}' has parts of several shapes or types")
        if fault := find_coverage_fault(tensor_shards[0].shape, (shard.box for shard in tensor_shards)):
            raise CheckpointError(f"'{name}' {fault}")


def fill(targets: Mapping[str, StateTensor], sources: Mapping[TensorShard, Callable[[], Tensor]]) -> None:
    """Fills this rank's tensors in place from boxes of any layout.

    Args:
        targets: name to tensor, DTensor or `LocalBoxes`, as for `collect_local_shards`.
        sources: shards that cover each tensor exactly once (`check_covered`), each with a function that returns its
            verified values, of the box's shape and the tensor's dtype. Called at most once, and only when needed.

    Raises:
        CheckpointError: when a target would not be written exactly once in every element, or has another shape or
            dtype. All of this is checked before the first element is written.
    """
    by_name: dict[str, list[TensorShard]] = {}
    for shard in sources:
        by_name.setdefault(shard.name, []).append(shard)
    # First plan every copy and count its elements, so that a state that doesn't fit leaves the targets untouched.
    copies_by_source: dict[TensorShard, list[tuple[TensorShard, Tensor, Box]]] = {}
    for target, view in collect_local_shards(targets):
        # Sources don't overlap each other, so elements written add up.
        written = 0
        for source in by_name.get(target.name, ()):
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                raise CheckpointError(
                    f"'{target.name}' is {target.dtype} {target.shape}, its state {source.dtype} {source.shape}"
                )
            shared = intersect(target.box, source.box)
            if shared is not None:
                written += element_count(shared)
                copies_by_source.setdefault(source, []).append((target, view, shared))
        if written != element_count(target.box):
            raise CheckpointError(f"'{target.name}': {written} of {element_count(target.box)} elements would be filled")
    # A source is read and verified once, however many targets overlap it.
    for source, uses in copies_by_source.items():
        values = sources[source]()
        for target, view, shared in uses:
            view_within(view, target.box, shared).copy_(view_within(values, source.box, shared))


def view_within(values: Tensor, box: Box, shared: Box) -> Tensor:
    """Returns a view of the elements of ``shared``.

    Args:
        values: the elements of ``box``, in its shape.
        box: the box that ``values`` holds, in coordinates of the full tensor.
        shared: a box inside ``box``, in the same coordinates.
    """
    return values[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(shared, box))]
