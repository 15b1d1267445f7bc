"""Private names of torch.distributed.tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "which box a rank's shard is",
    ),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec:DTensorSpec", "`DTensor.from_local` moves a shard to the mesh's device"
    ),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec:TensorMeta",
        "part of a DTensorSpec",
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
    meta = TensorMeta(full.shape, full.stride(), local.dtype)
    spec = DTensorSpec(full.device_mesh, full.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[abstract]
