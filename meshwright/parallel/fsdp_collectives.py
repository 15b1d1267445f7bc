"""FSDP2's two collectives, sent through an `AxisGroup` so that they are direct on gloo and accounted for everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import PhasedCollective, WeightCompressor
from meshwright.torch_compat.fsdp2 import AllGather, ReduceScatter

ReplicaSum = PendingCollective | PhasedCollective
"""A sum over copies under way: exact, or compressed."""


class DeferredReductions:
    """Lets gradient reductions run while backward goes on, where FSDP2 itself would wait, as it does on the CPU.

    At most one unit's reduce-scatter and one unit's all-reduce over copies are under way, so that no more than one
    unit's unsharded gradients stay in memory for it. Of compressed sums over copies it is one in each of their
    exchanges. Until `finish` nobody may read their outputs.
    """

    def __init__(self) -> None:
        self.enabled = False
        """Whether sums may end late; otherwise each is waited for where it starts."""
        self._pending_scatter: PendingCollective | None = None
        self._next_all_reduce: Callable[[], ReplicaSum] | None = None
        self._pending_all_reduces: list[ReplicaSum] = []

    def advance(self) -> None:
        """Waits for the pending reduce-scatter, and starts the sum over copies that follows it."""
        if self._pending_scatter is not None:
            self._pending_scatter.wait()
            self._pending_scatter = None
        if self._next_all_reduce is not None:
            self._start_all_reduce(self._next_all_reduce)
            self._next_all_reduce = None

    def defer_scatter(self, scatter: PendingCollective) -> None:
        """Leaves a unit's reduce-scatter under way; `advance` has waited for the one before."""
        if self.enabled:
            self._pending_scatter = scatter
        else:
            scatter.wait()

    def defer_all_reduce(self, start: Callable[[], ReplicaSum]) -> None:
        """Starts a unit's sum over the copies of its shard, once its reduce-scatter has ended.

        At shard degree 1 FSDP2 issues no reduce-scatter, so a pending one belongs to another FSDP unit.
        """
        # Another unit's sum already waits for that reduce-scatter: it goes first.
        if self._next_all_reduce is not None:
            self.advance()
        if not self.enabled:
            start().wait()
        elif self._pending_scatter is not None:
            self._next_all_reduce = start
        else:
            self._start_all_reduce(start)

    def finish(self) -> None:
        """Waits for all of them; what starts later is waited for at once again."""
        self.advance()
        for pending in self._pending_all_reduces:
            pending.wait()
        self._pending_all_reduces.clear()
        self.enabled = False

    def _start_all_reduce(self, start: Callable[[], ReplicaSum]) -> None:
        # An exact sum has ended before the next starts; a compressed one goes on to its next exchange.
        self._pending_all_reduces = [pending for pending in self._pending_all_reduces if not pending.advance()]
        self._pending_all_reduces.append(start())


class BookedAllGather(AllGather):
    """Gathers a unit's parameters: every rank's flat shard to the flat whole; ``of`` names the unit in messages."""

    def __init__(self, axis_group: AxisGroup, of: str = "") -> None:
        self._axis_group, self._unit_name = axis_group, of

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an empty buffer of shape ``size`` for FSDP2 to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor: (n,)`` of all ranks into ``output_tensor: (size * n,)``."""
        transfer = self._axis_group.all_gather(output_tensor, input_tensor, self._unit_name)
        if async_op:
            return transfer
        transfer.wait()
        return None


class CompressedAllGather(BookedAllGather):
    """Gathers a unit's parameters in rounded numbers; ``sizes`` are the elements of each weight's shard by name."""

    def __init__(self, compressor: WeightCompressor, sizes: Mapping[str, int], of: str = "") -> None:
        self._compressor, self._unit_name = compressor, of
        self._weights = WeightBlocks(list(sizes), list(sizes.values()))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor: (n,)`` of all ranks, rounded, into ``output_tensor: (size * n,)``."""
        if not output_tensor.is_floating_point():
            raise ConfigError(
                f"compress_weights: the weights of {self._unit_name} have several types, of which FSDP2 gathers the "
                "bytes; leave compress_weights out"
            )
        transfer = self._compressor.all_gather(self._weights, output_tensor, input_tensor, self._unit_name)
        if async_op:
            return transfer
        transfer.wait()
        return None


class BookedReduceScatter(ReduceScatter):
    """Sums a unit's gradients and leaves each rank its flat shard; ``of`` names the unit in messages."""

    def __init__(self, axis_group: AxisGroup, deferred: DeferredReductions, of: str = "") -> None:
        self._axis_group, self._deferred, self._unit_name = axis_group, deferred, of

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an empty buffer of shape ``size`` for FSDP2 to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sums ``input_tensor: (size * n,)`` over the group into ``output_tensor: (n,)``."""
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"gradients are summed, FSDP2 asked for {op}")
        # The reduce-scatter of the unit before ends first, and its all-reduce over copies starts.
        self._deferred.advance()
        transfer = self._axis_group.reduce_scatter(output_tensor, input_tensor, self._unit_name)
        if async_op:
            return transfer
        self._deferred.defer_scatter(transfer)
        return None
