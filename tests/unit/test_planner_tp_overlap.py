"""Products in chunks beside tp's traffic in the plan: what is hidden, what it takes, and where it is chosen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.candidate import Candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.compilation import consider_compiled
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.cost.prices import Price
from meshwright.planner.measured_price import price_layout
from meshwright.spec.layout import Layout

SIZES = "layers=16,width=8192,heads=64,vocab=32000"
SHAPE = shape_from_sizes(TableSizes(name="dense", layers=16, width=8192, heads=64, vocab=32000))
JOB = PricedJob(shape=SHAPE, sequence=4096, rows=8)
NODE = "1x8xh100"


def priced(text: str, cluster: str = NODE, job: PricedJob = JOB) -> Price:
    return price(job, Layout.parse(text), Cluster.parse(cluster))


LONG = PricedJob(shape=SHAPE, sequence=32768, rows=8)
CARDS = "1x8xa100-80-pcie"
"""Links on which a product takes about as long as its traffic."""


@pytest.mark.parametrize(("more", "cluster"), [("", NODE), ("", CARDS), (",sequence=true", CARDS)])
def test_traffic_of_large_products_hides(more: str, cluster: str) -> None:
    text = f"tp=8,microbatches=8,precision=bf16{more}"
    without, one, four = (priced(f"{text}{chunks}", cluster, LONG) for chunks in ("", ",tp_overlap=1", ",tp_overlap=4"))
    # One chunk hides backward's sum alone, under weight gradients; hidden traffic slows what hides it by half its time.
    assert four.parts["tp"] < one.parts["tp"] < without.parts["tp"] < 2 * four.parts["tp"]
    for name in ("matmul", "attention", "elementwise", "reduce", "optimizer"):
        assert four.parts[name] == pytest.approx(without.parts[name], rel=1e-12)


@pytest.mark.parametrize("more", ["", ",sequence=true"])
def test_no_more_hides_than_products_take(more: str) -> None:
    """A network so slow that a product hides little of it."""
    text, cluster = f"tp=2,microbatches=8,precision=bf16{more}", "2x1xa100-80@ethernet-10g"
    without, four = (priced(f"{text}{chunks}", cluster) for chunks in ("", ",tp_overlap=4"))
    assert 0 < without.parts["tp"] - four.parts["tp"] < without.parts["matmul"] < without.parts["tp"]


def test_chunks_of_few_tokens_take_longer_than_they_hide() -> None:
    job = PricedJob(shape=SHAPE, sequence=128, rows=8)
    texts = ["tp=8,microbatches=8,precision=bf16,sequence=true" + more for more in ("", ",tp_overlap=8")]
    without, many = (priced(text, job=job) for text in texts)
    assert many.step_s > without.step_s


def test_cores_hide_nothing() -> None:
    cluster = "8xcpu"
    steps = [priced(f"tp=8,precision=float32{more}", cluster).step_s for more in ("", ",tp_overlap=1", ",tp_overlap=4")]
    assert steps[0] <= steps[1] < steps[2]


def test_a_pipeline_whose_weight_gradients_hide_traffic_keeps_its_bubbles() -> None:
    text = "pp=4,tp=2,microbatches=8,schedule=zbv,precision=bf16"
    whole = Layout.parse(f"{text},tp_overlap=2")
    assert Layout.parse(text).pipeline().splits_backward and not whole.pipeline().splits_backward
    assert "runs each backward whole with tp_overlap=2" in whole.unsplit_backward_reason
    assert priced(str(whole)).parts["bubble"] > priced(text).parts["bubble"]


def test_many_layouts_have_the_prices_of_one() -> None:
    texts = [
        "tp=8",
        "tp=8,tp_overlap=4",
        "tp=8,sequence=true,tp_overlap=4",
        "tp=4,replicate=2,tp_overlap=2",
        "replicate=8",
    ]
    layouts = [Layout.parse(f"{text},precision=bf16") for text in texts]
    together = price_many(JOB, LayoutBatch.from_layouts(layouts, len(SHAPE.blocks)), Cluster.parse(NODE))
    alone = [priced(str(layout)) for layout in layouts]
    np.testing.assert_allclose(together.step_s, [one.step_s for one in alone], rtol=1e-12)


def test_it_is_chosen_where_it_wins_by_more_than_the_price_is_sure_of() -> None:
    config = PlanConfig(sizes=SIZES, cluster=CARDS, batch=8, sequence=8192, fix="pp=1,tp=8")
    choice = plan_model(config, model_of_sizes(SIZES)).choice
    plan = choice.best[0]
    assert plan.layout.tp_overlap
    assert any("tp's traffic is sent under products" in note for note in choice.notes)
    without = [option.price.step_s for option in choice.best if not option.layout.tp_overlap]
    assert 1.05 * plan.price.step_s < min(without)


def test_that_it_was_never_measured_is_said_of_a_compiled_plan_too() -> None:
    config = PlanConfig(sizes=SIZES, cluster=CARDS, batch=8, sequence=8192, fix="pp=1,tp=8")
    result = plan_model(config, model_of_sizes(SIZES))
    question = dataclasses.replace(result.question, compile_steps=1000)

    def faster(layout: Layout) -> Candidate:
        """Prices compiled layers as twice as fast."""
        candidate = price_layout(question, layout, None)
        step_s = candidate.price.step_s / (2.0 if layout.compile else 1.0)
        return dataclasses.replace(candidate, price=dataclasses.replace(candidate.price, step_s=step_s))

    choice = consider_compiled(question, result.choice, None, faster)
    assert choice.best[0].layout.compile and choice.best[0].layout.tp_overlap
    assert any("never measured on several GPUs" in note for note in choice.notes)


@pytest.mark.parametrize(("cluster", "sizes"), [(NODE, SIZES), ("1x8xcpu", "layers=4,width=512,heads=8,vocab=4000")])
def test_it_isnt_chosen_for_less_and_never_on_cores(cluster: str, sizes: str) -> None:
    config = PlanConfig(sizes=sizes, cluster=cluster, batch=8, sequence=1024, fix="pp=1,tp=8")
    choice = plan_model(config, model_of_sizes(sizes)).choice
    assert not any(option.layout.tp_overlap for option in choice.best)
