"""A rank's part of a weight as torch.distributed.checkpoint takes it: boxes, each a view of local memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.spec.placement import Box


class LocalBoxes:
    """Boxes of one tensor that this rank holds; saved and loaded in place, whatever layout wrote or reads it.

    It speaks the protocol by which torch.distributed.checkpoint knows tensors that are no DTensor
    (``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``).

    Args:
        shape: of the whole tensor.
        boxes: (box of the full tensor, view of local memory of the same sizes).
        dtype: of the elements.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Box, torch.Tensor]], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.boxes = [(box, view) for box, view in boxes if view.numel()]

    @property
    def is_meta(self) -> bool:
        """Whether the local memory holds no values."""
        return any(view.is_meta for _, view in self.boxes)

    def size(self) -> torch.Size:
        """Returns the shape of the whole tensor."""
        return torch.Size(self.shape)

    def numel(self) -> int:
        """Returns the number of elements that this rank holds."""
        return sum(view.numel() for _, view in self.boxes)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Returns what DCP is to write: one item a box."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(view), size=self.size()
                ),
            )
            for chunk, (_, view) in zip(self.__create_chunk_list__(), self.boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Returns the boxes in DCP's words."""
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([start for start, _ in box]), sizes=torch.Size([stop - start for start, stop in box])
            )
            for box, _ in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the memory of one box; ``index`` is DCP's MetadataIndex."""
        for box, view in self.boxes:
            if tuple(index.offset or ()) == tuple(start for start, _ in box):
                return view
        raise ValueError(f"no box of '{index.fqn}' begins at {index.offset}")


StateTensor: TypeAlias = torch.Tensor | LocalBoxes
"""A tensor of a state as a checkpoint takes it: unsharded, a DTensor of any placements, or a rank's boxes."""
