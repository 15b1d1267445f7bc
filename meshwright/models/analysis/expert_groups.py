"""Finds candidate splits of stacked experts, whose matrices are parameters of one module, by channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.models.analysis.trace import TracedMatrix
from meshwright.models.analysis.units import Blocks
from meshwright.spec.sharding_table import Block, ParameterSplit, ShardingGroup


def expert_groups(experts: TracedMatrix) -> Iterator[ShardingGroup]:
    """Yields candidate splits of stacked experts by channel; a rehearsal decides which is right."""
    width = experts.input.shape[-1]
    stacked = {
        name: parameter
        for name, parameter in experts.module._parameters.items()
        if parameter is not None and parameter.dim() >= 2
    }
    matrices = {name: item for name, item in stacked.items() if item.dim() == 3}
    inner_dims = {name: _inner_dim(experts.module, item, width) for name, item in matrices.items()}
    if any(dim is None for dim in inner_dims.values()):
        return
    channels = min(item.shape[inner_dims[name] or 0] for name, item in matrices.items())
    # a fused gate and up projection has one half after the other, or interleaves them
    for concatenated in (True, False):
        splits = []
        for name, item in stacked.items():
            dim = inner_dims.get(name, 1)
            assert dim is not None
            size = item.shape[dim]
            if name not in inner_dims and (size == width or size % channels):
                # a bias of the output: whole
                continue
            blocks: Blocks = (Block(start=0, size=size // channels, count=channels),)
            if concatenated:
                blocks = tuple(Block(start=start, size=1, count=channels) for start in range(0, size, channels))
            splits.append(ParameterSplit(name=f"{experts.name}.{name}", dim=dim, blocks=blocks))
        yield ShardingGroup(
            module=experts.name,
            column_linears=(),
            column_inputs=(experts.name,),
            replicated_inputs=(),
            row_linear=experts.name,
            units=channels,
            splits=tuple(splits),
        )


def _inner_dim(module: nn.Module, item: torch.Tensor, width: int) -> int | None:
    """Returns the dim of stacked matrices (X, a, b) whose size isn't the model's width."""
    other_dims = [dim for dim in (1, 2) if item.shape[dim] != width]
    if len(other_dims) == 1:
        return other_dims[0]
    # both dims differ from the width: the inner one is unknown
    if other_dims:
        return None
    return 1 if bool(getattr(module, "is_transposed", False)) else 2
