"""Every weight as this rank holds it: its local part, that part's place in the whole, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) for each dim."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One parameter of the model on this rank.

    ``name`` is its fully qualified name; a tied weight has one entry, under the name that comes first.
    """

    name: str
    parameter: nn.Parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, sharing storage with the parameter."""
        held = self.parameter.detach()
        return held._local_tensor if isinstance(held, DTensor) else held

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient, or None."""
        grad = self.parameter.grad
        return grad._local_tensor if isinstance(grad, DTensor) else grad

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return tuple(self.parameter.shape)

    @property
    def sharded_on(self) -> tuple[str, ...]:
        """Axes that split this weight."""
        if not isinstance(self.parameter, DTensor):
            return ()
        names = self.parameter.device_mesh.mesh_dim_names or ()
        return tuple(name for name, placed in zip(names, self.parameter.placements) if isinstance(placed, Shard))

    @property
    def copies(self) -> int:
        """Number of ranks of the world that hold the same part."""
        split = 1
        if isinstance(self.parameter, DTensor):
            mesh = self.parameter.device_mesh
            placed = enumerate(self.parameter.placements)
            split = math.prod(mesh.size(dim) for dim, kind in placed if isinstance(kind, Shard))
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return world // split

    @property
    def box(self) -> Box:
        """Place of this rank's part in the whole weight; an empty part has start == stop."""
        if not isinstance(self.parameter, DTensor):
            return tuple((0, size) for size in self.parameter.shape)
        shape, offset = compute_local_shape_and_global_offset(
            self.parameter.shape, self.parameter.device_mesh, self.parameter.placements
        )
        return tuple((start, start + size) for start, size in zip(offset, shape))

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that stands to ``local`` (this rank's part of some state) as the parameter to its part."""
        return placed_like(self.parameter, local)


def placed_like(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` as this rank's part of a tensor of ``whole``'s shape and placements; itself if that is plain.

    Unlike ``DTensor.from_local`` it leaves the part where it is, in host memory for one.
    """
    if not isinstance(whole, DTensor):
        return local
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[abstract]


def named_weights(module: nn.Module) -> list[Weight]:
    """Returns every trainable parameter of ``module`` once, in the order of definition."""
    return [Weight(name, item) for name, item in module.named_parameters() if item.requires_grad]


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Yields (first name, parameter, every (module, attribute) that holds it), so that ties stay ties."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, part in module.named_modules(remove_duplicate=True):
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
                places.setdefault(parameter, []).append((part, attribute))
    for parameter, held in places.items():
        yield names[parameter], parameter, held
