"""Turns what depends on what into units: which runs of which tensors belong to which part of the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.spec.sharding_table import Block

PROBED_UNITS = 16
"""Runs of units by which parameters between matrices are looked at, where there are more units."""
Blocks = tuple[Block, ...]


def finest_units(features: int, matrices: Sequence[torch.Tensor]) -> tuple[int, list[Blocks | None]] | None:
    """Returns the finest units that most of what is read divides into, and the blocks of each source.

    Args:
        features: of what reads, which the units share out in order.
        matrices: for each source a bool matrix (features, its features): which depends on which.

    Returns:
        None when everything meets. For a source, None when every unit reads all of it.
    """
    for units in (number for number in range(features, 1, -1) if features % number == 0):
        found = [blocks_of(matrix.view(units, -1, matrix.shape[1]).any(1)) for matrix in matrices]
        if any(blocks == () for blocks in found):
            continue
        inside = [block for blocks in found if blocks is not None for block in blocks]
        fine = sum(block.size * block.count for block in inside if block.count == units)
        if inside and 2 * fine >= sum(block.size * block.count for block in inside):
            return units, found
    return None


def blocks_of(uses: torch.Tensor) -> Blocks | None:
    """Returns the blocks of a source's features; () when they are irregular, None when all units use all.

    Args:
        uses: (units, features) bool: which unit uses which feature.
    """
    units = uses.shape[0]
    active = uses.any(0)
    first = uses.to(torch.uint8).argmax(0)
    number = uses.sum(0)
    last = units - 1 - uses.flip(0).to(torch.uint8).argmax(0)
    whole = (last - first + 1 == number) & (first % number.clamp(min=1) == 0) & (units % number.clamp(min=1) == 0)
    if bool((number[active] == units).all()):
        return None
    if not bool((active & whole).all()):
        return ()
    runs: list[list[int]] = []
    for place, key in enumerate(zip(first.tolist(), number.tolist())):
        if runs and (runs[-1][1], runs[-1][2]) == key:
            runs[-1][3] += 1
        else:
            runs.append([place, *key, 1])
    return tuple(_joined(runs, units)) if _regular(runs, units) else ()


def _regular(runs: list[list[int]], units: int) -> bool:
    """Whether runs (start, first unit, units, size) follow one another as whole blocks."""
    at = 0
    while at < len(runs):
        _, first, number, size = runs[at]
        count = units // number
        part = runs[at : at + count]
        if first or [run[1:] for run in part] != [[index * number, number, size] for index in range(count)]:
            return False
        at += count
    return True


def _joined(runs: list[list[int]], units: int) -> Iterator[Block]:
    at = 0
    while at < len(runs):
        start, _, number, size = runs[at]
        yield Block(start=start, size=size, count=units // number)
        at += units // number


def unit_masks(blocks: Blocks, units: int) -> torch.Tensor:
    """Returns (units, features) bool: which unit uses which feature; the inverse of `blocks_of`."""
    total = sum(block.size * block.count for block in blocks)
    uses = torch.zeros(units, total, dtype=torch.bool)
    for unit in range(units):
        for block in blocks:
            start, stop = block.span(unit, unit + 1, units)
            uses[unit, start:stop] = True
    return uses


def probes(units: int) -> int:
    """Returns into how many runs of units a target is divided to look at parameters."""
    return next(count for count in range(min(units, PROBED_UNITS), 0, -1) if units % count == 0)


def parameter_blocks(masks: Sequence[torch.Tensor], units: int) -> tuple[int, Blocks] | None:
    """Returns the dim along which a parameter belongs to units, and its blocks; None when it is shared.

    Args:
        masks: for each of some equal runs of units, which elements these use.
        units: in all.
    """
    for dim in range(masks[0].dim()):
        others = [axis for axis in range(masks[0].dim()) if axis != dim]
        uses = torch.stack([mask.any(dim=others) if others else mask for mask in masks])
        blocks = blocks_of(uses) if len(masks) > 1 else None
        if not blocks:
            continue
        return dim, tuple(_refined(block, len(masks), units) for block in blocks)
    return None


def _refined(block: Block, probed: int, units: int) -> Block:
    """A block that was seen at the resolution of some runs of units, in units where it has as many."""
    size = block.size * block.count
    if block.count != probed or size % units:
        return block
    return Block(start=block.start, size=size // units, count=units)
