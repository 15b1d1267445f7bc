"""Rounded numbers in the plan: priced by their bytes, never chosen unasked, mentioned where they would pay."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.groups import GroupSpan
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.lossy import lossy_hint
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout

SHAPE = shape_from_sizes(TableSizes(name="dense", layers=8, width=1024, heads=16, vocab=32000))
JOB = PricedJob(shape=SHAPE, sequence=512, rows=32)
SLOW = "4x2xa100-40@ethernet-1g"


def reduce_s(text: str, cluster: str = SLOW) -> float:
    return price(JOB, Layout.parse(text + ",precision=bf16"), Cluster.parse(cluster)).parts["reduce"]


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.254), ("fp8", 0.254)])
def test_a_slow_wire_carries_the_bytes_of_the_format(name: str, share: float) -> None:
    """One device a node, so that a ring's and two exchanges' bytes are the same: 2 (n-1)/n of the gradients'."""
    exact, rounded = (
        reduce_s(f"replicate=4{choice}", "4x1xa100-40@ethernet-1g") for choice in ("", f",compress={name}")
    )
    assert rounded / exact == pytest.approx(share, rel=0.1)


def test_copies_of_a_node_send_once() -> None:
    flat, nodes = reduce_s("replicate=8,compress=int8"), reduce_s("replicate=8,compress=int8:2")
    assert nodes < flat < reduce_s("replicate=8")


def test_lines_of_tp_share_a_card() -> None:
    """Half the weights on twice the devices: a node's card carries the same bytes."""
    alone = reduce_s("replicate=8,compress=int8:2")
    shared = reduce_s("replicate=8,tp=2,compress=int8:2", "4x4xa100-40@ethernet-1g")
    assert shared == pytest.approx(alone, rel=0.1)


def test_an_exact_sum_between_nodes_costs_the_network() -> None:
    """One device a node: the two neighbours of a run are on two of them, and exchange exact gradients there.

    By hand, of V bytes of gradients: V to sum halves with a neighbour and gather them, rounded halves over two runs;
    flat, six quarters of V rounded; exactly, six quarters of V.
    """
    lone_devices = "4x1xa100-40@ethernet-1g"
    exact, flat, runs = (
        reduce_s(f"replicate=4{choice}", lone_devices) for choice in ("", ",compress=int8", ",compress=int8:2")
    )
    rounded = 260 / 256 / 4
    assert flat / exact == pytest.approx(rounded, rel=0.1)
    assert runs / exact == pytest.approx((1 + rounded / 2) / 1.5, rel=0.1)


@pytest.mark.parametrize(
    ("inside", "nodes", "run", "neighbours", "across"),
    [(8, 2, 4, (4, 1), (2, 2)), (8, 4, 16, (8, 2), (1, 2)), (1, 4, 2, (1, 2), (1, 2)), (3, 2, 2, (1, 2), (1, 3))],
)
def test_runs_of_neighbours_use_the_links_that_they_cross(
    inside: int, nodes: int, run: int, neighbours: tuple[int, int], across: tuple[int, int]
) -> None:
    spans = GroupSpan(*(np.array([float(value)]) for value in (inside, nodes, 1))).split_runs(np.array([float(run)]))
    for span, expected in zip(spans, (neighbours, across)):
        assert (span.inside[0], span.nodes[0]) == expected
    assert spans[0].ranks[0] * spans[1].ranks[0] == inside * nodes


def test_messages_under_way_take_memory() -> None:
    exact, rounded = (
        price(JOB, Layout.parse(f"replicate=4,precision=float32{choice}"), Cluster.parse("4x1xa100-40@ethernet-1g"))
        for choice in ("", ",compress=int8")
    )
    largest_weight = 32000 * 1024
    assert exact.memory["buffers"] == 0
    assert 2 * largest_weight < rounded.memory["buffers"] < 6 * largest_weight
    assert rounded.peak == pytest.approx(exact.peak + rounded.memory["buffers"], rel=0.01)


@pytest.mark.parametrize(("cluster", "fix"), [("4xh100+4xa100-80", ""), ("2x4xh100", "islands=2")])
def test_what_lossy_does_not_reach_is_said(cluster: str, fix: str) -> None:
    sizes = "layers=8,width=1024,heads=16,vocab=32000"
    config = PlanConfig(sizes=sizes, cluster=cluster, batch=32, sequence=512, fix=fix)
    assert not any("lossy" in note for note in plan_model(config, model_of_sizes(sizes)).choice.notes)
    allowed = plan_model(dataclasses.replace(config, allow=("lossy",)), model_of_sizes(sizes))
    (note,) = [note for note in allowed.choice.notes if "--allow lossy" in note]
    assert "changes nothing" in note and "compress=int8" in note


