"""Sums gradients over an axis while backward runs: large ones alone and in place, small ones in shared buckets.

A large gradient is reduced in the very tensor that autograd made, so nothing is copied; only tensors too small to fill
the link are packed. Buckets leave in one fixed order on every rank (parameters back to front, as backward makes them),
since collectives match by order. Source: Li et al., PyTorch Distributed (VLDB 2020), section 3.2, for bucketing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.comm_hook import CommHook, GradientBucket, HookTransfer
from meshwright.parallel.compression import GradientSum, PhasedCollective
from meshwright.parallel.layer_names import format_layers
from meshwright.parallel.weak_hook import WeakHook
from meshwright.spec.compression import assign_buckets


@dataclass(eq=False)
class _Bucket:
    parameters: list[nn.Parameter]
    blocks: WeightBlocks | None
    """Its gradients as blocks of rounded numbers; None where they are summed exactly."""
    of: str
    missing: int = 0
    transfer: PendingCollective | PhasedCollective | HookTransfer | None = None
    flat: torch.Tensor | None = None
    hooked: GradientBucket | None = None
    """What a communication hook has of it."""


class GradientReducer:
    """All-reduces the gradients of some parameters over one group.

    A parameter without a gradient on this rank takes part with zeros, so ranks whose graphs differ still agree.

    Args:
        parameters: plain ones, in the order in which forward uses them.
        axis_group: the group.
        layers: number of the layer that a parameter belongs to, for messages; none where that isn't known.
        compressor: sums with fewer bytes; None for exact sums.
        names: of the parameters, in their order, by which a compressor rounds.
        waits_in_backward: whether compressed sums go on to their next exchange under backward; False where backward
            itself communicates with ranks whose graphs may differ, which would wait for each other.
        sources: parameter to the one whose gradients autograd makes, and a hook before ours has moved, where these are
            two (`parallel.compute_copies`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        axis_group: AxisGroup,
        layers: Mapping[nn.Parameter, int] | None = None,
        compressor: GradientSum | None = None,
        names: Sequence[str] = (),
        waits_in_backward: bool = True,
        sources: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self._axis_group, self._compressor, self._waits_in_backward = axis_group, compressor, waits_in_backward
        self.comm_hook: CommHook | None = None
        """Communicates the buckets instead of a sum; None for a sum."""
        self._unfinished: list[PhasedCollective] = []
        """Compressed sums under way, in the order in which they started."""
        self._active = False
        self._next_bucket = 0
        self._buckets: list[_Bucket] = []
        every = list(parameters)
        name_of = dict(zip(every, names))
        trainable = [parameter for parameter in every if parameter.requires_grad]
        sizes = [parameter.numel() * parameter.element_size() for parameter in trainable]
        # Back to front, as backward makes gradients: the first bucket can leave while backward still runs.
        for positions in assign_buckets(sizes, [parameter.dtype for parameter in trainable]):
            members = [trainable[position] for position in positions]
            blocks = None
            if compressor is not None:
                blocks = WeightBlocks([name_of[item] for item in members], [item.numel() for item in members])
            of = format_layers(layers[parameter] for parameter in members) if layers else ""
            self._buckets.append(_Bucket(members, blocks, of))
        self._bucket_of: dict[torch.Tensor, _Bucket] = {
            sources.get(parameter, parameter): bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        for source in self._bucket_of:
            source.register_post_accumulate_grad_hook(WeakHook(self._ready))

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Announces a micro-batch; gradients are communicated in the ``is_last`` one of a step alone."""
        self._active = is_last
        self._next_bucket = 0
        self._unfinished.clear()
        for bucket in self._buckets:
            bucket.missing, bucket.transfer, bucket.flat, bucket.hooked = len(bucket.parameters), None, None, None

    def finish(self) -> None:
        """Starts what backward did not reach, waits for all sums and puts packed gradients back."""
        for bucket in self._buckets[self._next_bucket :]:
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.transfer is not None:
                bucket.transfer.wait()
            if bucket.hooked is not None:
                bucket.flat = bucket.hooked.buffer()
            if bucket.flat is not None:
                self._unpack(bucket)
        self._active = False

    def _ready(self, source: torch.Tensor) -> None:
        if not self._active:
            return
        bucket = self._bucket_of[source]
        if bucket.transfer is not None:
            raise ConfigError(
                "a weight got its gradient twice in one backward, as one does that several calls of torch.utils."
                "checkpoint share: write checkpoint(..., use_reentrant=False), or recompute=full in the layout"
            )
        bucket.missing -= 1
        # A bucket that is complete early waits for those before it: collectives match by order on all ranks.
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].missing <= 0:
            self._start(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _start(self, bucket: _Bucket) -> None:
        grads = [self._gradient(parameter) for parameter in bucket.parameters]
        if self.comm_hook is not None:
            buffer = grads[0].view(-1) if len(grads) == 1 else torch.cat([grad.reshape(-1) for grad in grads])
            index = self._buckets.index(bucket)
            bucket.hooked = GradientBucket(buffer, bucket.parameters, index, index + 1 == len(self._buckets))
            bucket.transfer = self.comm_hook.start(bucket.hooked)
            return
        if self._compressor is not None:
            assert bucket.blocks is not None
            transfer = bucket.transfer = self._compressor.all_reduce(bucket.blocks, grads, bucket.of)
            # Its own first exchange is under way while those before it go on to their next: in one order on all ranks.
            if self._waits_in_backward:
                self._unfinished = [earlier for earlier in self._unfinished if not earlier.advance()]
                self._unfinished.append(transfer)
            return
        # One gradient is summed in place, in the tensor that autograd made; several are copied into one bucket.
        if len(grads) == 1:
            payload = grads[0]
        else:
            payload = bucket.flat = torch.cat([grad.reshape(-1) for grad in grads])
        bucket.transfer = self._axis_group.all_reduce(payload, bucket.of)

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:
            # The other ranks' buckets have this parameter: zeros keep the lengths equal.
            parameter.grad = torch.zeros_like(parameter)
        elif not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        return parameter.grad

    @staticmethod
    def _unpack(bucket: _Bucket) -> None:
        assert bucket.flat is not None
        offset = 0
        for parameter in bucket.parameters:
            size = parameter.numel()
            # A view of the bucket, no copy: the bucket lives as long as the gradients.
            parameter.grad = bucket.flat[offset : offset + size].view_as(parameter)
            offset += size
