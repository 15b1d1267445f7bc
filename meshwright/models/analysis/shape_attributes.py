"""Finds what else a group must split: head counts that its code reads, and arguments and buffers with a dim of units.

A layer's forward often reshapes by an integer (``num_heads``). Rehearsals decide which of the integers that the code
reads must be divided on each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import nn

from meshwright.models.analysis.trace import LayerTrace
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.parameter_slices import read_number
from meshwright.spec.sharding_table import Block, Cutting, CuttingKind, ParameterSplit, ShapeAttribute, ShardingGroup

TOGETHER = 3
"""Most integers that are tried in every combination, beside all together."""
TRIALS = 60
"""Most rehearsals of one group."""
_NOT_COUNTS = ("head_dim", "head_size", "layer_idx", "layer_id", "top_k", "layer_number", "eps", "seed", "training")


def fit_shape_attributes(
    traced: LayerTrace, group: ShardingGroup, rehearse: Callable[[ShardingGroup], str]
) -> tuple[ShardingGroup | None, str]:
    """Returns the group with the shape attributes and cuttings under which it passes, or None with its first failure.

    Args:
        traced: the layer.
        group: without shape attributes.
        rehearse: returns the reason for which a group fails, "" when it passes.
    """
    first_failure = rehearse(group)
    if not first_failure:
        return group, ""
    candidates = list(_candidate_attributes(traced, group))
    matching_sizes = [attribute for attribute in candidates if _is_size_of_split(traced.layer, group, attribute)]
    trials = 0
    for cuttings in _cutting_sets(traced, group):
        cut_group = dataclasses.replace(group, cuttings=(*group.cuttings, *cuttings))
        # with a cutting, no attribute at all is an option too; without one that has failed already
        options = (
            [[], *_attribute_sets(candidates, matching_sizes)]
            if cuttings
            else list(_attribute_sets(candidates, matching_sizes))
        )
        for chosen_attributes in options[:8] if cuttings else options:
            trials += 1
            if trials > TRIALS:
                return None, first_failure
            candidate = dataclasses.replace(cut_group, shape_attributes=tuple(chosen_attributes))
            if not rehearse(candidate):
                return _drop_unneeded_attributes(candidate, rehearse), ""
    return None, first_failure


def _drop_unneeded_attributes(group: ShardingGroup, rehearse: Callable[[ShardingGroup], str]) -> ShardingGroup:
    """Drops shape attributes without which the group passes too."""
    for attribute in group.shape_attributes:
        other_attributes = tuple(kept for kept in group.shape_attributes if kept != attribute)
        candidate = dataclasses.replace(group, shape_attributes=other_attributes)
        if not rehearse(candidate):
            group = candidate
    return group


def _is_size_of_split(layer: nn.Module, group: ShardingGroup, attribute: ShapeAttribute) -> bool:
    """Returns whether an integer is the size or the count of a dim that is split."""
    value = read_number(layer.get_submodule(attribute.module), attribute.attribute)
    blocks = [block for split in group.splits for block in split.blocks if block.count > 1]
    totals = [sum(block.size * block.count for block in split.blocks) for split in group.splits]
    return value in {group.units, *totals, *(block.count for block in blocks), *(b.size * b.count for b in blocks)}


def _attribute_sets(
    candidates: list[ShapeAttribute], matching_sizes: list[ShapeAttribute]
) -> Iterator[list[ShapeAttribute]]:
    """Yields likely sets first: sizes of split dims, counts of heads, all, then every small combination."""
    head_counts = [
        attribute for attribute in candidates if "head" in attribute.attribute or "groups" in attribute.attribute
    ]
    yielded: list[list[ShapeAttribute]] = []
    all_but_one = [[kept for kept in matching_sizes if kept is not dropped] for dropped in matching_sizes]
    options = [matching_sizes, *all_but_one, head_counts, candidates, *([attribute] for attribute in candidates)]
    for size in range(2, TOGETHER + 1):
        options += [list(attribute_set) for attribute_set in combinations(candidates, size)]
    for attribute_set in options:
        if attribute_set and attribute_set not in yielded:
            yielded.append(attribute_set)
            yield attribute_set


def _candidate_attributes(traced: LayerTrace, group: ShardingGroup) -> Iterator[ShapeAttribute]:
    """Yields integers of the group's module, and below it, that the code reads."""
    root = traced.layer.get_submodule(group.module)
    matrices = {*group.column_linears, *group.replicated_inputs, *group.inner_row_linears, *group.row_linears} - {
        group.module
    }
    matrices |= {cutting.module for cutting in group.cuttings}
    reads_by_path = integers_read(traced, root)
    for path, module in root.named_modules():
        full_path = ".".join(name for name in (group.module, path) if name)
        if full_path in matrices or type(module).__module__.startswith("torch.nn"):
            continue
        for attribute, value in sorted(reads_by_path.get(path, {}).items()):
            if value > 1 and attribute.rpartition(".")[2] not in _NOT_COUNTS:
                yield ShapeAttribute(
                    module=full_path, attribute=attribute, scales_with=_scaling_parameter(group, attribute, value)
                )


