"""Wraps boxes of a weight in the tensor type that torch.distributed.checkpoint's own planners save and load."""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from meshwright.parallel.dcp_shards import LocalBoxes
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs, wrapper_tensor


class SavedShards(torch.Tensor):
    """Represents the full weight in a state dict, with this rank's boxes of it as views of its memory.

    Only torch.distributed.checkpoint can use it; it has no values that an operation could read.
    """

    local_boxes: LocalBoxes

    @staticmethod
    def __new__(cls, local_boxes: LocalBoxes, device: torch.device) -> Self:
        """Returns a wrapper of boxes whose memory is on a device."""
        placeholder: Self = wrapper_tensor(cls, local_boxes.size(), local_boxes.dtype, device)
        placeholder.local_boxes = local_boxes
        return placeholder

    @classmethod
    def __torch_dispatch__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch for every operation: detach returns the same wrapper, any other is an error."""
        # dcp detaches every tensor of a state dict
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} reads values, but this rank holds only parts of them: save them with dcp")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SavedShards({tuple(self.shape)}, boxes={[box for box, _ in self.local_boxes.boxes]})"

    def __create_write_items__(self, name: str, whole: object) -> list[WriteItem]:
        """Called by dcp.save."""
        return self.local_boxes.__create_write_items__(name, whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Called by dcp.load."""
        return self.local_boxes.__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Called by dcp for the memory of a box, a tensor of its sizes."""
        return self.local_boxes.__get_tensor_shard__(index)
