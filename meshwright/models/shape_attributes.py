"""What else a group must have cut: integers that the code between its matrices reads, arguments and buffers by unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn

from meshwright.models.trace import LayerTrace
from meshwright.parallel.parameter_slices import read_number
from meshwright.spec.sharding_table import Block, Cutting, ParameterSplit, ShapeAttribute, ShardingGroup

TOGETHER = 3
"""Most integers that are tried in every combination, beside all together."""
TRIALS = 60
"""Most rehearsals of one group."""
_NOT_COUNTS = ("head_dim", "head_size", "layer_idx", "layer_id", "top_k", "layer_number", "eps", "seed", "training")


def find_numbers(
    traced: LayerTrace, group: ShardingGroup, works: Callable[[ShardingGroup], str]
) -> tuple[ShardingGroup | None, str]:
    """Returns the group with the numbers and cuttings under which it works, or None and why it doesn't without any.

    Args:
        traced: the layer.
        group: without numbers.
        works: says why a group doesn't work, "" when it does.
    """
    first = works(group)
    if not first:
        return group, ""
    numbers = list(_candidates(traced, group))
    alike = [number for number in numbers if _matches(traced.layer, group, number)]
    trials = 0
    for cuttings in _cuttings(traced, group):
        more = dataclasses.replace(group, cuttings=(*group.cuttings, *cuttings))
        options = [[], *_choices(numbers, alike)] if cuttings else list(_choices(numbers, alike))
        for chosen in options[:8] if cuttings else options:
            trials += 1
            if trials > TRIALS:
                return None, first
            tried = dataclasses.replace(more, numbers=tuple(chosen))
            if not works(tried):
                return _fewest(tried, works), ""
    return None, first


def _fewest(group: ShardingGroup, works: Callable[[ShardingGroup], str]) -> ShardingGroup:
    """Drops numbers that change nothing."""
    for number in group.numbers:
        rest = tuple(other for other in group.numbers if other != number)
        tried = dataclasses.replace(group, numbers=rest)
        if not works(tried):
            group = tried
    return group


def _matches(layer: nn.Module, group: ShardingGroup, number: ShapeAttribute) -> bool:
    """Whether an integer is the size or the count of something that is split."""
    value = read_number(layer.get_submodule(number.module), number.attribute)
    blocks = [block for split in group.splits for block in split.blocks if block.count > 1]
    totals = [sum(block.size * block.count for block in split.blocks) for split in group.splits]
    return value in {group.units, *totals, *(block.count for block in blocks), *(b.size * b.count for b in blocks)}


def _choices(found: list[ShapeAttribute], alike: list[ShapeAttribute]) -> Iterator[list[ShapeAttribute]]:
    """Likely sets first: sizes of what is split, counts of heads, all, then every small combination."""
    heads = [number for number in found if "head" in number.attribute or "groups" in number.attribute]
    seen: list[list[ShapeAttribute]] = []
    fewer = [[other for other in alike if other is not one] for one in alike]
    options = [alike, *fewer, heads, found, *([number] for number in found)]
    for size in range(2, TOGETHER + 1):
        options += [list(numbers) for numbers in combinations(found, size)]
    for numbers in options:
        if numbers and numbers not in seen:
            seen.append(numbers)
            yield numbers


def _candidates(traced: LayerTrace, group: ShardingGroup) -> Iterator[ShapeAttribute]:
    """Integers of the group's module, and below it, that the code reads."""
    root = traced.layer.get_submodule(group.module)
    matrices = {*group.column_linears, *group.replicated_inputs, *group.inner_row_linears, group.row_linear} - {
        group.module
    }
    matrices |= {cutting.module for cutting in group.cuttings}
    read = integers_read(traced, root)
    for path, module in root.named_modules():
        full = ".".join(part for part in (group.module, path) if part)
        if full in matrices or type(module).__module__.startswith("torch.nn"):
            continue
        for attribute, value in sorted(read.get(path, {}).items()):
            if value > 1 and attribute.rpartition(".")[2] not in _NOT_COUNTS:
                yield ShapeAttribute(module=full, attribute=attribute, scales_with=_over(group, attribute, value))