def integers_read(traced: LayerTrace, root: nn.Module) -> dict[str, dict[str, int]]:
    """Returns the integer attributes that each module below ``root`` reads in a call of the layer, and of its config.

    Args:
        traced: the layer, which is called once more.
        root: a module of the layer.
    """
    reads_by_path: dict[str, dict[str, int]] = {}
    with torch.no_grad(), Float64Ops(), _record_integer_reads(root, reads_by_path):
        traced.layer(*traced.args, **traced.kwargs)
    return reads_by_path


@contextlib.contextmanager
def _record_integer_reads(root: nn.Module, reads_by_path: dict[str, dict[str, int]]) -> Iterator[None]:
    """Records integer attributes that modules and their configs read, by swapping each object's class while entered."""
    original_classes: list[tuple[object, type]] = []
    config_reads: dict[int, dict[str, int]] = {}

    def record_reads(instance: object, reads: dict[str, int], prefix: str) -> None:
        original_class = type(instance)
        # A dict or a NamedTuple can't change its class. The layer is tried without its integers, and refused by name
        # where its code needs one of them divided.
        with contextlib.suppress(TypeError):
            _assign_class(instance, _recording_class(original_class, reads, prefix))
            original_classes.append((instance, original_class))

    try:
        for path, module in root.named_modules():
            record_reads(module, reads_by_path.setdefault(path, {}), "")
            config = vars(module).get("config")
            if config is not None and id(config) not in config_reads:
                record_reads(config, config_reads.setdefault(id(config), {}), "config.")
        yield
    finally:
        for instance, original_class in reversed(original_classes):
            # in reverse: a config may have been wrapped after the module that reads it
            _assign_class(instance, original_class)
        for path, module in root.named_modules():
            reads_by_path[path] |= config_reads.get(id(vars(module).get("config")), {})


def _assign_class(instance: object, new_class: type) -> None:
    """Assigns an object's class, past the ``__setattr__`` of its own class: a frozen dataclass has one that raises."""
    object.__setattr__(instance, "__class__", new_class)


def _recording_class(original_class: type, reads: dict[str, int], prefix: str) -> type:
    """Returns a subclass whose attribute access stores every integer that it returns.

    ``isinstance()`` and the class's name stay as the layer's code expects them.
    """
    original_getattribute: Any = original_class.__getattribute__

    def recording_getattribute(self: Any, name: str) -> Any:
        value = original_getattribute(self, name)
        if type(value) is int and not name.startswith("_"):
            reads[prefix + name] = value
        return value

    return type(
        original_class.__name__,
        (original_class,),
        {"__getattribute__": recording_getattribute, "__module__": original_class.__module__},
    )


