"""Every weight as this rank holds it: its local shard, the boxes of that shard in the full weight, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.parallel.dcp_shards import LocalBoxes, StateTensor
from meshwright.parallel.scalar_parameters import unsharded_shape
from meshwright.spec.placement import Box, LocalShard, ShardBox
from meshwright.torch_compat.dtensors import dtensor_like, local_box
from meshwright.torch_compat.tensors import foreach_copy_, local_tensor


@dataclass(eq=False)
class Weight:
    """One parameter of the model on this rank.

    ``shard`` says which part of the whole weight the parameter stands for; a data axis may shard that part once more,
    in which case ``parameter`` is a DTensor of the part's shape. A tied weight has one entry.
    """

    parameter: nn.Parameter
    shard: LocalShard
    compute: nn.Parameter | None = None
    """Its values in the type of compute, which the model reads; None where it reads ``parameter`` itself."""

    @property
    def name(self) -> str:
        """Fully qualified name in the whole model; of tied names the first."""
        return self.shard.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return self.shard.global_shape

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, sharing storage with the parameter."""
        return local_tensor(self.parameter.detach())

    @property
    def address(self) -> int:
        """Where `local` lies in memory."""
        return local_tensor(self.parameter).data_ptr()

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient, or None."""
        grad = self.parameter.grad
        return None if grad is None else local_tensor(grad)

    def widen_gradient(self) -> None:
        """Gives the gradient the type of the weight."""
        if self.parameter.grad is not None:
            self.parameter.grad = self.parameter.grad.to(self.parameter.dtype)

    @property
    def sharded_on(self) -> tuple[str, ...]:
        """Axes that split this weight."""
        if not isinstance(self.parameter, DTensor):
            return self.shard.axes
        names = self.parameter.device_mesh.mesh_dim_names or ()
        # A mesh dim may stand for several axes ("shard+cp"), over whose product the state is sharded.
        sharding_dims = [
            name for name, placement in zip(names, self.parameter.placements) if isinstance(placement, Shard)
        ]
        return (*self.shard.axes, *(axis for name in sharding_dims for axis in name.split("+")))

    @property
    def data_shards(self) -> int:
        """Number of ranks over which a data axis shards this rank's local part."""
        if not isinstance(self.parameter, DTensor):
            return 1
        mesh = self.parameter.device_mesh
        return math.prod(
            mesh.size(dim) for dim, placement in enumerate(self.parameter.placements) if isinstance(placement, Shard)
        )

    @cached_property
    def boxes(self) -> tuple[ShardBox, ...]:
        """Boxes that the local part is made of; ``copies`` counts the ranks of the world that hold each."""
        row_range = None
        if isinstance(self.parameter, DTensor):
            # FSDP2 shards dim 0 of the local part once more.
            row_range = local_box(self.parameter)[0]
        shards = self.data_shards
        if row_range is not None and not self.shape:  # a number, which one of the shards holds as its row
            copies = max(1, self.shard.copies // shards)
            return tuple(ShardBox(local_box=((0, 1),), global_box=(), copies=copies) for _ in range(*row_range))
        return tuple(
            ShardBox(
                local_box=shard_box.local_box,
                global_box=shard_box.global_box,
                copies=max(1, shard_box.copies // shards),
            )
            for shard_box in self.shard.boxes(row_range)
        )

    def extract_shard(self, full_tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a tensor of the whole weight's shape that belong to this rank, laid out as `local`."""
        out = torch.empty(self.local.shape, dtype=full_tensor.dtype, device=full_tensor.device)
        for shard_box in self.boxes:
            view_box(out, shard_box.local_box).copy_(view_box(full_tensor, shard_box.global_box))
        return out

    def cut_operand(self, value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a tensor that broadcasts to the whole weight's shape, as a mask of it does.

        Args:
            value: plain; unchanged where it has the part's shape, or is the same along what is split.
            part: a tensor of this rank's part's shape; a DTensor where a data axis shards that once more.
        """
        if not value.dim() or value.dim() > len(self.shape):
            return value
        sizes = (1,) * (len(self.shape) - value.dim()) + tuple(value.shape)
        is_of_part = all(size in (1, part_size) for size, part_size in zip(sizes, local_tensor(part).shape))
        if not all(size in (1, whole) for size, whole in zip(sizes, self.shape)):
            return value
        if is_of_part and not isinstance(part, DTensor):
            return value
        return as_dtensor_like(part, self.extract_shard(value.expand(self.shape)))

    @torch.no_grad()
    def write_values(self, local: torch.Tensor, index: Any, value: Any) -> None:
        """Writes into ``local``, laid out as `local`, what ``tensor[index] = value`` writes into one of `shape`."""
        is_written = torch.zeros(self.shape, dtype=torch.bool, device=local.device)
        is_written[index] = True
        written = torch.zeros(self.shape, dtype=local.dtype, device=local.device)
        written[index] = value
        local.copy_(torch.where(self.extract_shard(is_written), self.extract_shard(written), local))

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Returns ``local`` (this rank's shard of a state) as a DTensor where the parameter is one, else as it is."""
        return as_dtensor_like(self.parameter, local)

    def checkpoint_boxes(self, local: torch.Tensor) -> StateTensor:
        """Returns ``local`` (this rank's part of some state) as a checkpoint takes it: boxes of the whole."""
        as_row = not self.shape and local.dim() > 0
        if self.shard.is_unsharded and not as_row:
            return self.as_dtensor(local)
        boxes = [(shard_box.global_box, view_box(local, shard_box.local_box)) for shard_box in self.boxes]
        if as_row:
            # FSDP2 holds a number as one row (`scalar_parameters`); a checkpoint has it with no dims.
            boxes = [(box, view.reshape(())) for box, view in boxes]
        return LocalBoxes(self.shape, boxes, local.dtype)


@torch.no_grad()
def refresh_compute(weights: Iterable[Weight]) -> None:
    """Gives the copies that compute the present values of their weights."""
    copies = [(weight.compute, weight.local) for weight in weights if weight.compute is not None]
    if copies:
        foreach_copy_(*zip(*copies))


def view_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns a box of a tensor of any shape, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def as_dtensor_like(reference: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` as this rank's part of a tensor of ``reference``'s shape and placements; itself if plain."""
    if not isinstance(reference, DTensor):
        return local
    return dtensor_like(reference, local)


def named_weights(
    module: nn.Module,
    shards: Mapping[str, LocalShard],
    copies: int,
    frozen: bool = False,
    masters: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
) -> list[Weight]:
    """Returns every trainable parameter of ``module`` once, in the order of definition.

    Args:
        module: wrapped or not.
        shards: for parameters that aren't held whole or have copies of their own, by name in the module.
        copies: ranks of the world that hold a weight which has no entry there.
        frozen: parameters that aren't trained as well.
        masters: parameter of the module to the one that is updated, of its shape, where these are two.
    """
    weights = []
    for name, parameter, ((owner, key), *_) in parameter_holders(module):
        if parameter.requires_grad or frozen:
            shard = shards.get(name) or LocalShard.unsharded(name, unsharded_shape(owner, key, parameter), copies)
            master = masters.get(parameter)
            weights.append(Weight(parameter, shard) if master is None else Weight(master, shard, parameter))
    return weights


def parameter_holders(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Yields (first name, parameter, every (module, attribute) that holds it), so that ties stay ties."""
    # By the parameter's identity: a tied weight comes once, with all its holders.
    holders_of: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=True):
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
                holders_of.setdefault(parameter, []).append((submodule, attribute))
    for parameter, holders in holders_of.items():
        yield names[parameter], parameter, holders
