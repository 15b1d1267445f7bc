"""Parameters of no dimension (a gate, a temperature), which FSDP2 can't shard: held as one row, read as a number."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_NAMES = "_scalars_as_rows"


def hold_as_rows(module: nn.Module) -> None:
    """Replaces every parameter of shape () by one of shape (1,); code of the model still reads shape ().

    Args:
        module: not sharded yet; ties stay ties. Modules that hold such a parameter change their class to a subclass.
    """
    row_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        names = [key for key, item in owner._parameters.items() if item is not None and not item.dim()]
        for key in names:
            item = owner._parameters[key]
            assert item is not None
            if item not in row_parameters:
                row_parameters[item] = nn.Parameter(item.detach().reshape(1), requires_grad=item.requires_grad)
                row_parameters[item].__dict__.update(item.__dict__)
            owner._parameters[key] = row_parameters[item]
        if names:
            kind = type(owner)
            read = {key: _reader(key) for key in names}
            owner.__class__ = type(kind.__name__, (kind,), {**read, _NAMES: frozenset(names), "__doc__": kind.__doc__})


def _reader(key: str) -> property:
    def read(owner: nn.Module) -> torch.Tensor:
        item: nn.Parameter = owner._parameters[key]
        # A shard is what FSDP2 looks for; the model's code runs between gathering and release.
        return item if isinstance(item, DTensor) else item.reshape(())

    return property(read)


def unsharded_shape(owner: nn.Module, key: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape that the model gives a parameter, ``key`` of ``owner``: () for one that is held as a row."""
    return () if key in getattr(type(owner), _NAMES, ()) else tuple(parameter.shape)
