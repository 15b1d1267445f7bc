"""Rounded numbers in the plan: priced by their bytes, never chosen unasked, mentioned where they would pay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.choose import Question, price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price, price_many
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
