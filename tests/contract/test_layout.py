"""A layout's text form says everything, both ways; a plan is JSON both ways; what can't be is refused with the cure."""

from __future__ import annotations

import itertools
import json

import pytest

from meshwright.errors import PlanError
from meshwright.planner.memory import StateSizes, paper_memory, state_memory
from meshwright.planner.state_rule import choose, named_plan
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.stage_times import is_plain

SIZES = StateSizes(total=1_000_000, layers=(200_000,) * 4)
DEGREES = [{}, {"replicate": 4}, {"shard": 3}, {"replicate": 2, "shard": 8}]


def layouts() -> list[Layout]:
    found = []
    choices = itertools.product(
        DEGREES,
        (1, 4),
        ("none", "full", "selective:2", "full:2+selective"),
        ("float32", "float64", "bf16"),
        ("none", "optimizer"),
        (True, False),
    )
    for degrees, micro, recompute, precision, offload, compiled in choices:
        for zero in (1, 2, 3) if "shard" in degrees else (0,):
            found.append(
                Layout(
                    degrees=degrees,
                    zero=zero,
                    microbatches=micro,
                    recompute=recompute,
                    precision=precision,
                    offload=offload,
                    compile=compiled,
                )
            )
    return found


def test_text_and_json_say_everything() -> None:
    texts = set()
    for layout in layouts():
        assert Layout.parse(str(layout)) == layout
        assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
        texts.add(str(layout))
    assert len(texts) == len(layouts())


