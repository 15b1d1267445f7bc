"""Who does what with whom, derived from the facts of the axes: loading, loss, gradient sum, norm, checkpoint writing.

Everything here is a pure function of degrees and facts; nothing names an axis. Ranks are laid out row-major over the
axes in their order, so the last axis has the nearest neighbours. Source: the derivations follow from linearity of the
loss in rows and tokens: a rank that reads other data owes its part of every sum over data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Axis, Holds, Joins, Mechanics, Reads


def mesh_shape(degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> dict[str, int]:
    """Returns the mesh's axes and sizes, outermost first; axes that carve others are left out.

    Args:
        degrees: axis name to degree; absent means 1.
        axes: the known axes, by default all that have a file.
    """
    axes = known_axes() if axes is None else axes
    return {name: degrees.get(name, 1) for name, axis in axes.items() if not axis.carves}


def world_size(degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> int:
    """Returns the number of ranks that the degrees multiply to."""
    return math.prod(mesh_shape(degrees, axes).values())


def coordinates(rank: int, degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> dict[str, int]:
    """Returns a rank's index along each axis of the mesh (row-major, the last axis fastest)."""
    shape = mesh_shape(degrees, axes)
    indices: dict[str, int] = {}
    # The last axis varies fastest, so its index is the remainder.
    for name in reversed(shape):
        rank, indices[name] = divmod(rank, shape[name])
    return {name: indices[name] for name in shape}