def integers_read(traced: LayerTrace, root: nn.Module) -> dict[str, dict[str, int]]:
    """Returns the integer attributes that each module below ``root`` reads in a call of the layer, and of its config.

    Args:
        traced: the layer is called once more.
        root: a module of the layer.
    """
    found: dict[str, dict[str, int]] = {}
    with torch.no_grad(), _spied(root, found):
        traced.layer(*traced.args, **traced.kwargs)
    return found


@contextmanager
def _spied(root: nn.Module, found: dict[str, dict[str, int]]) -> Iterator[None]:
    """Notes what is read while it lasts; each module shows itself as one of a class that tells."""
    kinds: list[tuple[Any, type]] = []
    configs: dict[int, dict[str, int]] = {}
    for path, module in root.named_modules():
        kinds.append((module, type(module)))
        config = vars(module).get("config")
        module.__class__ = _telling(type(module), found.setdefault(path, {}), "")
        if config is not None and id(config) not in configs:
            kinds.append((config, type(config)))
            config.__class__ = _telling(type(config), configs.setdefault(id(config), {}), "config.")
    try:
        yield
    finally:
        for thing, kind in reversed(kinds):
            thing.__class__ = kind
        for path, module in root.named_modules():
            found[path] |= configs.get(id(vars(module).get("config")), {})


def _telling(kind: type, read: dict[str, int], prefix: str) -> type:
    plain: Any = kind.__getattribute__

    def tell(self: Any, name: str) -> Any:
        value = plain(self, name)
        if type(value) is int and not name.startswith("_"):
            read[prefix + name] = value
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": tell, "__module__": kind.__module__})


def _over(group: ShardingGroup, attribute: str, value: int) -> str:
    """What an integer counts: units, the runs that several units share, or the indices of a parameter."""
    row = group.splits[0].name
    fewer = [
        f"{split.name}#{place}"
        for split in group.splits
        for place, block in enumerate(split.blocks)
        if 1 < block.count < group.units
    ]
    if fewer and ("kv" in attribute or "key_value" in attribute or "k_head" in attribute):
        return f"{row}/{fewer[0]}" if "group" in attribute else fewer[0]
    for split in group.splits:
        if _uneven(split) and sum(block.size * block.count for block in split.blocks) == value:
            return f"={split.name}"
    return row


def _uneven(split: ParameterSplit) -> bool:
    return len({block.count for block in split.blocks}) > 1


def _cuttings(traced: LayerTrace, group: ShardingGroup) -> Iterator[tuple[Cutting, ...]]:
    """Ways to cut what the group's module is called with and what it holds: nothing, all buffers, each argument."""
    yield ()
    counts = {group.units} | {block.count for split in group.splits for block in split.blocks if block.count > 1}
    buffers = tuple(_buffers(traced, group, counts))
    if buffers:
        yield buffers
    found = list(_arguments(traced, group, counts))
    for cutting in found:
        yield (cutting,)
    if buffers:
        for cutting in found:
            yield (*buffers, cutting)


def _arguments(traced: LayerTrace, group: ShardingGroup, counts: set[int]) -> Iterator[Cutting]:
    rows = traced.inputs[0].shape[0]
    later = []
    for key, item in traced.arguments.get(group.module, {}).items():
        for dim, size in enumerate(item.shape):
            for count in sorted(counts):
                block = Block(start=0, size=1, count=count)
                found = Cutting(kind="argument", module=group.module, key=key, dim=dim, blocks=(block,))
                if size == count and (dim or item.shape[0] != rows):
                    yield found
                elif size == rows * count and dim == 0:
                    later.append(found)
    yield from later


def _buffers(traced: LayerTrace, group: ShardingGroup, counts: set[int]) -> Iterator[Cutting]:
    whole = {sum(block.size * block.count for block in split.blocks): split.blocks for split in group.splits}
    for path, module in traced.layer.get_submodule(group.module).named_modules():
        full = ".".join(part for part in (group.module, path) if part)
        held: dict[str, Any] = {**module._buffers, **vars(module)}
        for key, item in held.items():
            if not isinstance(item, torch.Tensor) or isinstance(item, nn.Parameter):
                continue
            for dim, size in enumerate(item.shape):
                blocks = whole.get(size) or ((Block(start=0, size=1, count=size),) if size in counts else ())
                if blocks and size > 1:
                    yield Cutting(kind="buffer", module=full, key=key, dim=dim, blocks=blocks)
                    break
