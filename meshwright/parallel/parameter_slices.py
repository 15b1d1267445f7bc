"""Slices a layer's weights to the units of one index of an axis, and sets the sizes that its code reads to match."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from meshwright.spec.placement import LocalShard, Span
from meshwright.spec.sharding_table import ParameterSplit, ShardingGroup

_SIZES = ("in_features", "out_features", "nf", "nx", "in_channels", "out_channels", "groups", "num_features")
"""Attributes of plain modules that repeat a dim of their weight."""


def spans_of_units(split: ParameterSplit, units: Span, group: ShardingGroup, size: int) -> tuple[Span, ...]:
    """Returns the runs of a parameter's dim, of ``size`` indices, that the units (start, stop) use.

    Raises:
        ValueError: when the blocks don't fit the size: the table belongs to another model.
    """
    table_size = max(block.start + block.size * block.count for block in split.blocks)
    if table_size != size:
        raise ValueError(f"the table splits {table_size} indices of {split.name}, which has {size}")
    spans: list[list[int]] = []
    for start, stop in split.spans(*units, group.units):
        if spans and spans[-1][1] == start:
            spans[-1][1] = stop
        else:
            spans.append([start, stop])
    return tuple((start, stop) for start, stop in spans)


def find_replicated_runs(
    split: ParameterSplit, units: Span, group: ShardingGroup, degree: int
) -> tuple[tuple[int, int, int], ...]:
    """Returns (start, stop, ranks) of local indices that several indices of the axis hold."""
    runs, local_start = [], 0
    for block in split.blocks:
        start, stop = block.span(*units, group.units)
        # Fewer runs than ranks: degree / count neighbours hold each of them.
        if block.count < degree:
            runs.append((local_start, local_start + stop - start, degree // block.count))
        local_start += stop - start
    return tuple(runs)


def make_local_shard(
    name: str, full_shape: torch.Size, split: ParameterSplit, spans: tuple[Span, ...], copies: int, axis: str
) -> LocalShard:
    """Returns the shard of a parameter of which this rank holds ``spans`` of one dim."""
    spans_by_dim = tuple(spans if dim == split.dim else ((0, size),) for dim, size in enumerate(full_shape))
    return LocalShard(name=name, global_shape=tuple(full_shape), spans=spans_by_dim, copies=copies, axes=(axis,))


def select_spans(tensor: torch.Tensor, dim: int, spans: tuple[Span, ...]) -> torch.Tensor:
    """Returns a tensor of any shape with the runs of one dim, one after the other; a view for a single run."""
    slices = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=dim)


def slice_parameter(layer: nn.Module, split: ParameterSplit, spans: tuple[Span, ...]) -> nn.Parameter:
    """Replaces a parameter by its runs ``spans`` along the split dim; the other dims keep their shape.

    It is on meta or has values; the new parameter is returned.
    """
    path, _, attribute = split.name.rpartition(".")
    owner = layer.get_submodule(path)
    full_weight = owner._parameters[attribute]
    assert full_weight is not None
    with torch.no_grad():
        local_weight = nn.Parameter(
            select_spans(full_weight, split.dim, spans).clone(), requires_grad=full_weight.requires_grad
        )
    owner._parameters[attribute] = local_weight
    full_size, local_size = full_weight.shape[split.dim], local_weight.shape[split.dim]
    for name in _SIZES:
        # `in_features` and the like repeat the weight's shape, and code may read them.
        if vars(owner).get(name) == full_size and full_size != local_size:
            setattr(owner, name, local_size)
    return local_weight


def set_local_sizes(layer: nn.Module, group: ShardingGroup, units: Span) -> None:
    """Sets the integers that the code between a group's matrices reads to what this part of it has."""
    for target, name, value in iterate_local_sizes(layer, group, units):
        if name.startswith("config."):
            owner: nn.Module = target
            config = owner.config
            # Layers share one config: this module gets a copy before a number in it changes.
            if not getattr(config, "_is_local", False):
                owner.config = config = copy.copy(config)
                object.__setattr__(config, "_is_local", True)
            # Past the config's own __setattr__: a frozen dataclass is copied, not changed.
            object.__setattr__(config, name.partition(".")[2], value)
        else:
            setattr(target, name, value)


def iterate_local_sizes(layer: nn.Module, group: ShardingGroup, units: Span) -> Iterator[tuple[nn.Module, str, int]]:
    """Yields (module, attribute, local value) for each number of the group."""
    splits_by_name = {split.name: split for split in group.splits}
    for shape_attribute in group.shape_attributes:
        module = layer.get_submodule(shape_attribute.module)
        full_value = read_number(module, shape_attribute.attribute)
        yield (
            module,
            shape_attribute.attribute,
            scale_to_local(full_value, shape_attribute.scales_with, splits_by_name, group, units),
        )


def read_number(module: nn.Module, attribute: str) -> int:
    """Returns an integer attribute, or one of the module's config."""
    _, dot, name = attribute.rpartition(".")
    return int(getattr(module.config if dot else module, name))


def scale_to_local(
    full_value: int, scales_with: str, splits: Mapping[str, ParameterSplit], group: ShardingGroup, units: Span
) -> int:
    """Returns an integer's local value.

    Raises:
        ValueError: when it doesn't come out whole.
    """
    # A number that counts indices: as many as this rank has.
    if scales_with.startswith("="):
        return sum(stop - start for start, stop in splits[scales_with[1:]].spans(*units, group.units))
    numerator, _, denominator = scales_with.partition("/")
    ratios = [_block_ratio(splits, name, group, units) for name in (numerator, denominator) if name]
    local_count, full_count = ratios[0]
    # A ratio of two counts, such as query heads per key head.
    if denominator:
        local_count, full_count = local_count * ratios[1][1], full_count * ratios[1][0]
    value, remainder = divmod(full_value * local_count, full_count)
    if remainder or not value:
        raise ValueError(f"{full_value} x {local_count}/{full_count} is no whole number")
    return value


def _block_ratio(splits: Mapping[str, ParameterSplit], name: str, group: ShardingGroup, units: Span) -> tuple[int, int]:
    """Returns a block's (local, full) number of runs; ``name`` is ``<split>`` or ``<split>#<block>``."""
    split, _, block_index = name.partition("#")
    block = splits[split].blocks[int(block_index or 0)]
    start, stop = block.span(*units, group.units)
    return (stop - start) // block.size, block.count
