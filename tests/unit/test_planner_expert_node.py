"""Tokens that travel once to each node of their experts, in the plan: how many rows, their time, when it is chosen."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.expert_dispatch import fastest_nodes, turns_s, visit_share
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.kernels import matmul_s
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.expert_exchange import halved_forms
from meshwright.spec.layout import Layout

SIZES = {
    "layers": 8,
    "width": 4096,
    "heads": 32,
    "vocab": 32000,
    "experts": 64,
    "active_experts": 8,
    "expert_ffn": 1024,
}
TEXT = ",".join(f"{name}={size}" for name, size in SIZES.items())
SHAPE = shape_from_sizes(TableSizes(name="mixture", **SIZES))  # type: ignore[arg-type]
JOB = PricedJob(shape=SHAPE, sequence=4096, rows=64, precision="bf16")
NODES = "4x8xh100"


def visited(experts: int, chosen: int, held: range, groups: int = 1, chosen_groups: int = 1) -> float:
    """Returns the share of all choices that a router may make which have an expert among those held."""
    size, hits, ways = experts // groups, 0, 0
    for picked in itertools.combinations(range(groups), chosen_groups):
        allowed = [expert for expert in range(experts) if expert // size in picked]
        for token in itertools.combinations(allowed, chosen):
            hits, ways = hits + any(expert in held for expert in token), ways + 1
    return hits / ways


@pytest.mark.parametrize(
    ("experts", "chosen", "held", "groups"),
    [(8, 2, 1, ()), (8, 2, 4, ()), (9, 3, 3, ()), (8, 1, 2, ()), (8, 2, 8, ()),
     (12, 3, 3, (4, 2)), (12, 3, 6, (4, 2)), (12, 2, 1, (3, 1)), (12, 4, 8, (3, 2))],
)  # fmt: skip
def test_shares_of_visits_are_those_of_all_choices(
    experts: int, chosen: int, held: int, groups: tuple[int, ...]
) -> None:
    block = dataclasses.replace(SHAPE.blocks[0], experts=experts, active_experts=chosen)
    if groups:
        block = dataclasses.replace(block, expert_groups=groups[0], chosen_groups=groups[1])
    assert visit_share(block, held) == pytest.approx(visited(experts, chosen, range(held), *groups), rel=1e-12)
    shares = visit_share(block, np.array([[held, experts], [held, held]]))
    np.testing.assert_allclose(shares, [[visit_share(block, held), 1.0], [visit_share(block, held)] * 2], rtol=1e-12)


def test_the_network_carries_a_token_once_a_node() -> None:
    """64 experts of 4 nodes, 8 of a token: it visits 1 - C(48, 8) / C(64, 8) = 0.915 of the nodes, not 2 a node."""
    text, slow = "shard=32,zero=3,ep=32,precision=bf16", Cluster.parse("4x8xh100@ethernet-25g")
    by_expert, by_node = (price(JOB, Layout.parse(text + more), slow) for more in ("", ",ep_node=8"))
    share = by_node.parts["ep"] / by_expert.parts["ep"]
    # Inside the node and in the rank's memory it takes a little besides.
    assert 4 * 0.915 / 8 < share < 4 * 0.915 / 8 * 1.1
    assert by_node.parts["matmul"] == by_expert.parts["matmul"]


def test_routers_that_choose_groups_visit_fewer_nodes() -> None:
    blocks = tuple(dataclasses.replace(block, expert_groups=4, chosen_groups=2) for block in SHAPE.blocks)
    grouped = dataclasses.replace(JOB, shape=dataclasses.replace(SHAPE, blocks=blocks))
    layout = Layout.parse("shard=32,zero=3,ep=32,ep_node=8,precision=bf16")
    free, limited = (price(job, layout, Cluster.parse("4x8xh100@ethernet-25g")).parts["ep"] for job in (JOB, grouped))
    assert limited / free == pytest.approx(2 / (4 * 0.915), rel=0.1)


def test_many_layouts_have_the_prices_of_one() -> None:
    texts = [
        "shard=32,zero=3,ep=32,ep_node=8",
        "shard=32,zero=3,ep=32",
        "shard=32,zero=3,ep=8,ep_node=1",
        "replicate=32",
    ]
    layouts = [Layout.parse(text + ",precision=bf16") for text in texts]
    together = price_many(JOB, LayoutBatch.from_layouts(layouts, len(SHAPE.blocks)), Cluster.parse(NODES))
    alone = [price(JOB, layout, Cluster.parse(NODES)) for layout in layouts]
    np.testing.assert_allclose(together.step_s, [one.step_s for one in alone], rtol=1e-12)
    np.testing.assert_allclose(together.peak, [one.peak for one in alone], rtol=1e-12)


@pytest.mark.parametrize(
    ("cluster", "active", "expected"),
    [
        ("4x8xh100@ethernet-25g", 8, 8),  # beyond a node, once to each
        ("4x8xh100", 1, 0),  # one expert of a token: there is nothing to save
        ("1x32xa100-80-pcie", 8, 1),  # one node: once to each rank
    ],
)
def test_the_search_knows_the_faster_exchange(cluster: str, active: int, expected: int) -> None:
    shape = shape_from_sizes(TableSizes(name="mixture", **(SIZES | {"active_experts": active})))  # type: ignore[arg-type]
    job = dataclasses.replace(JOB, shape=shape)
    runs = fastest_nodes(job, Machine.of(Cluster.parse(cluster)), 32)
    assert runs.get(16, 0) == expected
    config = PlanConfig(
        sizes=TEXT.replace("active_experts=8", f"active_experts={active}"), cluster=cluster, batch=64, sequence=4096,
        fix="pp=1,tp=1,ep=16",
    )  # fmt: skip
    choice = plan_model(config, model_of_sizes(config.sizes)).choice
    assert {option.layout.ep_node for option in choice.best if option.layout.ep_node == expected}
    assert choice.best[0].layout.ep_node == expected
    assert bool(expected) == any("a token travels once" in note for note in choice.notes)


def test_nodes_that_do_not_divide_ep_are_taken_in_parts() -> None:
    """Three nodes of eight, twelve ranks of ep: runs of four lie inside nodes."""
    job = dataclasses.replace(JOB, shape=shape_from_sizes(TableSizes(name="m", **(SIZES | {"experts": 96}))))  # type: ignore[arg-type]
    assert fastest_nodes(job, Machine.of(Cluster.parse("3x8xh100@ethernet-25g")), 24)[12] == 4


@pytest.mark.parametrize(
    "groups",
    ["active_experts=3,expert_groups=4,chosen_groups=1", "active_experts=2,expert_groups=4",
     "active_experts=2,chosen_groups=2", "active_experts=2,expert_groups=3,chosen_groups=2",
     "active_experts=2,expert_groups=2,chosen_groups=4"],
)  # fmt: skip
def test_groups_that_no_router_could_choose_from_are_refused(groups: str) -> None:
    with pytest.raises(PlanError, match="groups divide the experts"):
        model_of_sizes(f"layers=4,width=1024,heads=8,vocab=32000,expert_ffn=512,experts=8,{groups}")


@pytest.mark.parametrize(
    ("network", "ffn", "adapters"),
    [
        ("ethernet-25g", 1024, False),
        ("infiniband-xdr", 1024, False),
        ("infiniband-xdr", 32768, False),
        ("infiniband-xdr", 32768, True),
    ],
)
def test_chunks_hide_all_but_the_first_and_last(network: str, ffn: int, adapters: bool) -> None:
    """max(X, P + X / n), by hand: X of the exchange, P of the experts' products in chunks; nothing else differs."""
    text, cluster = "shard=32,zero=3,ep=32,precision=bf16", Cluster.parse(f"4x8xh100@{network}")
    shape = shape_from_sizes(TableSizes(name="mixture", **(SIZES | {"expert_ffn": ffn})))  # type: ignore[arg-type]
    job = dataclasses.replace(JOB, rows=128, shape=shape, adapters=adapters)
    # Four micro-batches send as many messages, each of as many tokens.
    apart, four = (
        price(job, Layout.parse(text + more), cluster).parts for more in (",microbatches=4", ",ep_overlap=4")
    )
    layer, tokens, passes = shape.blocks[0], 4 * 4096, len(shape.blocks)
    device, share = cluster.device, MESHWRIGHT.runtime.matmul

    def products_s(rows: float, backward: bool) -> float:
        total = 0.0
        for product in (product for product in layer.products if product.experts):
            m, n, k = rows * 8 / 2, product.outer, product.inner  # two experts a rank
            # frozen weights have no gradients
            shapes = [(m, k, n), (k, n, m)] if backward and not adapters else [(m, n, k)]
            total += 2 * sum(float(matmul_s(*shape, device, "bf16", share)) for shape in shapes)
        return total

    exchange_s = apart["ep"] / passes / 2
    seen_s = 0.0
    for backward in (False, True):
        whole, chunks = products_s(tokens, backward), 4 * products_s(tokens / 4, backward)
        seen = max(exchange_s, chunks + exchange_s / 4) - whole
        seen_s += passes * (seen + MESHWRIGHT.runtime.interference * max(0.0, exchange_s - seen))
    assert four["ep"] == pytest.approx(seen_s, rel=1e-6)
    assert four["ep"] < apart["ep"]


