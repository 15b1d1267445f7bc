"""Boxes of tensors: what a rank holds, who keeps what, and how boxes of one layout fill those of another.

Every tier of a run's state (shared memory, a peer's memory, disk) is a list of boxes with a checksum each. A target is
filled from whatever boxes overlap it, and only when every element of it is written exactly once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from meshwright.errors import CheckpointError
from meshwright.spec.placement import Box, count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of one tensor."""

    name: str
    """The tensor's name, as ``weights/model.norm.weight``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Element type as torch names it, without the prefix: ``float32``."""
    box: Box
    """Which elements: a span for each dim; none for a scalar."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def size_bytes(self) -> int:
        """Bytes of the box's elements."""
        return count(self.box) * itemsize(self.dtype)

    def to_json(self) -> list[Any]:
        """Returns plain values: name, shape, dtype, and (start, stop) of each dim."""
        return [self.name, list(self.shape), self.dtype, [list(span) for span in self.box]]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> TensorShard:
        """Returns the part of `to_json`'s values.

        Raises:
            CheckpointError: for anything else.
        """
        try:
            name, shape, dtype, box = values
            return cls(str(name), tuple(map(int, shape)), str(dtype), tuple((int(a), int(b)) for a, b in box))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{str(values)[:80]} doesn't describe a part of a tensor") from error


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element.

    Raises:
        CheckpointError: for a name that isn't a torch dtype.
    """
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"'{dtype}' is no element type of torch")
    return found.itemsize


def parts_of(tensors: Mapping[str, Any]) -> list[tuple[TensorShard, Tensor]]:
    """Returns every box that this rank holds, with a view of its memory.

    Args:
        tensors: name to a tensor that is held whole, a DTensor, or `parallel.dcp_shards.LocalBoxes`.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: list[tuple[TensorShard, torch.Tensor]] = []
    for name, item in tensors.items():
        boxes: Iterable[tuple[Box, torch.Tensor]]
        if isinstance(item, DTensor):
            sizes, offset = compute_local_shape_and_global_offset(item.shape, item.device_mesh, item.placements)
            local = item.detach()._local_tensor
            boxes = [(tuple((start, start + size) for start, size in zip(offset, sizes)), local)]
        elif isinstance(item, torch.Tensor):
            boxes = [(tuple((0, size) for size in item.shape), item.detach())]
        else:
            boxes = [(box, view.detach()) for box, view in item.parts]
        dtype = str(item.dtype).removeprefix("torch.")
        found += [(TensorShard(name, tuple(item.shape), dtype, box), view) for box, view in boxes if view.numel()]
    return found


def keepers(tables: Sequence[Sequence[TensorShard]]) -> list[list[tuple[int, TensorShard]]]:
    """Says which rank keeps what, so that each element is kept once and ranks keep about as many bytes.

    Args:
        tables: the parts of every rank.

    Returns:
        For each rank what it keeps, ascending: the index into its table, and that part or a box of it (ranks whose
        parts overlap without being equal, as where heads and shards are cut at different rows, keep cells of them).
    """
    holders: dict[TensorShard, list[tuple[int, int]]] = {}
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for rank, table in enumerate(tables):
        for index, part in enumerate(table):
            holders.setdefault(part, []).append((rank, index))
            boxes.setdefault((part.name, part.shape), set()).add(part.box)
    cells: dict[TensorShard, list[tuple[int, int]]] = {}
    cut = {(name, shape): cells_of(shape, found) for (name, shape), found in boxes.items()}
    for part, held in holders.items():
        for box in cut[part.name, part.shape][part.box]:
            cells.setdefault(replace(part, box=box), []).extend(held)
    load = [0] * len(tables)
    kept: list[list[tuple[int, TensorShard]]] = [[] for _ in tables]
    # What one rank alone can keep comes first; then the largest, to whoever has least.
    for part, held in sorted(cells.items(), key=lambda item: (len(item[1]) > 1, -item[0].size_bytes)):
        rank, index = min(held, key=lambda place: (load[place[0]], place[0]))
        load[rank] += part.size_bytes
        kept[rank].append((index, part))
    return [sorted(one, key=lambda item: (item[0], item[1].box)) for one in kept]


