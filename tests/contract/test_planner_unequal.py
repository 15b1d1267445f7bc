"""Devices of several kinds get layers and rows by their speed; a slow one that costs more than it brings is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.unequal_ranks import UnequalRankTimes
from meshwright.planner.device_kinds import kinds_of
from meshwright.planner.question import Question
from meshwright.planner.unequal import _timed, choose_unequal, price_unequal, why_unequal
from meshwright.planner.uneven_split import uneven_data_layouts, uneven_pipelines
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares

SHAPE = shape_from_sizes(TableSizes(name="llama", layers=16, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000))


def question(text: str, rows: int = 16) -> Question:
    job = PricedJob(shape=SHAPE, sequence=4096, rows=rows)
    return Question(job=job, cluster=Cluster.parse(text), base=Layout(precision="bf16"))


@pytest.fixture(scope="module")
def mixed() -> tuple[Question, object]:
    asked = question("4xh100+4xa100-80")
    return asked, choose_unequal(asked)


def test_layers_or_rows_follow_speed(mixed) -> None:  # type: ignore[no-untyped-def]
    _, choice = mixed
    best = choice.best[0].layout
    if best.split:
        sizes = best.split.layers
        assert sizes[0] > sizes[-1] and sum(sizes) == 16
    else:
        assert best.reader_shares()[0] > best.reader_shares()[-1]
    alone = [choose(question(text)).best[0].price.step_s for text in ("4xh100", "4xa100-80")]
    assert choice.best[0].price.step_s < min(alone)
    assert sum("alone" in note for note in choice.notes) == 2
    assert all(Layout.parse(str(one.layout)) == one.layout for one in choice.best)


def test_a_named_layout_is_compared(mixed) -> None:  # type: ignore[no-untyped-def]
    asked, choice = mixed
    even = why_unequal(asked, Layout.parse("shard=8,zero=1,recompute=full,precision=bf16"), choice)
    assert "slower" in even
    with pytest.raises(PlanError, match="multiply"):
        why_unequal(asked, Layout.parse("shard=4"), choice)


def test_a_slow_device_that_costs_more_than_it_brings_is_named() -> None:
    choice = choose_unequal(question("4xh100+4xt4"), 1)
    assert any("leave t4 out" in note for note in choice.notes)


def test_layers_are_dealt_within_memory() -> None:
    small = dataclasses.replace(question("4xh100+4xa100-80", 64), usable=0.3)
    kinds = kinds_of(small.cluster)
    rooms = kinds.limits_bytes(small.usable)
    dealt = [layout for some in uneven_pipelines(small, kinds) for layout in some]
    assert dealt and all(sum(layout.split.layers) == 16 for layout in dealt)
    for layout in dealt[:: max(1, len(dealt) // 20)]:
        places = kinds.of_runs(8 // layout.degree("pp"))
        stages = price(small.job, layout, small.machine, small.runtime).stages
        assert all(stage.peak <= rooms[place] for stage, place in zip(stages, places))


@pytest.mark.parametrize("text", ["4xh100+4xa100-80", "2xh100+4xt4"])
def test_many_are_timed_as_one_by_one(text: str) -> None:
    asked = question(text, 12)
    kinds = kinds_of(asked.cluster)
    layouts, seconds = _timed(asked, kinds)
    assert len(layouts) == len(seconds) and np.isfinite(seconds).any()
    for at in range(0, len(layouts), 5):
        one = price_unequal(asked, kinds, layouts[at])
        assert seconds[at] == (np.inf if one is None else pytest.approx(one.price.step_s, rel=1e-9)), layouts[at]


def test_equal_devices_named_as_two_kinds_cost_what_one_kind_costs() -> None:
    asked = question("8xh100", 32)
    layouts = [Layout.parse(f"pp=4,replicate=2,microbatches={count},precision=bf16") for count in (4, 8, 16)]
    ranks = RankTimes(LayerCosts.of(asked.job, LayoutBatch.from_layouts(layouts, 16), asked.machine, asked.runtime))
    unequal = UnequalRankTimes([ranks, ranks], [0, 0, 1, 1])
    expected = ranks.parts()
    assert all(values == pytest.approx(expected[name]) for name, values in unequal.parts().items())
    assert unequal.step_s() == pytest.approx(ranks.step_s())
    assert all(np.array_equal(values, ranks.memory()[name]) for name, values in unequal.memory().items())


def test_the_parts_of_a_stage_are_those_of_its_own_device() -> None:
    asked = question("4xh100+4xt4", 32)
    layout = Layout.parse("pp=2,replicate=4,microbatches=8,precision=bf16,split=8-8")
    found = price_unequal(dataclasses.replace(asked, usable=1e3), kinds_of(asked.cluster), layout)
    assert found is not None
    slow = price(asked.job, layout, Cluster.parse("8xt4"), asked.runtime)
    # The second stage decides, on the slower device: its products are those of a pipeline of such devices.
    assert found.price.parts["matmul"] == pytest.approx(slow.parts["matmul"])
    assert sum(found.price.parts.values()) == pytest.approx(found.price.step_s)


def test_rows_are_dealt_by_what_each_number_of_them_takes() -> None:
    """Few rows take a launch-bound device as long as one, so the seconds of one row tell too little."""
    shape = shape_from_sizes(TableSizes(name="small", layers=2, width=512, heads=4, vocab=4096))
    job = PricedJob(shape=shape, sequence=2048, rows=8)
    asked = Question(job=job, cluster=Cluster.parse("2xh100+2xa100-40"), base=Layout(precision="bf16"))
    kinds, rest = kinds_of(asked.cluster), "shard=2,tp=2,zero=1,precision=bf16,sequence=true"
    seconds = {}
    for first in range(1, 8):
        rows = "" if first == 4 else f",rows={BatchShares.of([first, 8 - first])}"
        found = price_unequal(asked, kinds, Layout.parse(rest + rows))
        assert found is not None
        seconds[first] = found.price.step_s
    dealt = [
        layout.reader_shares() for layout in uneven_data_layouts(asked, kinds)
        if layout.degree("tp") == 2 and layout.zero == 1 and layout.microbatches == 1 and not layout.recompute
    ]  # fmt: skip
    ((first, second),) = dealt
    assert seconds[first * 8 // (first + second)] == pytest.approx(min(seconds.values()), rel=1e-9), seconds
