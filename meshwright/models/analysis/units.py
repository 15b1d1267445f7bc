"""Turns dependence matrices into units: the runs of each tensor's features that belong to one head or channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.spec.sharding_table import Block

PROBED_UNITS = 16
"""Largest number of runs of units by which parameters between matrices are probed."""
Blocks = tuple[Block, ...]


def finest_units(features: int, matrices: Sequence[torch.Tensor]) -> tuple[int, list[Blocks | None]] | None:
    """Returns the finest units into which most of the sources' features divide, and the blocks of each source.

    Args:
        features: of the reading tensor, which the units divide in order.
        matrices: for each source a bool matrix (features, its features): which depends on which.

    Returns:
        None when every feature depends on all. For a source, None when every unit reads all of it.
    """
    # from the finest: each divisor of the features is a possible number of units
    for units in (count for count in range(features, 1, -1) if features % count == 0):
        source_blocks = [blocks_of(matrix.view(units, -1, matrix.shape[1]).any(1)) for matrix in matrices]
        if any(blocks == () for blocks in source_blocks):
            continue
        all_blocks = [block for blocks in source_blocks if blocks is not None for block in blocks]
        finest_indices = sum(block.size * block.count for block in all_blocks if block.count == units)
        # most indices must belong to single units; shared blocks (key heads) may be the smaller share
        if all_blocks and 2 * finest_indices >= sum(block.size * block.count for block in all_blocks):
            return units, source_blocks
    return None


def blocks_of(uses: torch.Tensor) -> Blocks | None:
    """Returns the blocks of a source's features; () when they are irregular, None when all units use all.

    Args:
        uses: (units, features) bool: which unit uses which feature.
    """
    units = uses.shape[0]
    active = uses.any(0)
    first_unit = uses.to(torch.uint8).argmax(0)
    unit_count = uses.sum(0)
    last_unit = units - 1 - uses.flip(0).to(torch.uint8).argmax(0)
    # each feature's users must be an aligned run of units, as key heads shared by neighbours are
    is_aligned = (
        (last_unit - first_unit + 1 == unit_count)
        & (first_unit % unit_count.clamp(min=1) == 0)
        & (units % unit_count.clamp(min=1) == 0)
    )
    if bool((unit_count[active] == units).all()):
        return None
    if not bool((active & is_aligned).all()):
        return ()
    runs: list[list[int]] = []
    # neighbouring features with the same users form a run
    for feature, unit_key in enumerate(zip(first_unit.tolist(), unit_count.tolist())):
        if runs and (runs[-1][1], runs[-1][2]) == unit_key:
            runs[-1][3] += 1
        else:
            runs.append([feature, *unit_key, 1])
    return tuple(_joined_blocks(runs, units)) if _is_regular(runs, units) else ()


def _is_regular(runs: list[list[int]], units: int) -> bool:
    """Returns whether runs (start, first unit, units, size) follow one another as whole blocks.

    A fused q, k, v of 4 heads over 2 key heads has 4 runs of one unit each, then twice 2 runs of 2 units: three blocks.
    """
    position = 0
    while position < len(runs):
        _, first_unit, units_each, size = runs[position]
        count = units // units_each
        # one block: every unit's run once, in order, all of one size
        period = runs[position : position + count]
        if first_unit or [run[1:] for run in period] != [
            [index * units_each, units_each, size] for index in range(count)
        ]:
            return False
        position += count
    return True


def _joined_blocks(runs: list[list[int]], units: int) -> Iterator[Block]:
    """Yields the blocks that regular runs form."""
    position = 0
    while position < len(runs):
        start, _, units_each, size = runs[position]
        yield Block(start=start, size=size, count=units // units_each)
        position += units // units_each


def unit_masks(blocks: Blocks, units: int) -> torch.Tensor:
    """Returns (units, features) bool: whether a unit uses a feature; the inverse of `blocks_of`."""
    total = sum(block.size * block.count for block in blocks)
    uses = torch.zeros(units, total, dtype=torch.bool)
    for unit in range(units):
        for block in blocks:
            start, stop = block.span(unit, unit + 1, units)
            uses[unit, start:stop] = True
    return uses


def probes(units: int) -> int:
    """Returns the number of runs of units in which parameters are probed: the largest divisor up to the limit."""
    return next(count for count in range(min(units, PROBED_UNITS), 0, -1) if units % count == 0)


def parameter_blocks(masks: Sequence[torch.Tensor], units: int) -> tuple[int, Blocks] | None:
    """Returns the dim along which a parameter belongs to units, and its blocks; None when it is shared.

    Args:
        masks: for each of some equal runs of units, a bool mask of the parameter's shape: the elements that it uses.
        units: in all.
    """
    for dim in range(masks[0].dim()):
        other_dims = [axis for axis in range(masks[0].dim()) if axis != dim]
        uses_by_run = torch.stack([mask.any(dim=other_dims) if other_dims else mask for mask in masks])
        blocks = blocks_of(uses_by_run) if len(masks) > 1 else None
        if not blocks:
            continue
        return dim, tuple(_refine_block(block, len(masks), units) for block in blocks)
    return None


def _refine_block(block: Block, probed_runs: int, units: int) -> Block:
    """Returns a block probed at the resolution of runs of units in single units, where its size allows."""
    size = block.size * block.count
    if block.count != probed_runs or size % units:
        return block
    return Block(start=block.start, size=size // units, count=units)