def test_defaults_and_spaces() -> None:
    assert str(Layout()) == "replicate=1" and Layout.parse("") == Layout.parse("replicate=1") == Layout()
    assert Layout.parse(" shard = 2 , microbatches=3 ") == Layout(degrees={"shard": 2}, zero=3, microbatches=3)
    assert str(Layout.parse("shard=2,replicate=3")) == "replicate=3,shard=2,zero=3"
    assert Layout.parse("replicate=2,shard=1") == Layout(degrees={"replicate": 2})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shards=2", "did you mean 'shard'"),
        ("zero", "has no value"),
        ("shard=2,shard=2", "given twice"),
        ("shard=-1", "at least 1"),
        ("shard=1.5", "not a whole number"),
        ("replicate=4,zero=1", "write shard=4,zero=1"),
        ("zero=1", "write zero=0"),
        ("shard=2,zero=9", "0, 1, 2 or 3"),
        ("precision=float", "did you mean 'float"),
        ("offload=disk", "known: none, optimizer, parameters"),
        ("recompute=none:2", "full:K or selective:K"),
        ("recompute=selective:2+full", "comes first, and all other layers do the second: write full:K.selective"),
        ("recompute=full+selective", "has a number of layers and comes first.*: write full:K.selective"),
        ("recompute=full:2+none", "without a second they keep everything"),
        ("recompute=full:2+selectiv", "recompute=selectiv is unknown.*did you mean 'selective'"),
        ("compile=1", "compile=true or compile=false"),
        ("shard=8,secondary=3", "must divide the 8 ranks .* nearest that works: secondary=2"),
        ("shard=4,secondary=4", "be fewer; nearest that works: secondary=2"),
        ("shard=2,secondary=2", "nearest that works: drop it"),
        ("shard=4,zero=2,secondary=2", "zero=2 frees none in between; write zero=3"),
        ("pp=2,shard=4,secondary=2", "no effect with pp=2: a pipeline keeps"),
        ("replicate=2,tp_overlap=4", "tp_overlap=4 has no effect without tp; write tp=2 or more"),
        ("replicate=2,ep_overlap=2", "ep_overlap=2 has no effect without ep; write ep=2 or more"),
        ("shard=2,zero=1,ep=2,ep_overlap=1", "2 or more, or 0 for none; nearest that works: ep_overlap=2"),
        ("replicate=2,ep_node=1", "ep_node=1 has no effect without ep; write ep=2 or more"),
        ("shard=8,zero=1,ep=8,ep_node=3", "must divide them, and be fewer; nearest that works: ep_node=2"),
        (
            "shard=4,zero=1,ep=4,ep_node=4",
            "runs of ranks of ep=4 must divide them, and be fewer; nearest that works: ep_node=2",
        ),
        ("shard=4,zero=1,ep=4,ep_node=-1", "nearest that works: ep_node=1"),
        ("tp=2,tp_overlap=-1", "a number of chunks, 1 or more, or 0"),
        ("tp=2,tp_overlap=2,precision=fp8", "nearest that works: precision=bf16, or drop tp_overlap"),
    ],
)
def test_what_cannot_be(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Layout.parse(text)


def test_the_nearest_layout_that_works_works() -> None:
    carved = [Layout.parse(text) for text in ("shard=8,ep=2", "shard=4,ep=4", "replicate=2,shard=2,tp=2,ep=4")]
    for layout, ranks in itertools.product([*layouts(), *carved], (1, 2, 5, 6, 12, 16)):
        if layout.world == ranks:
            layout.check_ranks(ranks)
            continue
        with pytest.raises(PlanError) as refused:
            layout.check_ranks(ranks)
        cure = str(refused.value).partition("--layout ")[2].partition(", or --devices")[0]
        Layout.parse(cure).check_ranks(ranks)
        assert f"--devices {layout.world}" in str(refused.value)


def test_the_nearest_batch_that_works_works() -> None:
    for layout, rows in itertools.product(layouts()[::7], (1, 7, 16, 33)):
        share = layout.reader(0)[1] * layout.microbatches
        if rows % share == 0:
            layout.check_batch(rows)
            continue
        with pytest.raises(PlanError, match=f"batch of {rows} rows") as refused:
            layout.check_batch(rows)
        cure = str(refused.value).partition("works: ")[2].removesuffix(" rows")
        for size in cure.split(" or "):
            layout.check_batch(int(size))


def test_plans_are_json_both_ways() -> None:
    for layout in layouts()[::5]:
        plan = named_plan(layout, layout.world, SIZES)
        assert Plan.from_json(json.loads(plan.dumps())) == plan
        assert plan.prediction.memory.keys() == plan.prediction.formula.keys() - {"zero_paper_bytes"}


def test_memory_falls_with_every_level_and_every_shard() -> None:
    for micro, precision in itertools.product((1, 4), ("float32", "bf16", "float64")):
        rows = []
        for shard, zero in itertools.product((2, 4, 8), (1, 2, 3)):
            layout = Layout(degrees={"shard": shard}, zero=zero, microbatches=micro, precision=precision)
            memory, _ = state_memory(layout, SIZES)
            rows.append((shard, zero, sum(memory.values()), paper_memory(layout, SIZES.total)))
        for shard, zero, total, paper in rows:
            for other_shard, other_zero, other, other_paper in rows:
                if shard >= other_shard and zero >= other_zero:
                    assert total <= other and paper <= other_paper


def test_the_paper_s_own_example() -> None:
    """Source: Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 devices, mixed precision."""
    found = []
    for zero in (1, 2, 3):
        layout = Layout(degrees={"shard": 64}, zero=zero, precision="bf16")
        found.append(round(paper_memory(layout, 7_500_000_000) / 1e9, 1))
    assert found == [31.4, 16.6, 1.9]
    assert paper_memory(Layout(precision="bf16"), 7_500_000_000) == 120_000_000_000


def test_the_rule_takes_the_lowest_level_that_fits() -> None:
    need = {zero: sum(state_memory(Layout(degrees={"shard": 4}, zero=zero), SIZES)[0].values()) for zero in (1, 3)}
    assert str(choose(4, 8, SIZES, 1 << 40, "float32").layout) == "replicate=4"
    assert str(choose(1, 8, SIZES, 1 << 40, "float32").layout) == "replicate=1"
    plan = choose(4, 8, SIZES, int(need[1] / 0.6) + 9, "float32")
    assert plan.layout.zero == 1 and list(plan.rejected) == ["replicate=4"]
    assert choose(4, 8, SIZES, int(need[3] / 0.6) + 9, "float32").layout.zero == 3
    with pytest.raises(PlanError, match="more devices or fewer layers"):
        choose(4, 8, SIZES, 1000, "float32")
    with pytest.raises(PlanError, match="batch of 9 rows"):
        choose(4, 9, SIZES, 1 << 40, "float32")


def test_uneven_shares_cover_the_batch_once() -> None:
    layout = Layout.parse("replicate=3,tp=2,microbatches=2,rows=3-2-1")
    layout.check_batch(24)
    assert [layout.span(rank, 24) for rank in range(6)] == [(0, 12)] * 2 + [(12, 20)] * 2 + [(20, 24)] * 2
    even = Layout.parse("replicate=2,shard=2,microbatches=2")
    assert [even.span(rank, 8) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    with pytest.raises(PlanError, match=r"shares of 3-2-1 x 2 micro-batches; nearest that works: 12 or 24 rows"):
        layout.check_batch(16)
    assert not layout.with_degrees({"replicate": 4}).rows
    many = Layout.parse("replicate=2,shard=3,rows=5x4-2x2")
    assert many.reader_shares() == [5, 5, 5, 5, 2, 2] and many.batch_unit == 24 and many.span(5, 48) == (44, 48)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("replicate=2,rows=3", "1 shares, but 2 readers; for one, rows=1-1"),
        ("replicate=2,rows=2-2", "evenly, which has no effect"),
        ("replicate=2,rows=0-2", "at least 1"),
        ("tp=2,rows=3-1", "2 shares, but 1 readers"),
    ],
)
def test_shares_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Layout.parse(text)


