"""FSDP2's two collectives, sent through a `Wire` so that they are direct on gloo and accounted for everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from meshwright.axes.comm.wire import Wire


class WireAllGather(AllGather):
    """Gathers a unit's parameters: every rank's flat shard to the flat whole."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer for FSDP2 to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor: (n,)`` of all ranks into ``output_tensor: (size * n,)``."""
        transfer = self._wire.all_gather(output_tensor, input_tensor)
        if async_op:
            return transfer
        transfer.wait()
        return None


class WireReduceScatter(ReduceScatter):
    """Sums a unit's gradients and leaves each rank its flat shard."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer for FSDP2 to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sums ``input_tensor: (size * n,)`` over the group into ``output_tensor: (n,)``."""
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"gradients are summed, FSDP2 asked for {op}")
        transfer = self._wire.reduce_scatter(output_tensor, input_tensor)
        if async_op:
            return transfer
        transfer.wait()
        return None
