"""Every axis that has a file, and every product of axes: the derived groups load, sum and write everything once."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Axis, Holds, Reads
from meshwright.spec.groups import (
    coordinates,
    describe_rank,
    gradient_axes,
    loss_axes,
    mesh_shape,
    reader,
    round_axes,
    state_axes,
    state_index,
    state_shards,
    world_size,
)

LARGEST = 512
MADE_UP = {
    axis.name: axis
    for axis in (
        Axis(name="pp", reads=Reads.SAME, holds=Holds.STAGE, order=10, purpose="stages"),
        *known_axes().values(),
        Axis(name="cp", reads=Reads.TOKENS, holds=Holds.COPY, order=40, purpose="tokens"),
        Axis(name="tp", reads=Reads.SAME, holds=Holds.SHARD, order=50, purpose="parts"),
        Axis(name="ep", reads=Reads.SAME, holds=Holds.SHARD, order=60, purpose="experts", carves=("shard", "tp")),
    )
}
"""The axes that stand, and kinds that are to come: what is derived must hold for them as well."""


def products(axes: dict[str, Axis]) -> list[dict[str, int]]:
    """Returns degrees over the axes, all pairs and some triples, up to `LARGEST` ranks."""
    names = [name for name, axis in axes.items() if not axis.carves]
    found: list[dict[str, int]] = [{}]
    for chosen in (*((name,) for name in names), *itertools.combinations(names, 2), *itertools.combinations(names, 3)):
        for sizes in itertools.product((2, 3, 8, 64), repeat=len(chosen)):
            if math.prod(sizes) <= LARGEST:
                found.append(dict(zip(chosen, sizes)))
    return [*found, *({name: LARGEST} for name in names)]


CASES = [(axes, degrees) for axes in (known_axes(), MADE_UP) for degrees in products(axes)]


@pytest.mark.parametrize("axis", known_axes().values(), ids=lambda axis: axis.name)
def test_an_axis_states_its_facts(axis: Axis) -> None:
    orders = [other.order for other in known_axes().values()]
    assert orders == sorted(set(orders))
    assert axis.purpose and axis.name.isidentifier()
    assert set(axis.carves) <= known_axes().keys() - {axis.name}


def test_coordinates_number_the_ranks() -> None:
    for axes, degrees in CASES:
        shape = mesh_shape(degrees, axes)
        ranks = world_size(degrees, axes)
        assert ranks == math.prod(degrees.values())
        places = [tuple(coordinates(rank, degrees, axes).values()) for rank in range(ranks)]
        assert places == list(itertools.product(*(range(size) for size in shape.values())))


def test_every_row_is_read_by_exactly_the_ranks_that_share_it() -> None:
    for axes, degrees in CASES:
        ranks = range(world_size(degrees, axes))
        seen: dict[int, list[int]] = {}
        for rank in ranks:
            index, count = reader(rank, degrees, axes)
            seen.setdefault(index, []).append(rank)
        assert sorted(seen) == list(range(count))
        assert {len(group) for group in seen.values()} == {len(ranks) // count}
        others = [name for name, axis in axes.items() if axis.reads is Reads.ROWS]
        for group in seen.values():
            places = [coordinates(rank, degrees, axes) for rank in group]
            assert len({tuple(place[name] for name in others if name in place) for place in places}) == 1


def group(rank: int, over: tuple[str, ...], degrees: dict[str, int], axes: dict[str, Axis]) -> frozenset[int]:
    """Returns the ranks that differ from ``rank`` along some axes alone."""
    place = coordinates(rank, degrees, axes)
    return frozenset(
        other
        for other in range(world_size(degrees, axes))
        if all(index == place[name] or name in over for name, index in coordinates(other, degrees, axes).items())
    )


def splits_backward(axes: dict[str, Axis]) -> list[tuple[str, ...]]:
    names = [name for name, axis in axes.items() if axis.holds is Holds.SHARD and not axis.carves]
    return [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


def test_gradients_count_every_part_once() -> None:
    for axes, degrees in CASES:
        ranks = world_size(degrees, axes)
        if ranks > 24:
            continue
        for split in splits_backward(axes):
            # A weight has one part for each place along the axes that split it or hold stages.
            apart = {name for name, axis in axes.items() if name in split or axis.holds is Holds.STAGE}
            for rank in range(ranks):
                summed = group(rank, gradient_axes(split, axes), degrees, axes)
                own = coordinates(rank, degrees, axes)
                for other in summed:
                    place = coordinates(other, degrees, axes)
                    assert all(place[name] == own[name] for name in apart if name in own)
                # Those that hold the same part and read other data are all in the sum, those that read the same aren't.
                for name, axis in axes.items():
                    if name in own and axis.reads is Reads.SAME and name not in apart:
                        assert {coordinates(other, degrees, axes)[name] for other in summed} == {own[name]}


def test_losses_are_summed_over_all_that_read_other_data() -> None:
    for axes, degrees in CASES:
        over = math.prod(mesh_shape(degrees, axes)[name] for name in loss_axes(axes))
        tokens = math.prod(size for name, size in degrees.items() if axes[name].reads is Reads.TOKENS)
        islands = math.prod(degrees.get(name, 1) for name in round_axes(axes))
        assert over * islands == reader(0, degrees, axes)[1] * tokens


def test_ranks_are_named_by_their_places() -> None:
    assert describe_rank(3, {"replicate": 2, "shard": 2}) == "rank 3: replicate 1, shard 1"
    assert describe_rank(0, {}) == "rank 0"


def test_state_is_shared_by_all_that_sum_its_gradient_inside_of_the_shards() -> None:
    assert state_axes(3) == ("shard", "cp") and state_axes(0) == ()
    late = Axis(name="late", reads=Reads.TOKENS, holds=Holds.COPY, order=45, purpose="another one inside")
    assert state_axes(1, known_axes() | {"late": late}) == ("shard", "cp", "late")
    for axes, degrees in CASES:
        ranks = world_size(degrees, axes)
        if axes is MADE_UP or ranks > 64:
            continue
        for rank in range(0, ranks, 5):
            line = sorted(group(rank, state_axes(2), degrees, axes))
            assert len(line) == state_shards(degrees, 2)
            assert [state_index(other, degrees, 2) for other in line] == list(range(len(line)))