def simulated_s(layers: int, exchange_s: float, rest_s: float, experts_s: float) -> float:
    """Returns seconds of layers whose halves take turns: one device, and one wire that carries a journey at a time."""
    clock = wire = 0.0
    arrives = [0.0, 0.0]  # of each half, what it waits for

    def turn(half: int, compute_s: float) -> None:
        nonlocal clock, wire
        clock = max(clock, arrives[half]) + compute_s / 2
        wire = arrives[half] = max(wire, clock) + exchange_s / 4

    for _ in range(layers):
        for compute_s in (rest_s, experts_s):
            for half in (0, 1):
                turn(half, compute_s)
    return max(clock, *arrives)


@pytest.mark.parametrize("exchange_s", [0.0, 0.5, 1.5, 3.0, 6.0])
@pytest.mark.parametrize(("rest_s", "experts_s"), [(1.0, 1.0), (2.0, 0.5), (0.3, 2.0)])
def test_halves_take_what_a_simulated_wire_takes(exchange_s: float, rest_s: float, experts_s: float) -> None:
    for layers in (1, 7, 60):
        wanted_s = layers * float(turns_s(exchange_s, rest_s, experts_s, 1 / layers))
        tolerance = 0.0 if layers == 60 else 1.0  # of few layers the longer of both isn't yet what all waits for
        assert simulated_s(layers, exchange_s, rest_s, experts_s) == pytest.approx(wanted_s, rel=1e-6, abs=tolerance)