def test_gathered_weights_cost_their_bytes() -> None:
    exact, rounded = (
        price(JOB, Layout.parse(f"shard=4,zero=3,precision=bf16{choice}"), Cluster.parse("4x1xa100-40@ethernet-1g"))
        for choice in ("", ",compress_weights=int8")
    )
    assert rounded.parts["gather"] / exact.parts["gather"] == pytest.approx(0.508, rel=0.1)
    assert rounded.parts["reduce"] == exact.parts["reduce"]


def test_many_layouts_have_the_prices_of_one() -> None:
    texts = [
        "replicate=8",
        "replicate=8,compress=int8:2",
        "replicate=4,shard=2,zero=3,compress=bf16,compress_weights=fp8",
    ]
    layouts = [Layout.parse(text + ",precision=bf16") for text in texts]
    batch = LayoutBatch.from_layouts(layouts, len(SHAPE.blocks))
    together = price_many(JOB, batch, Cluster.parse(SLOW)).step_s
    alone = [price(JOB, layout, Cluster.parse(SLOW)).step_s for layout in layouts]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_a_lossy_layout_is_chosen_only_where_it_is_allowed() -> None:
    sizes = "layers=8,width=1024,heads=16,vocab=32000"
    config = PlanConfig(sizes=sizes, cluster=SLOW, batch=32, sequence=512, fix="pp=1,cp=1")
    exact = plan_model(config, model_of_sizes(sizes))
    assert all(not option.layout.compress for option in exact.choice.best)
    (hint,) = [note for note in exact.choice.notes if "--allow lossy" in note]
    assert "compress" in hint and "would save" in hint
    lossy = plan_model(dataclasses.replace(config, allow=("lossy",)), model_of_sizes(sizes))
    plan, plain = lossy.choice.best[0], exact.choice.best[0]
    assert plan.layout.compress or plan.layout.compress_weights != "none"
    assert plan.price.step_s < plain.price.step_s
    assert any(str(plain.layout) in note for note in lossy.choice.notes)


def test_rounding_is_tried_where_a_pipeline_wins_over_exact_copies() -> None:
    sizes = "layers=6,width=256,heads=4,vocab=2048"
    config = PlanConfig(sizes=sizes, cluster="2x1xa100-40@ethernet-1g", batch=128, sequence=128)
    exact = plan_model(config, model_of_sizes(sizes))
    assert all(option.layout.degree("pp") == 2 for option in exact.choice.best[:3])
    named = "replicate=2,compress=int8"
    allowed = plan_model(dataclasses.replace(config, allow=("lossy",), layout=(named,)), model_of_sizes(sizes))
    assert allowed.layout.degree("pp") == 1 and allowed.layout.is_lossy
    # No named rounding of copies is faster than what the planner finds by itself.
    assert "slower" in next(iter(allowed.compared.values())) or "the plan" in next(iter(allowed.compared.values()))


def test_a_fast_wire_gets_no_hint() -> None:
    sizes = "layers=8,width=1024,heads=16,vocab=32000"
    result = plan_model(PlanConfig(sizes=sizes, cluster="8xh100", batch=512, sequence=2048), model_of_sizes(sizes))
    assert not any("lossy" in note for note in result.choice.notes)


def test_only_lossy_can_be_allowed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lossy'"):
        PlanConfig(allow=("losy",)).check()


def test_a_named_lossy_layout_is_compared() -> None:
    question = Question(job=JOB, cluster=Cluster.parse(SLOW), base=Layout(precision="bf16"))
    exact, rounded = (
        price_candidate(question, Layout.parse(f"replicate=8,precision=bf16{choice}")).price.step_s
        for choice in ("", ",compress=int8:2")
    )
    assert rounded < exact