def describe_rank(rank: int, degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> str:
    """Returns ``rank 37: replicate 1, shard 5``, naming the axes whose degree is more than one."""
    shape = mesh_shape(degrees, axes)
    coordinates_text = [
        f"{name} {index}" for name, index in coordinates(rank, degrees, axes).items() if shape[name] > 1
    ]
    return f"rank {rank}" + (": " + ", ".join(coordinates_text) if coordinates_text else "")


def members(rank: int, names: Sequence[str], degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ranks that differ from one along some axes of the mesh alone, itself among them, in order."""
    shape, coordinate = mesh_shape(degrees), coordinates(rank, degrees)
    strides, step = dict[str, int](), 1
    for name in reversed(shape):
        strides[name] = step
        step *= shape[name]
    # The rank at index 0 along all of these axes; from it the members differ by multiples of the strides.
    base_rank = rank - sum(coordinate[name] * strides[name] for name in names)
    ranks = [base_rank]
    for name in names:
        ranks = [base + index * strides[name] for base in ranks for index in range(shape[name])]
    return tuple(sorted(ranks))


def reader(rank: int, degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> tuple[int, int]:
    """Returns (index, count) of a rank among those that read other rows: what the loader is asked for."""
    axes = known_axes() if axes is None else axes
    shape, coordinate = mesh_shape(degrees, axes), coordinates(rank, degrees, axes)
    index, count = 0, 1
    for name in (name for name in shape if axes[name].reads is Reads.ROWS):
        # Row-major over the axes that read rows.
        index, count = index * shape[name] + coordinate[name], count * shape[name]
    return index, count


def axes_with(mechanics: Mechanics, axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes of some mechanics, of which a layout uses one."""
    if axes is None:
        return _known_with(mechanics)
    return tuple(name for name, axis in axes.items() if axis.mechanics is mechanics)


@cache
def _known_with(mechanics: Mechanics) -> tuple[str, ...]:
    """Caches `axes_with` over the known axes: thousands of layouts ask for it."""
    return axes_with(mechanics, known_axes())


def axis_with(mechanics: Mechanics, degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None) -> str:
    """Returns the axis of some mechanics that a layout uses; where it uses none, the first that is known.

    Args:
        mechanics: not `Mechanics.NONE`.
        degrees: axis name to degree; absent means 1.
        axes: the known axes.
    """
    names = axes_with(mechanics, axes)
    return next((name for name in names if degrees.get(name, 1) > 1), names[0])


def row_axes(holds: Holds, axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes whose ranks read other rows, join in every step, and hold copies, or parts of the state."""
    if axes is None:
        return _known_rows(holds)
    return tuple(
        name
        for name, axis in axes.items()
        if axis.reads is Reads.ROWS and axis.holds is holds and axis.joins is Joins.STEP
    )


@cache
def _known_rows(holds: Holds) -> tuple[str, ...]:
    """Caches `row_axes` over the known axes: thousands of layouts ask for it."""
    return row_axes(holds, known_axes())


def loss_axes(axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes over which a step sums losses and token counts: their ranks read other data, and join in it."""
    axes = known_axes() if axes is None else axes
    return tuple(
        name
        for name, axis in axes.items()
        if axis.reads is not Reads.SAME and not axis.carves and axis.joins is Joins.STEP
    )


def round_axes(axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes whose ranks join once in a round: over them nothing of a step is summed, and copies differ."""
    if axes is None:
        return _known_round_axes()
    return tuple(name for name, axis in axes.items() if axis.joins is Joins.ROUND)


@cache
def _known_round_axes() -> tuple[str, ...]:
    """Caches `round_axes` over the known axes: thousands of layouts ask for it."""
    return round_axes(known_axes())


def island_count(degrees: Mapping[str, int]) -> int:
    """Returns the number of islands, groups of ranks that take each step together; 1 without such axes."""
    return math.prod(degrees.get(name, 1) for name in round_axes())


def island_index(rank: int, degrees: Mapping[str, int]) -> int:
    """Returns the island of a rank (row-major over `round_axes`)."""
    coordinate, index = coordinates(rank, degrees), 0
    for name in round_axes():
        index = index * degrees.get(name, 1) + coordinate[name]
    return index


def gradient_axes(sharded_on: Sequence[str], axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes over which a weight's gradient is summed between ranks that hold the same part of it.

    Args:
        sharded_on: axes that shard this weight (their reduction scatters instead of copying).
        axes: the known axes.
    """
    return tuple(name for name in loss_axes(axes) if name not in sharded_on)


def state_axes(zero: int, axes: Mapping[str, Axis] | None = None) -> tuple[str, ...]:
    """Returns the axes over whose product ZeRO shards the state of a weight: the one list that all rooms read.

    These are the axis that holds shards and reads other rows, and the axes inside of it whose ranks read other data:
    their gradients are summed anyway, so the sum can leave each rank its part. Source: torchtitan's ``dp_shard_cp``.

    Args:
        zero: the ZeRO level; 0 shards nothing.
        axes: the known axes.
    """
    axes = known_axes() if axes is None else axes
    names = loss_axes(axes)
    shard_positions = [position for position, name in enumerate(names) if axes[name].holds is Holds.SHARD]
    # The shard axis and the loss axes inside of it: ranks next to each other, whose gradients are summed anyway.
    return names[shard_positions[0] :] if zero and shard_positions else ()


def state_shards(degrees: Mapping[str, Any], zero: int, axes: Mapping[str, Axis] | None = None) -> Any:
    """Returns the number of ranks that share the state of a weight.

    Args:
        degrees: axis name to degree, absent means 1; arrays where many layouts are asked for.
        zero: the ZeRO level of them all.
        axes: the known axes.
    """
    return math.prod(degrees.get(name, 1) for name in state_axes(zero, axes))


def state_copies(degrees: Mapping[str, int], zero: int) -> int:
    """Returns the number of ranks that hold the same part of a weight's state, over which its gradient is summed."""
    return math.prod(degrees.get(name, 1) for name in gradient_axes(state_axes(zero)))


def state_index(rank: int, degrees: Mapping[str, int], zero: int) -> int:
    """Returns a rank's index among those that share the state of a weight (row-major, the last axis fastest)."""
    coordinate, index = coordinates(rank, degrees), 0
    for name in state_axes(zero):
        index = index * degrees.get(name, 1) + coordinate[name]
    return index


def carved_shards(name: str, degrees: Mapping[str, Any], zero: int, axes: Mapping[str, Axis] | None = None) -> Any:
    """Returns the number of ranks that share the state of weights split by a carving axis (experts).

    Args:
        name: the axis; its degree divides the ranks of those that it carves.
        degrees: axis name to degree, absent means 1; arrays where many layouts are asked for.
        zero: the ZeRO level of them all.
        axes: the known axes.
    """
    axes = known_axes() if axes is None else axes
    # The ranks of a block that hold the same part share its state.
    block = math.prod(degrees.get(carved, 1) for carved in axes[name].carves)
    return block // degrees.get(name, 1) if zero else 1


def carved_index(name: str, rank: int, degrees: Mapping[str, int]) -> int:
    """Returns a rank's index among those that differ along the axes that one carves; the axis is its fastest part."""
    coordinate, index = coordinates(rank, degrees), 0
    for carved in (carved for carved in mesh_shape(degrees) if carved in known_axes()[name].carves):
        index = index * degrees.get(carved, 1) + coordinate[carved]
    return index


def carved_groups(
    name: str, degrees: Mapping[str, int], axes: Mapping[str, Axis] | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Returns the process groups of an axis that factorises the ranks of other axes a second time (``ep``).

    The ranks that differ along the carved axes alone form a block, in row-major order; the axis is its fastest part.

    Args:
        name: an axis that carves.
        degrees: axis name to degree; absent means 1.
        axes: the known axes.

    Returns:
        Three partitions of the world: the axis's own groups; the ranks of one block that hold the same part; and all
        ranks that hold the same part, in whichever block, of those that read other data.
    """
    axes = known_axes() if axes is None else axes
    carved, degree = axes[name].carves, degrees.get(name, 1)
    # Axes outside of the block over which gradients are summed: their ranks hold copies of the same part.
    summed_axes = [axis_name for axis_name in loss_axes(axes) if axis_name not in carved]
    block_axes = [key for key in mesh_shape(degrees, axes) if key not in carved]
    blocks: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size(degrees, axes)):
        coordinate = coordinates(rank, degrees, axes)
        blocks.setdefault(tuple(coordinate[key] for key in block_axes), []).append(rank)
    # With a block of 8 ranks and degree 4: [0-3], [4-7] are the axis's groups, {0, 4}, {1, 5}, ... hold the same part.
    axis_groups = [
        block[offset : offset + degree] for block in blocks.values() for offset in range(0, len(block), degree)
    ]
    replica_groups = [block[offset::degree] for block in blocks.values() for offset in range(degree)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for key, block in blocks.items():
        # Blocks that differ along other axes (stages, tensor parts) hold other weights, and stay apart.
        fixed = tuple(index for axis_name, index in zip(block_axes, key) if axis_name not in summed_axes)
        for offset in range(degree):
            holders.setdefault((*fixed, offset), []).extend(block[offset::degree])
    return axis_groups, replica_groups, [sorted(group) for group in holders.values()]