def test_halves_are_priced_with_what_recompute_repeats() -> None:
    cluster = Cluster.parse("4x8xh100")
    text = "shard=32,zero=2,ep=32,precision=bf16"
    for more in ("", ",recompute=full"):
        plain, halved = (
            price(JOB, Layout.parse(text + more + halves), cluster).parts for halves in ("", ",ep_halves=true")
        )
        assert halved["ep"] < plain["ep"] and halved.keys() == plain.keys()
    none, full = (
        price(JOB, Layout.parse(f"{text}{more},ep_halves=true"), cluster).parts["ep"]
        for more in ("", ",recompute=full")
    )
    # In what is computed again, a third of all exchanges, nothing hides it; halves send twice as many messages.
    assert full - none == pytest.approx(price(JOB, Layout.parse(text), cluster).parts["ep"] / 2, rel=0.1)


def test_halves_are_planned_where_they_win() -> None:
    layout = Layout.parse("shard=8,zero=1,ep=8,microbatches=4")
    assert [form.microbatches for form in halved_forms(layout, 32)] == [2]
    assert sorted(form.microbatches for form in halved_forms(layout, 64)) == [2, 4]
    assert not list(halved_forms(Layout.parse("shard=8,zero=3,ep=8"), 64))
    config = PlanConfig(sizes=TEXT, cluster="4x8xh100", batch=256, sequence=4096, fix="pp=1,tp=1,ep=32,zero=2")
    choice = plan_model(config, model_of_sizes(TEXT)).choice
    assert any(option.layout.ep_halves for option in choice.best)


def test_chunks_are_planned_where_they_win() -> None:
    config = PlanConfig(sizes=TEXT, cluster="4x8xh100", batch=64, sequence=4096, fix="pp=1,tp=1,ep=32,zero=3")
    choice = plan_model(config, model_of_sizes(TEXT)).choice
    assert choice.best[0].layout.ep_overlap
    assert any("under the products of others" in note for note in choice.notes)


def test_other_runtimes_exchange_as_they_do() -> None:
    config = PlanConfig(sizes=TEXT, cluster="4x8xh100@ethernet-25g", batch=64, sequence=4096)
    question = plan_model(config, model_of_sizes(TEXT)).question
    assert question.space.expert_nodes
    assert not dataclasses.replace(question, engine=MESHWRIGHT.with_options(name="another")).space.expert_nodes
