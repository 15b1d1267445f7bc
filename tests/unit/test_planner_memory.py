"""Bytes of state follow from names, shapes and what each axis does to them; worked out by hand here."""

from __future__ import annotations

import pytest

from meshwright.errors import PlanError
from meshwright.planner.memory import ModelParts, StateSizes, position_memory, rest_bytes, state_memory
from meshwright.planner.model_parts import stage_bounds
from meshwright.planner.rank_weights import elements, shard_elements
from meshwright.spec.experts import LayerExperts
from meshwright.spec.layer_graph import LayerGraph, LayerOutput
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import Block, LayerSharding, ParameterSplit, ShardingGroup, ShardingTable

VOCAB, WIDTH, CHANNELS, LAYERS, EXPERTS = 10, 4, 6, 4, 3
NORM, UP, DOWN = WIDTH, CHANNELS * WIDTH, WIDTH * CHANNELS
MIX = EXPERTS * WIDTH * WIDTH
LAYER = NORM + UP + DOWN + MIX
EMBED = VOCAB * WIDTH
TOTAL = EMBED + LAYERS * LAYER + NORM


def table() -> ShardingTable:
    block = (Block(start=0, size=1, count=CHANNELS),)
    splits = (
        ParameterSplit(name="up.weight", dim=0, blocks=block),
        ParameterSplit(name="down.weight", dim=1, blocks=block),
    )
    group = ShardingGroup(
        module="",
        column_linears=("up",),
        column_inputs=("up",),
        replicated_inputs=(),
        row_linear="down",
        units=CHANNELS,
        splits=splits,
    )
    rows = LayerSharding(groups=(group,))
    return ShardingTable(layers={f"h.{at}": rows for at in range(LAYERS)}, vocabulary=("embed", "head"), vocab=VOCAB)


def layer_graph() -> LayerGraph:
    none = frozenset[str]()
    returned = LayerOutput(nest=None, leaves=(), tensors=())
    return LayerGraph(
        layers=tuple(f"h.{at}" for at in range(LAYERS)),
        input_weights=(frozenset({"embed.weight"}), *[none] * (LAYERS - 1)),
        output_weights=(*[none] * LAYERS, frozenset({"norm", "head.weight"})),
        boundary_tensors=(((0, 0),),) * LAYERS,
        returns=(returned,) * LAYERS,
    )


def model(tied: bool = True) -> ModelParts:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH)}
    for at in range(LAYERS):
        shapes |= {
            f"h.{at}.norm": (WIDTH,),
            f"h.{at}.up.weight": (CHANNELS, WIDTH),
            f"h.{at}.down.weight": (WIDTH, CHANNELS),
            f"h.{at}.mix.rows": (EXPERTS, WIDTH, WIDTH),
        }
    shapes |= {"norm": (WIDTH,), "head.weight": (VOCAB, WIDTH)}
    experts = [
        LayerExperts(module=f"h.{at}.mix", experts=EXPERTS, parameters=("rows",), counts=(), arguments=("x", "i", "w"))
        for at in range(LAYERS)
    ]
    return ModelParts(
        shapes=shapes,
        layers=tuple(f"h.{at}" for at in range(LAYERS)),
        ties=(("embed.weight", "head.weight"),) if tied else (),
        table=table(),
        layer_graph=layer_graph(),
        experts=tuple(experts),
    )


def held(text: str, tied: bool = True) -> list[int]:
    return [position.weights.elements for position in position_memory(Layout.parse(text), model(tied))]


def test_totals_count_a_tie_once() -> None:
    assert model().total == TOTAL and model(tied=False).total == TOTAL + EMBED
    assert held("replicate=4") == [TOTAL]
    memory, formula = state_memory(Layout(), model())
    assert memory == {"parameters": 4 * TOTAL, "gradients": 4 * TOTAL, "optimizer": 8 * TOTAL}
    assert formula == {"parameters": "w N", "gradients": "w N", "optimizer": "2 w N"}
    sizes = StateSizes(total=TOTAL, layers=(LAYER,) * LAYERS)
    for text in ("replicate=2", "replicate=2,precision=bf16", "precision=float64,microbatches=2"):
        assert state_memory(Layout.parse(text), sizes) == state_memory(Layout.parse(text), model())


