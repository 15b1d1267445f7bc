"""Boxes of a weight as the tensor that torch.distributed.checkpoint's own planners know how to save and load."""

from __future__ import annotations

from typing import Any, Self

import torch

from meshwright.parallel.dcp_shards import LocalBoxes


class SavedParts(torch.Tensor):
    """Stands for the whole weight in a state dict, and holds this rank's boxes of it, views of its memory.

    Only torch.distributed.checkpoint can use it; it has no values that an operation could read.
    """

    pieces: LocalBoxes

    @staticmethod
    def __new__(cls, pieces: LocalBoxes, device: torch.device) -> Self:
        """Makes the stand-in for boxes whose memory is on a device."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, pieces.size(), dtype=pieces.dtype, device=device, requires_grad=False
        )
        made.pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation: detaching gives the same, all else has no answer."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} reads values, but this rank holds only parts of them: save them with dcp")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SavedParts({tuple(self.shape)}, boxes={[box for box, _ in self.pieces.parts]})"

    def __create_write_items__(self, name: str, whole: Any) -> list[Any]:
        """Called by dcp.save."""
        return self.pieces.__create_write_items__(name, whole)

    def __create_chunk_list__(self) -> list[Any]:
        """Called by dcp.load."""
        return self.pieces.__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Called by both for the memory of a box."""
        return self.pieces.__get_tensor_shard__(index)
