"""Rescales a group that was read off a narrow clone to the model's sizes: heads become larger, channels more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import nn

from meshwright.models.analysis.trace import is_matrix
from meshwright.spec.sharding_table import Block, Cutting, CuttingKind, ParameterSplit, ShardingGroup


def rescale_group(group: ShardingGroup, clone_layer: nn.Module, layer: nn.Module) -> ShardingGroup | None:
    """Returns a group in the sizes of another layer; None where something in it doesn't scale in proportion.

    Args:
        group: of the clone's layer.
        clone_layer: the layer that it was read off.
        layer: the same layer of the model, wider.
    """
    factors = {
        split.name: Fraction(layer.get_parameter(split.name).shape[split.dim], _extent(split.blocks))
        for split in group.splits
    }
    # units that are heads keep their count and widen; channels keep their size and multiply
    channels = not group.heads and all(block.count == group.units for split in group.splits for block in split.blocks)
    # channels of several tensors must multiply alike, or they no longer match
    if channels and len(set(factors.values())) > 1:
        return None
    units = group.units * factors[group.splits[0].name] if channels else Fraction(group.units)
    splits, cuttings = [], []
    for split in group.splits:
        blocks = _rescale_blocks(split.blocks, factors[split.name], channels)
        if blocks is None:
            return None
        splits.append(ParameterSplit(name=split.name, dim=split.dim, blocks=blocks))
    for cutting in group.cuttings:
        factor = _cutting_factor(cutting, group, factors, clone_layer, layer)
        blocks = None if factor is None else _rescale_blocks(cutting.blocks, factor, channels)
        if blocks is None or (channels and any(block.count != units for block in blocks)):
            return None
        cuttings.append(dataclasses.replace(cutting, blocks=blocks))
    return dataclasses.replace(group, splits=tuple(splits), cuttings=tuple(cuttings), units=int(units))


def _rescale_blocks(blocks: Sequence[Block], factor: Fraction, channels: bool) -> tuple[Block, ...] | None:
    """Returns blocks with ``factor`` times the indices: more of them where they are channels, else larger ones."""
    rescaled = []
    for block in blocks:
        start, extent = block.start * factor, (block.count if channels else block.size) * factor
        # the blocks don't fall on whole indices of the model
        if start.denominator > 1 or extent.denominator > 1:
            return None
        size, count = (block.size, int(extent)) if channels else (int(extent), block.count)
        rescaled.append(Block(start=int(start), size=size, count=count))
    return tuple(rescaled)


def _cutting_factor(
    cutting: Cutting, group: ShardingGroup, factors: dict[str, Fraction], clone_layer: nn.Module, layer: nn.Module
) -> Fraction | None:
    """Returns the ratio of a cut dim in the model to the clone's; None where nothing determines it.

    A buffer, or a weight of the same length, determines it by its own size. An argument, or the input of a norm without
    a weight, scales as the splits with the same blocks; where there is none, one index for each head stays one.
    """
    clone_extent, model_extent = (
        _own_extent(cutting, item.get_submodule(cutting.module)) for item in (clone_layer, layer)
    )
    if clone_extent and model_extent:
        return Fraction(model_extent, clone_extent)
    shapes = {(block.size, block.count) for block in cutting.blocks}
    matching_factors = {
        factors[split.name] for split in group.splits if {(block.size, block.count) for block in split.blocks} & shapes
    }
    if matching_factors:
        return matching_factors.pop() if len(matching_factors) == 1 else None
    one_index_a_head = group.heads and all(block.size == 1 and block.count <= group.units for block in cutting.blocks)
    return Fraction(1) if one_index_a_head else None


def _own_extent(cutting: Cutting, module: nn.Module) -> int | None:
    """Returns the length of the cut dim, where a module has it; None where a call alone shows it."""
    if cutting.kind is CuttingKind.BUFFER:
        buffer = getattr(module, cutting.key, None)
        return buffer.shape[cutting.dim] if isinstance(buffer, torch.Tensor) else None
    if cutting.kind is CuttingKind.OUTPUT and is_matrix(module):
        weight = module.get_parameter("weight")
        return weight.shape[0 if isinstance(module, nn.Linear) else 1]
    lengths = {parameter.shape[-1] for parameter in module.parameters(recurse=False)}
    return lengths.pop() if cutting.kind is CuttingKind.GLOBAL_NORM and len(lengths) == 1 else None


def _extent(blocks: Sequence[Block]) -> int:
    """Returns the number of indices in blocks."""
    return sum(block.size * block.count for block in blocks)
