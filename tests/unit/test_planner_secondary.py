"""The secondary copy of ZeRO-3's weights in the plan: its bytes, its time, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price, price_many
from meshwright.spec.layout import Layout

SIZES = "layers=32,width=8192,heads=64,vocab=32000"
SHAPE = shape_from_sizes(TableSizes(name="dense", layers=32, width=8192, heads=64, vocab=32000))
JOB = PricedJob(shape=SHAPE, sequence=2048, rows=64)
NODES = "4x8xa100-80@ethernet-100g"


def priced(text: str):  # type: ignore[no-untyped-def]
    return price(JOB, Layout.parse(f"{text},precision=bf16"), Cluster.parse(NODES))


def test_backward_gathers_inside_nodes() -> None:
    """Ethernet is far slower than what is inside a node: about half of the gathers' time is left."""
    without, shared = priced("shard=32,zero=3"), priced("shard=32,zero=3,secondary=8")
    assert 0.5 < shared.parts["gather"] / without.parts["gather"] < 0.6
    # Runs of 16 ranks cross nodes again.
    assert priced("shard=32,zero=3,secondary=16").parts["gather"] > 1.2 * shared.parts["gather"]


@pytest.mark.parametrize("size", [2, 8])
def test_it_costs_two_bytes_over_its_ranks(size: int) -> None:
    """2N / K bytes, of all layers but the one at work: Wang et al., ZeRO++ (2023), section 3.2."""
    without, shared = priced("shard=32,zero=3"), priced(f"shard=32,zero=3,secondary={size}")
    layers = sum(block.parameters for block in SHAPE.blocks[1:])
    assert shared.most["parameters"] - without.most["parameters"] == pytest.approx(2 * layers / size, rel=1e-3)


def test_many_layouts_have_the_prices_of_one() -> None:
    texts = ["shard=32,zero=3,secondary=8", "shard=32,zero=3", "shard=8,cp=4,zero=3,secondary=4", "replicate=32"]
    layouts = [Layout.parse(text + ",precision=bf16") for text in texts]
    together = price_many(JOB, LayoutBatch.from_layouts(layouts, len(SHAPE.blocks)), Cluster.parse(NODES))
    alone = [price(JOB, layout, Cluster.parse(NODES)) for layout in layouts]
    np.testing.assert_allclose(together.step_s, [one.step_s for one in alone], rtol=1e-12)
    np.testing.assert_allclose(together.peak, [one.peak for one in alone], rtol=1e-12)


@pytest.mark.parametrize(("cluster", "chosen"), [(NODES, 8), ("1x32xa100-80", 0)])
def test_it_is_chosen_where_gathers_cross_nodes(cluster: str, chosen: int) -> None:
    config = PlanConfig(sizes=SIZES, cluster=cluster, batch=64, sequence=2048, fix="pp=1,tp=1,replicate=1")
    choice = plan_model(config, model_of_sizes(SIZES)).choice
    plan = choice.best[0]
    assert plan.layout.secondary == chosen and not plan.layout.is_lossy
    assert bool(chosen) == any("gathers weights inside a node" in note for note in choice.notes)
    assert plan.price.step_s == min(option.price.step_s for option in choice.best) or not chosen
