"""A group read off a narrow clone, in the model's sizes: heads are as many and become larger, channels become more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import nn

from meshwright.models.trace import is_matrix
from meshwright.spec.sharding_table import Block, Cutting, ParameterSplit, ShardingGroup


def rescale_group(group: ShardingGroup, small: nn.Module, layer: nn.Module) -> ShardingGroup | None:
    """Returns a group in the sizes of another layer; None where something in it doesn't grow in proportion.

    Args:
        group: of the small layer.
        small: the layer that it was read off.
        layer: the same layer of the model, wider.
    """
    factors = {
        split.name: Fraction(layer.get_parameter(split.name).shape[split.dim], _extent(split.blocks))
        for split in group.splits
    }
    channels = not group.heads and all(block.count == group.units for split in group.splits for block in split.blocks)
    if channels and len(set(factors.values())) > 1:
        return None
    units = group.units * factors[group.splits[0].name] if channels else Fraction(group.units)
    splits, cuttings = [], []
    for split in group.splits:
        blocks = _grown(split.blocks, factors[split.name], channels)
        if blocks is None:
            return None
        splits.append(ParameterSplit(name=split.name, dim=split.dim, blocks=blocks))
    for cutting in group.cuttings:
        factor = _factor(cutting, group, factors, small, layer)
        blocks = None if factor is None else _grown(cutting.blocks, factor, channels)
        if blocks is None or (channels and any(block.count != units for block in blocks)):
            return None
        cuttings.append(dataclasses.replace(cutting, blocks=blocks))
    return dataclasses.replace(group, splits=tuple(splits), cuttings=tuple(cuttings), units=int(units))


def _grown(blocks: Sequence[Block], factor: Fraction, channels: bool) -> tuple[Block, ...] | None:
    """Blocks of so many times the indices: more of them where they are channels, else larger ones."""
    found = []
    for block in blocks:
        start, extent = block.start * factor, (block.count if channels else block.size) * factor
        if start.denominator > 1 or extent.denominator > 1:
            return None
        size, count = (block.size, int(extent)) if channels else (int(extent), block.count)
        found.append(Block(start=int(start), size=size, count=count))
    return tuple(found)


def _factor(
    cutting: Cutting, group: ShardingGroup, factors: dict[str, Fraction], small: nn.Module, layer: nn.Module
) -> Fraction | None:
    """How many times larger what a cutting cuts is in the model; None where nothing tells.

    Its own size tells where the layer holds it, or a weight as long. What passes as an argument, or through a norm
    without a weight, is as the splits whose blocks are its own; where none is, one index for each head stays so.
    """
    before, after = (_held_extent(cutting, item.get_submodule(cutting.module)) for item in (small, layer))
    if before and after:
        return Fraction(after, before)
    shapes = {(block.size, block.count) for block in cutting.blocks}
    alike = {
        factors[split.name] for split in group.splits if {(block.size, block.count) for block in split.blocks} & shapes
    }
    if alike:
        return alike.pop() if len(alike) == 1 else None
    one_each = group.heads and all(block.size == 1 and block.count <= group.units for block in cutting.blocks)
    return Fraction(1) if one_each else None


def _held_extent(cutting: Cutting, module: nn.Module) -> int | None:
    """Length of the dim that is cut, where a module has it; None where a call alone shows it."""
    if cutting.kind == "buffer":
        held = getattr(module, cutting.key, None)
        return held.shape[cutting.dim] if isinstance(held, torch.Tensor) else None
    if cutting.kind == "output" and is_matrix(module):
        weight = module.get_parameter("weight")
        return weight.shape[0 if isinstance(module, nn.Linear) else 1]
    lengths = {item.shape[-1] for item in module.parameters(recurse=False)}
    return lengths.pop() if cutting.kind == "meeting" and len(lengths) == 1 else None


def _extent(blocks: Sequence[Block]) -> int:
    return sum(block.size * block.count for block in blocks)
