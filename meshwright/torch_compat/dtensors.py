"""Private names of torch.distributed.tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.torch_compat import PrivateName

_TRIAL = "_propagate_tensor_meta_non_cached"

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "which box a rank's shard is",
    ),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec:DTensorSpec", "`DTensor.from_local` moves a shard to the mesh's device"
    ),
    PrivateName("torch.distributed.tensor:DTensor._spec", "a shard like another's shares it, in place of a new one"),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec:TensorMeta",
        "part of a DTensorSpec",
    ),
    PrivateName(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        "what each new shape of a DTensor costs before it becomes a parameter: its detach is tried on fake tensors",
    ),
)


def local_box(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of this rank's shard in each dim of the full tensor."""
    sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((int(start), int(start) + int(size)) for start, size in zip(offset, sizes))


def local_rows(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns (first row, number of rows) of this rank's shard along dim 0; all rows of a plain tensor."""
    if not isinstance(parameter, DTensor):
        return 0, int(parameter.shape[0])
    start, stop = local_box(parameter)[0]
    return start, stop - start


def dtensor_like(full: DTensor, local: torch.Tensor) -> DTensor:
    """Returns ``local``, (n_local, ...), as this rank's shard of a tensor of another's shape and placements.

    Unlike ``DTensor.from_local`` it leaves the shard where it is, in host memory for one.
    """
    spec = full._spec
    # torch never changes a spec, and shares it among results too; a new one costs ten times the rest of this function
    if spec.tensor_meta is None or spec.tensor_meta.dtype != local.dtype:
        meta = TensorMeta(full.shape, full.stride(), local.dtype)
        spec = DTensorSpec(full.device_mesh, full.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[abstract]


@contextmanager
def known_detach() -> Iterator[None]:
    """Has `detach` of DTensors keep shape, stride and dtype without trying it on fake tensors.

    Each DTensor that becomes a parameter is detached, and torch finds what that gives by a trial for each shape and
    placement of a process: a sixth of the start of a rank of a small model.
    """
    propagate: Any = getattr(ShardingPropagator, _TRIAL, None)
    if propagate is None:  # another torch, which starts as slowly as before
        yield
        return

    def propagate_known(self: ShardingPropagator, op_schema: Any) -> object:
        (first, *_) = op_schema.args_schema or (None,)
        if op_schema.op == torch.ops.aten.detach.default and isinstance(first, DTensorSpec):
            return first.tensor_meta
        return propagate(self, op_schema)

    setattr(ShardingPropagator, _TRIAL, propagate_known)
    try:
        yield
    finally:
        setattr(ShardingPropagator, _TRIAL, propagate)