def test_chunks_beside_tp_go_with_it() -> None:
    layout = Layout.parse("shard=8,zero=1,ep=8,ep_node=4,ep_overlap=2")
    assert Layout.parse(str(layout)) == layout and "ep_node=4,ep_overlap=2" in str(layout)
    assert (
        layout.with_degrees({"shard": 2, "ep": 2}).ep_overlap == 2 and not layout.with_degrees({"shard": 8}).ep_overlap
    )
    assert layout.with_degrees({"shard": 8, "ep": 4}).ep_node == layout.with_degrees({"shard": 8}).ep_node == 0
    assert layout.with_degrees({"shard": 16, "ep": 16}).ep_node == 4
    layout = Layout.parse("replicate=2,tp=4,tp_overlap=4,sequence=true")
    assert Layout.parse(str(layout)) == layout and "tp_overlap=4" in str(layout)
    assert layout.with_degrees({"tp": 2}).tp_overlap == 4 and layout.with_degrees({"replicate": 2}).tp_overlap == 0
    # The replanner's search doesn't know it, so a run that has it keeps its layout.
    assert is_plain(Layout.parse("tp=4")) and not is_plain(layout)


def test_a_secondary_copy_follows_the_ranks_that_share_the_state() -> None:
    layout = Layout.parse("shard=4,cp=2,secondary=4")
    assert str(layout) == "shard=4,cp=2,zero=3,secondary=4"
    for degrees, secondary in (({"shard": 8}, 4), ({"shard": 4}, 0), ({"shard": 8, "pp": 2}, 0), ({"replicate": 8}, 0)):
        assert layout.with_degrees(degrees).secondary == secondary


def test_of_two_ways_of_recompute_the_first_has_evenly_spaced_layers() -> None:
    recompute = Layout.parse("recompute=full:2+selective").recompute
    assert recompute.modes(5) == ["full", "selective", "full", "selective", "selective"]
    assert recompute.layers(5) == [0, 1, 2, 3, 4] and Layout.parse("recompute=full:2").recompute.layers(5) == [0, 2]
    shares = [recompute.share(5), *(recompute.share(5, mode) for mode in ("full", "selective", "none"))]
    assert shares == pytest.approx([0.4, 0.4, 0.6, 0.0])
