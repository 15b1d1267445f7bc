"""Stages are cut as well as can be: against every cut there is, with kinds, limits and forbidden places."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from meshwright.spec.balanced_cuts import Cuts


def every(
    layers: np.ndarray,
    head: np.ndarray | None,
    places: Sequence[int],
    limits: Sequence[int],
    blocked: Collection[int] = (),
    fills_first: bool = False,
) -> tuple[int, ...] | None:
    """Of all cuts whose dearest stage is as cheap as can be: the longest last stage, and so on for those before it.

    With ``fills_first`` the shortest ones.

    Only a last stage with a head may be without a layer.
    """
    count, found = layers.shape[1], []
    inner_places = [place for place in range(1, count + (head is not None)) if place not in blocked]
    for inner in itertools.combinations(inner_places, len(places) - 1):
        edges = (0, *inner, count)
        if (np.diff(edges) <= limits).all():
            costs = [layers[kind, start:stop].sum() for kind, start, stop in zip(places, edges, edges[1:])]
            costs[-1] += 0 if head is None else head[places[-1]]
            found.append((max(costs), edges))
    if not found or len(places) == 1:
        return found[0][1] if found else None
    start = (max if fills_first else min)(edges[-2] for cost, edges in found if cost == min(found)[0])
    before = every(layers[:, :start], None, places[:-1], limits[:-1], blocked, fills_first)
    assert before is not None
    return (*before, count)


@pytest.mark.parametrize("fills_first", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int, fills_first: bool) -> None:
    draw = np.random.default_rng(seed)
    count, stages = int(draw.integers(3, 9)), int(draw.integers(1, 5))
    layers, head = draw.integers(1, 9, (3, 2, count)).astype(float), draw.integers(0, 20, (3, 2)).astype(float)
    places = [int(kind) for kind in np.sort(draw.integers(0, 2, stages))]
    limits = draw.integers(1, count + 1, (3, stages))
    blocked = [place for place in range(1, count + 1) if draw.random() < 0.2]
    bounds, possible = Cuts(layers, head, places, limits, blocked, fills_first).bounds(stages)
    for at in range(3):
        best = every(layers[at], head[at], places, limits[at], blocked, fills_first)
        assert bool(possible[at]) == (best is not None)
        assert best is None or tuple(bounds[at]) == best


def test_one_table_gives_every_number_of_stages() -> None:
    costs, head = [3, 1, 4, 1, 5, 9, 2, 6], [8]
    cuts, alone = Cuts([[costs]], [head]), 0
    for stages in (9, 8, 1, 3, 5):
        bounds, possible = cuts.bounds(stages)
        best = every(np.array([costs]), np.array(head), [0] * stages, [8] * stages)
        alone += bounds[0][-2] == len(costs)
        assert possible[0] and tuple(bounds[0]) == best
    assert 1 < alone < 5


def test_a_head_that_no_cut_may_part_has_a_layer_beside_it() -> None:
    assert Cuts([[[1.0, 1.0]]], [[5.0]]).bounds(2)[0].tolist() == [[0, 2, 2]]
    assert Cuts([[[1.0, 1.0]]], [[5.0]], blocked=[2]).bounds(2)[0].tolist() == [[0, 1, 2]]


def test_equal_layers_are_equal_however_their_sums_are_rounded() -> None:
    for cost in (0.1, 1.0 / 3.0, 0.7):
        bounds, _ = Cuts([[[cost] * 6]], [[0.0]], fills_first=True).bounds(4)
        assert tuple(bounds[0]) == (0, 2, 4, 6, 6)