def _scaling_parameter(group: ShardingGroup, attribute: str, value: int) -> str:
    """Returns what an integer counts: units, the runs that several units share, or the indices of a parameter."""
    row_weight = group.splits[0].name
    shared_blocks = [
        f"{split.name}#{block_index}"
        for split in group.splits
        for block_index, block in enumerate(split.blocks)
        if 1 < block.count < group.units
    ]
    # key heads that several query heads share: their count is that of a block with fewer runs
    if shared_blocks and ("kv" in attribute or "key_value" in attribute or "k_head" in attribute):
        return f"{row_weight}/{shared_blocks[0]}" if "group" in attribute else shared_blocks[0]
    for split in group.splits:
        if _uneven(split) and sum(block.size * block.count for block in split.blocks) == value:
            return f"={split.name}"
    return row_weight


def _uneven(split: ParameterSplit) -> bool:
    """Returns whether a parameter's blocks have different counts."""
    return len({block.count for block in split.blocks}) > 1


def _cutting_sets(traced: LayerTrace, group: ShardingGroup) -> Iterator[tuple[Cutting, ...]]:
    """Yields sets of cuttings of the module's arguments and buffers: none, the width, all buffers, each argument."""
    yield ()
    yield from _width_cuttings(traced, group)
    counts = {group.units} | {block.count for split in group.splits for block in split.blocks if block.count > 1}
    buffers = tuple(_buffer_cuttings(traced, group, counts))
    if buffers:
        yield buffers
    arguments = list(_argument_cuttings(traced, group, counts))
    for cutting in arguments:
        yield (cutting,)
    if buffers:
        for cutting in arguments:
            yield (*buffers, cutting)


def _width_cuttings(traced: LayerTrace, group: ShardingGroup) -> Iterator[tuple[Cutting, ...]]:
    """Yields the cutting of the width that code reads off its hidden state, where the row reads as many features.

    Of a module of its own: the layer's code adds to the hidden state, too.
    """
    blocks = group.splits[0].blocks
    features = sum(block.size * block.count for block in blocks)
    if group.module and any(item.shape[-1] == features for item in traced.inputs):
        yield (Cutting(kind=CuttingKind.WIDTH, module=group.module, dim=-1, blocks=blocks),)


def _argument_cuttings(traced: LayerTrace, group: ShardingGroup, counts: set[int]) -> Iterator[Cutting]:
    """Yields cuttings of the module's arguments: dims whose size is a count of units, flattened batch dims last."""
    rows = traced.inputs[0].shape[0]
    flattened = []
    for key, item in traced.arguments.get(group.module, {}).items():
        for dim, size in enumerate(item.shape):
            for count in sorted(counts):
                block = Block(start=0, size=1, count=count)
                cutting = Cutting(kind=CuttingKind.ARGUMENT, module=group.module, key=key, dim=dim, blocks=(block,))
                # a leading dim of the batch's rows is no dim of units, even where the sizes agree
                if size == count and (dim or item.shape[0] != rows):
                    yield cutting
                elif size == rows * count and dim == 0:
                    flattened.append(cutting)
    yield from flattened


def _buffer_cuttings(traced: LayerTrace, group: ShardingGroup, counts: set[int]) -> Iterator[Cutting]:
    """Yields cuttings of buffers and plain tensor attributes below the group's module."""
    blocks_by_size = {sum(block.size * block.count for block in split.blocks): split.blocks for split in group.splits}
    for path, module in traced.layer.get_submodule(group.module).named_modules():
        full_path = ".".join(name for name in (group.module, path) if name)
        attributes: dict[str, Any] = {**module._buffers, **vars(module)}
        for key, item in attributes.items():
            if not isinstance(item, torch.Tensor) or isinstance(item, nn.Parameter):
                continue
            for dim, size in enumerate(item.shape):
                blocks = blocks_by_size.get(size) or ((Block(start=0, size=1, count=size),) if size in counts else ())
                if blocks and size > 1:
                    yield Cutting(kind=CuttingKind.BUFFER, module=full_path, key=key, dim=dim, blocks=blocks)
                    break