def test_the_largest_values_cost_their_bytes_by_copies() -> None:
    wire = Cluster.parse("4x1xa100-40@ethernet-1g")
    exact, top, sparse = (
        price(JOB, Layout.parse(f"replicate=4,precision=float32{choice}"), wire)
        for choice in ("", ",compress=topk:40", ",compress=topk:80")
    )
    # A fortieth of the values, twice as long with their indices, from each of 4 copies; an exact sum sends each twice.
    assert top.parts["reduce"] / exact.parts["reduce"] == pytest.approx(4 / 40, rel=0.2)
    assert sparse.parts["reduce"] / exact.parts["reduce"] == pytest.approx(4 / 80, rel=0.3)
    assert top.memory["buffers"] == pytest.approx(8 * exact.most["gradients"] / 4, rel=0.01)
    layouts = [Layout.parse(f"replicate=8{choice}") for choice in ("", ",compress=topk:40", ",compress=powersgd:4")]
    together = price_many(JOB, LayoutBatch.from_layouts(layouts, len(SHAPE.blocks)), Cluster.parse(SLOW)).step_s
    alone = [price(JOB, layout, Cluster.parse(SLOW)).step_s for layout in layouts]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_sums_in_low_rank_cost_their_bytes_and_what_is_owed() -> None:
    exact, low = (
        price(JOB, Layout.parse(f"replicate=4,precision=float32{choice}"), Cluster.parse("4x1xa100-40@ethernet-1g"))
        for choice in ("", ",compress=powersgd:4")
    )
    # Of n x m values 4 (n + m) travel, with both as the width of 1024; a debt and the next one in float32.
    assert low.parts["reduce"] / exact.parts["reduce"] == pytest.approx(8 / 1024, rel=0.2)
    parameters = exact.most["gradients"] / 4
    assert low.memory["buffers"] == pytest.approx(8 * parameters, rel=0.01)
    assert low.peak == pytest.approx(exact.peak + low.memory["buffers"], rel=0.01)
    layouts = [Layout.parse(f"replicate=8{choice}") for choice in ("", ",compress=powersgd:4", ",compress=int8")]
    together = price_many(JOB, LayoutBatch.from_layouts(layouts, len(SHAPE.blocks)), Cluster.parse(SLOW)).step_s
    alone = [price(JOB, layout, Cluster.parse(SLOW)).step_s for layout in layouts]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


MIXTURE = shape_from_sizes(
    TableSizes(
        name="mixture", layers=4, width=1024, heads=16, vocab=32000, experts=16, active_experts=2, expert_ffn=512
    )
)
ROUTED = PricedJob(shape=MIXTURE, sequence=512, rows=64, precision="bf16")
FLOAT8 = ",compress_tokens=fp8"


def exchange_s(text: str, cluster: str) -> float:
    return price(ROUTED, Layout.parse(text + ",precision=bf16"), Cluster.parse(cluster)).parts["ep"]


@pytest.mark.parametrize("node", [0, 1])
def test_routed_tokens_cost_their_bytes(node: int) -> None:
    """One way of two carries a byte and its part of a scale where the other carries two; by node with 16 of choices."""
    text, wire = f"shard=4,zero=1,ep=4,ep_node={node}", "4x1xa100-40@ethernet-1g"
    choices = 16 * node
    share = (1024 + 8 + choices + 2048) / (2 * 2048 + choices)
    assert exchange_s(text + FLOAT8, wire) / exchange_s(text, wire) == pytest.approx(share, rel=0.01)


def test_the_work_of_rounding_is_priced() -> None:
    """A fast link carries the bytes that are saved in less time than memory takes to round the others."""
    text, cluster = "shard=4,zero=1,ep=4", "4xh100"
    saved_s = exchange_s(text, cluster) * (1 - (1024 + 8 + 2048) / 4096)
    work_s = exchange_s(text + FLOAT8, cluster) - exchange_s(text, cluster) + saved_s
    # In 4 layers, forward and backward, 20 bytes are moved of a value of 8192 tokens for two experts: 3.35 TB/s.
    read_s = 4 * 2 * 2 * 8192 * 1024 * 20 / 3.35e12
    assert read_s < work_s < 2 * read_s


@pytest.mark.parametrize(("cluster", "is_fused"), [("4xh100", True), ("4xa100-80", False)])
def test_the_compiler_fuses_rounding_where_a_gpu_has_float8(cluster: str, is_fused: bool) -> None:
    text = f"shard=4,zero=1,ep=4{FLOAT8}"
    eager_s, compiled_s = exchange_s(text, cluster), exchange_s(f"{text},compile=true", cluster)
    assert compiled_s < 0.9 * eager_s if is_fused else compiled_s == pytest.approx(eager_s)


def test_many_layouts_with_experts_have_the_prices_of_one() -> None:
    layouts = [Layout.parse(f"shard=4,zero=1,ep=4,precision=bf16{choice}") for choice in ("", FLOAT8)]
    cluster = Cluster.parse("4x1xa100-40@ethernet-1g")
    together = price_many(ROUTED, LayoutBatch.from_layouts(layouts, len(MIXTURE.blocks)), cluster).step_s
    alone = [price(ROUTED, layout, cluster).step_s for layout in layouts]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_the_exchange_alone_is_worth_a_hint() -> None:
    question = Question(job=ROUTED, cluster=Cluster.parse(SLOW), base=Layout(precision="bf16"))
    plan = price_candidate(question, Layout.parse("shard=8,zero=1,ep=8,precision=bf16"))
    parts = {"ep": plan.price.parts["ep"]}
    for shown, is_hinted in ((parts, True), ({}, False)):
        exact = dataclasses.replace(plan, price=dataclasses.replace(plan.price, parts=shown))
        hint = lossy_hint(question, exact, functools.partial(price_candidate, question))
        assert ("compress_tokens=fp8 would save" in hint) == is_hinted