def test_tensor_splits_columns_rows_and_vocabulary() -> None:
    half = EMBED // 2 + LAYERS * (NORM + MIX + (UP + DOWN) // 2) + NORM
    assert held("tp=2") == [half, half]
    # Ten rows over three: 4, 3, 3; six channels: 2, 2, 2.
    uneven = [rows * WIDTH + LAYERS * (NORM + MIX + (UP + DOWN) // 3) + NORM for rows in (4, 3, 3)]
    assert held("tp=3") == uneven
    # Six channels over four: 2, 2, 1, 1; ten rows: 3, 3, 2, 2.
    shares = ((3, 2), (3, 2), (2, 1), (2, 1))
    assert held("tp=4") == [rows * WIDTH + LAYERS * (NORM + MIX + 2 * units * WIDTH) + NORM for rows, units in shares]
    assert held("tp=7")[0] == 2 * WIDTH + LAYERS * LAYER + NORM
    memory, formula = state_memory(Layout.parse("tp=3"), model())
    assert memory["parameters"] == 4 * uneven[0]
    assert formula["parameters"] == f"w n, n = {uneven[0]} of N = {TOTAL}"


def test_stages_hold_their_layers_and_both_ends_a_tie() -> None:
    first, last = held("pp=2,split=1-3")
    assert (first, last) == (EMBED + LAYER, 3 * LAYER + NORM + EMBED)
    assert first + last == TOTAL + EMBED
    assert held("pp=2,tp=2,split=1-3")[:2] == [EMBED // 2 + LAYER - (UP + DOWN) // 2] * 2
    assert sum(held("pp=4", tied=False)) == TOTAL + EMBED
    assert stage_bounds(model(), Layout.parse("pp=2,split=1-3")) == (0, 1, 4)


def test_a_tie_on_one_rank_of_a_v_is_trained_once() -> None:
    layout = Layout.parse("pp=2,schedule=zbv,microbatches=4")
    first, second = position_memory(layout, model())
    assert elements(first.weights.twins) == EMBED and not second.weights.twins
    assert first.memory["parameters"] - second.memory["parameters"] == 4 * (2 * EMBED + NORM)
    assert first.memory["optimizer"] == 2 * (first.memory["parameters"] - 4 * EMBED)
    assert rest_bytes(layout, model(), 0) == first.memory["parameters"] - 4 * EMBED


def test_experts_are_spread_and_sharded_over_their_own_ranks() -> None:
    layout = Layout.parse("ep=2,shard=4,zero=2")
    (position,) = position_memory(layout, model())
    # Ranks with index 0 of ep have one expert, those with index 1 two: the price is the fullest's.
    assert elements(position.weights.experts) == LAYERS * 2 * WIDTH * WIDTH
    own, spread = elements(position.weights.own), elements(position.weights.experts)
    assert own == TOTAL - LAYERS * MIX and position.weights.expert_shards == 2
    assert position.memory["gradients"] == 4 * (shard_elements(position.weights.own, 4) + spread // 2)
    assert "x = " in position.formula["optimizer"] and "x / e" in position.formula["optimizer"]
    assert sum(rest_bytes(layout, model(), rank) for rank in range(4)) == 4 * TOTAL


SUMS = [
    "shard=3,zero=3", "tp=3,shard=2,zero=1", "pp=2,shard=2,tp=2,zero=1", "replicate=2,shard=2,cp=2,ep=2,zero=2",
    "pp=4,tp=2", "cp=4", "shard=2,cp=3,zero=1", "replicate=2,cp=3,ep=3", "cp=3,ep=3,precision=bf16",
]  # fmt: skip


@pytest.mark.parametrize("text", SUMS)
def test_ranks_keep_every_weight_as_often_as_there_are_copies(text: str) -> None:
    layout, parts = Layout.parse(text), model(tied=False)
    kept = sum(rest_bytes(layout, parts, rank) for rank in range(layout.world))
    copies = layout.degree("replicate") * (1 if layout.zero else layout.degree("cp"))
    # What is neither split by tp nor an expert is there once for each index of tp.
    more = 0
    if layout.degree("tp") > 1:
        more = (layout.degree("tp") - 1) * (LAYERS * (NORM + MIX) + NORM)
    if layout.degree("ep") > 1 and not layout.zero:  # the ranks of cp hold other experts
        more -= LAYERS * MIX * (layout.degree("ep") - 1) // layout.degree("ep")
    assert kept == 4 * copies * (parts.total + more)


def test_gathered_bytes_of_level_three_are_of_neighbours() -> None:
    parts = StateSizes(total=100, layers=(40, 10, 30))
    memory, _ = state_memory(Layout.parse("shard=2,zero=3"), parts)
    assert memory["parameters"] == 4 * (20 + 40 + 10)


def test_runs_of_rows_are_rounded_up() -> None:
    tensors = ((5, 2), (1, 7))
    assert [shard_elements(tensors, 3, index) for index in range(3)] == [4 + 7, 4, 2]
    assert sum(shard_elements(tensors, 4, index) for index in range(4)) == elements(tensors)


@pytest.mark.parametrize(("text", "part"), [("tp=2", "sharding table"), ("pp=2", "layer graph")])
def test_what_wasnt_read_is_asked_for(text: str, part: str) -> None:
    parts = ModelParts(shapes=model().shapes, layers=model().layers)
    with pytest.raises(PlanError, match=part):
        state_memory(Layout.parse(text), parts)