def cells_of(shape: Sequence[int], boxes: set[Box]) -> dict[Box, list[Box]]:
    """Returns the disjoint boxes that each box is cut into: itself, where boxes partition the tensor."""
    if uncovered(shape, boxes) is None:
        return {box: [box] for box in boxes}
    edges = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(shape))]
    found = {}
    for box in boxes:
        inner = [[edge for edge in row if start <= edge <= stop] for (start, stop), row in zip(box, edges)]
        found[box] = [tuple(cell) for cell in product(*(pairwise(row) for row in inner))]
    return found


def digest(parts: Iterable[TensorShard]) -> str:
    """Returns a fingerprint of the tensors (names, shapes, types) that parts belong to, whatever their boxes."""
    known = sorted({(part.name, part.shape, part.dtype) for part in parts})
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Returns why boxes aren't a partition of a tensor of this shape, or None."""
    found = sorted(box for box in boxes if count(box))
    for box in found:
        if len(box) != len(shape) or any(start < 0 or stop > size for (start, stop), size in zip(box, shape)):
            return f"has a part {box} outside its shape {tuple(shape)}"
    held, whole = sum(map(count, found)), math.prod(shape)
    if held != whole:
        return f"has {held} of {whole} elements"
    for place, box in enumerate(found):
        for other in found[place + 1 :]:
            if not box or other[0][0] >= box[0][1]:
                break
            if overlap(box, other) is not None:
                return f"has two parts at {other}"
    return None


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the box of elements that two boxes share, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return None if any(start >= stop for start, stop in both) else both


def check_covered(parts: Iterable[TensorShard]) -> None:
    """Refuses parts that don't hold every element of each of their tensors exactly once.

    Raises:
        CheckpointError: naming the tensor.
    """
    tensors: dict[str, list[TensorShard]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    for name, held in tensors.items():
        if len({(part.shape, part.dtype) for part in held}) > 1:
            raise CheckpointError(f"'{name}' has parts of several shapes or types")
        if fault := uncovered(held[0].shape, (part.box for part in held)):
            raise CheckpointError(f"'{name}' {fault}")


def fill(targets: Mapping[str, Any], sources: Mapping[TensorShard, Callable[[], Tensor]]) -> None:
    """Fills this rank's tensors in place from boxes of any layout.

    Args:
        targets: as `parts_of` takes them.
        sources: parts that cover each tensor exactly once (`check_covered`), each with a function that returns its
            checked values, called once at most and only for parts that are needed.

    Raises:
        CheckpointError: when a target would not be written exactly once in every element, or has another shape or
            type; nothing has been written then.
    """
    by_name: dict[str, list[TensorShard]] = {}
    for part in sources:
        by_name.setdefault(part.name, []).append(part)
    wanted: dict[TensorShard, list[tuple[TensorShard, Tensor, Box]]] = {}
    for target, view in parts_of(targets):
        written = 0
        for source in by_name.get(target.name, ()):
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                raise CheckpointError(
                    f"'{target.name}' is {target.dtype} {target.shape}, its state {source.dtype} {source.shape}"
                )
            shared = overlap(target.box, source.box)
            if shared is not None:
                written += count(shared)
                wanted.setdefault(source, []).append((target, view, shared))
        if written != count(target.box):
            raise CheckpointError(f"'{target.name}': {written} of {count(target.box)} elements would be filled")
    for source, uses in wanted.items():
        values = sources[source]()
        for target, view, shared in uses:
            within(view, target.box, shared).copy_(within(values, source.box, shared))


def within(values: Tensor, box: Box, shared: Box) -> Tensor:
    """Returns the elements ``shared`` of a tensor that holds ``box``, as a view."""
    return values[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(shared, box))]
