"""The expert axis on paper: which ranks do what, which modules hold experts, which degrees are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.experts import find_experts, require_experts
from meshwright.parallel import expert
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Reads
from meshwright.spec.experts import LayerExperts
from meshwright.spec.groups import carved_groups, coordinates, mesh_shape, world_size

DEGREES = [
    dict(zip(("pp", "replicate", "shard", "cp", "tp", "ep"), sizes))
    for sizes in itertools.product((1, 2), (1, 3), (1, 4), (1, 2), (1, 2), (2, 4, 8))
    if sizes[2] * sizes[3] * sizes[4] % sizes[5] == 0
]
ROWS = LayerExperts(
    module="mlp.experts", experts=5, parameters=("up", "down"), counts=("num_experts",), arguments=("x", "i", "w")
)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_rank_is_in_one_group_of_each_kind(degrees: dict[str, int]) -> None:
    world, carves = world_size(degrees), known_axes()["ep"].carves
    block = math.prod(degrees[name] for name in carves)
    kinds = carved_groups("ep", degrees)
    for groups, size in zip(kinds, (degrees["ep"], block // degrees["ep"], world // degrees["pp"] // degrees["ep"])):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {size}
    own, rest, copies = kinds
    index = {rank: place for group in own for place, rank in enumerate(group)}
    for group in own + rest:
        places = [coordinates(rank, degrees) for rank in group]
        assert all(len({place[name] for place in places}) == 1 for name in mesh_shape(degrees) if name not in carves)
    for group in copies:
        places = [coordinates(rank, degrees) for rank in group]
        assert len({index[rank] for rank in group}) == 1
        for name, axis in known_axes().items():
            if not axis.carves and name not in carves and axis.reads is Reads.SAME:
                assert len({place[name] for place in places}) == 1
    assert all(any(set(part) <= set(group) for group in copies) for part in rest)


def test_the_nearest_ranks_are_one_expert_group() -> None:
    own, rest, _ = carved_groups("ep", {"replicate": 2, "shard": 2, "tp": 2, "ep": 2})
    assert own == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rest == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_runs_of_experts_cover_them_all(ranks: int) -> None:
    spans = [ROWS.span(index, ranks) for index in range(ranks)]
    assert [number for start, stop in spans for number in range(start, stop)] == list(range(ROWS.experts))
    assert all(stop > start for start, stop in spans)


def test_degrees_that_experts_cannot_fill_are_refused() -> None:
    expert.check([ROWS], 5)
    expert.check([], 1)
    with pytest.raises(PlanError, match="nearest that works: ep=5"):
        expert.check([ROWS], 6)
    with pytest.raises(PlanError, match="leave ep out"):
        expert.check([], 2)


class Experts(nn.Module):
    def __init__(self, count: int = 4, down: int | None = None) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok, self.hidden = count, count, count
        self.up = nn.Parameter(torch.empty(count, 6, 3))
        self.up_bias = nn.Parameter(torch.empty(count, 6))
        self.down = nn.Parameter(torch.empty(down or count, 3, 6))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):  # type: ignore[no-untyped-def]
        return hidden_states


class OwnRouting(Experts):
    def forward(self, hidden_states: torch.Tensor):  # type: ignore[no-untyped-def,override]
        return hidden_states


class OneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.empty(4, 6, 3))


class SharedNorm(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)


def holding(part: nn.Module) -> nn.Module:
    model = nn.Module()
    model.experts = part
    return model


def test_experts_are_found_by_their_structure() -> None:
    (rows,) = find_experts(holding(Experts()))
    assert rows == LayerExperts(
        module="experts",
        experts=4,
        parameters=("up", "up_bias", "down"),
        counts=("num_experts",),
        arguments=("hidden_states", "top_k_index", "top_k_weights"),
    )
    assert require_experts(holding(Experts()), 2) == (rows,)
    assert require_experts(nn.Linear(2, 2), 1) == ()


def test_experts_in_a_list_are_found_by_its_name() -> None:
    linears = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    (rows,) = require_experts(holding(linears), 2)
    assert rows.children == ("0", "1") and rows.parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [rows.local_size(name, 2, (1, 2)) for name in rows.parameters] == [0, 0, 2, 2]
    other = nn.Module()
    other.shared_experts, other.blocks = linears, linears
    assert find_experts(other) == ()


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (OwnRouting(), r"called with \(hidden_states\)"),
        (OneProduct(), "one product"),
        (SharedNorm(), "norm.weight is shared"),
        (Experts(4, down=3), "3 and 4 rows"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)]), "list of modules that differ in their weights"),
        (nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)]), "list of modules with buffers"),
        (nn.Linear(2, 2), "no mixture"),
        (nn.Conv1d(2, 2, 3), "no mixture"),
    ],
)
def test_what_cannot_be_spread_says_why(part: nn.Module, told: str) -> None:
    with pytest.raises(PlanError, match=told) as refused:
        require_experts(holding(part), 2)
    assert "tp=2" in str(refused.value)
