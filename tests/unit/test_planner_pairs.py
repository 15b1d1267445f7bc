"""The price of passes that a schedule pairs, and of what recompute sends again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.expert_dispatch import paired_ep_s
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price
from meshwright.schedules.action import ActionKind, Schedule
from meshwright.schedules.spec import find_schedule
from meshwright.spec.layout import Layout

SIZES = TableSizes(
    name="mixture", layers=8, width=4096, heads=32, vocab=32000, experts=64, active_experts=8, expert_ffn=2048
)
JOB = PricedJob(shape=shape_from_sizes(SIZES), sequence=4096, rows=512, precision="bf16")
CLUSTER = Cluster.parse("4x8xh100")
PAIRED = "pp=2,shard=16,zero=1,ep=16,microbatches=16,schedule=dualpipev,precision=bf16"


def paired_passes(schedule: Schedule) -> list[float]:
    """Returns of each rank the share of its forwards that stand in a pair of different stages."""
    shares = []
    for actions in schedule.actions:
        parts = [action.parts for action in actions]
        forwards = [part for group in parts for part in group if part.kind is ActionKind.FORWARD]
        pairs = [pair for pair in parts if len(pair) == 2 and pair[0].stage != pair[1].stage]
        shares.append(len(pairs) / len(forwards))
    return shares


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 9), (3, 6), (4, 8), (4, 31), (8, 20)])
def test_the_paired_share_is_that_of_the_rank_with_fewest_pairs(ranks: int, microbatches: int, tmp_path: Path) -> None:
    schedule = find_schedule("dualpipev").build(ranks, 2, microbatches)
    counted = min(paired_passes(schedule))
    path = tmp_path / "mine.csv"
    path.write_text(schedule.to_csv())
    for name in ("dualpipev", f"file:{path}"):
        text = f"pp={ranks},shard=2,ep=2,microbatches={microbatches},schedule={name}"
        layouts = [Layout.parse(text), Layout.parse(text + ",ep_halves=true"), Layout.parse(text.replace("ep=2,", ""))]
        shares = LayoutBatch.from_layouts(layouts, 8).paired_share
        assert shares.tolist() == pytest.approx([counted, 0.0, 0.0])


Steps = Iterator[tuple[float, bool]]
"""Seconds of compute up to a journey, and whether there is one (else the pass ends)."""


def simulated_s(journey_s: float, *passes: Steps) -> float:
    """Returns the seconds of passes that take turns: one device, and one wire that carries a journey at a time."""
    clock = wire = 0.0
    arrives = [0.0 for _ in passes]
    going = list(range(len(passes)))
    for side in itertools.cycle(range(len(passes))):
        if not going:
            return clock
        if side not in going:
            continue
        compute_s, has_journey = next(passes[side])
        clock = max(clock, arrives[side]) + compute_s
        if has_journey:
            wire = arrives[side] = max(wire, clock) + journey_s
        else:
            going.remove(side)
    raise AssertionError


def forward_steps(layers: int, rest_s: float, experts_s: float) -> Steps:
    for _ in range(layers):
        yield rest_s, True
        yield experts_s, True
    yield 0.0, False


def backward_steps(layers: int, own: tuple[float, float], repeated: tuple[float, float], mode: str) -> Steps:
    rest_s, experts_s = own
    before_s = 0.0
    for _ in range(layers):
        if mode == "sends":
            yield before_s + repeated[0], True
            yield repeated[1], True
            before_s = 0.0
        kept = repeated if mode == "keeps" else (0.0, 0.0)
        # Only what stands between two journeys counts, in whatever order.
        yield before_s + kept[0], True
        yield kept[1] + experts_s, True
        before_s = rest_s
    yield before_s, False


@pytest.mark.parametrize("journey_s", [0.0, 0.4, 1.2, 3.0])
@pytest.mark.parametrize("pieces", [(1.0, 1.0), (2.0, 0.5), (0.3, 2.0)])
@pytest.mark.parametrize("mode", ["none", "sends", "keeps"])
def test_pairs_take_what_a_simulated_wire_takes(journey_s: float, pieces: tuple[float, float], mode: str) -> None:
    own, repeats = (2.0 * pieces[0], 2.0 * pieces[1]), mode != "none"
    for layers in (2, 60):
        busy_s = layers * (sum(pieces) + sum(own) + repeats * sum(pieces))
        exposed = paired_ep_s(journey_s, pieces, own, pieces, float(repeats), mode == "keeps", 1.0 / layers)
        wanted_s = busy_s + layers * (exposed[0] + exposed[1] + repeats * exposed[2])
        taken_s = simulated_s(journey_s, forward_steps(layers, *pieces), backward_steps(layers, own, pieces, mode))
        # Of few layers the ends count: what stands beside what isn't steady there.
        assert taken_s == pytest.approx(float(wanted_s), abs=2.0 * (journey_s + max(own)))
        if layers == 60:
            assert taken_s == pytest.approx(float(wanted_s), rel=0.03)


def exchange_s(text: str, engine: FrameworkProfile = MESHWRIGHT) -> float:
    return price(JOB, Layout.parse(text), CLUSTER, engine).parts["ep"]


@pytest.mark.parametrize("more", ["", ",recompute=full", ",recompute=selective", ",recompute=full:4"])
def test_pairs_hide_a_part_of_the_exchange(more: str) -> None:
    apart = dataclasses.replace(
        MESHWRIGHT, runtime=dataclasses.replace(MESHWRIGHT.runtime, pairs_in_turns=False, interference=0.0)
    )
    pairs = dataclasses.replace(MESHWRIGHT, runtime=dataclasses.replace(MESHWRIGHT.runtime, interference=0.0))
    share = float(LayoutBatch.from_layouts([Layout.parse(PAIRED)], 8).paired_share[0])
    plain_s, turned_s = exchange_s(PAIRED + more, apart), exchange_s(PAIRED + more, pairs)
    # No more than in every pair the forward's journeys, and as many of backward's.
    hidden_most = {"": 1.0, ",recompute=full:4": 4 / 5}.get(more, 2 / 3)
    assert plain_s * (1 - share * hidden_most) * 0.999 < turned_s < plain_s
    other = more + ",ep_halves=true"
    assert exchange_s(PAIRED + other, apart) == exchange_s(PAIRED + other, pairs)
    zbv = PAIRED.replace("dualpipev", "zbv") + more
    assert exchange_s(zbv, apart) == exchange_s(zbv, pairs)


@pytest.mark.parametrize(
    ("text", "gathers"),
    [("shard=32,zero=2,ep=32", 1.0), ("tp=8,shard=4,zero=1", 0.0), ("tp=8,sequence=true,shard=4,zero=1", 2 / 3)],
)
def test_selective_recompute_sends_again_what_a_layer_sends_but_sums(text: str, gathers: float) -> None:
    # Of tp's four collectives in forward full recompute sends three again, all but the last sum.
    name = "ep" if "ep=" in text else "tp"
    other = dataclasses.replace(MESHWRIGHT, runtime=dataclasses.replace(MESHWRIGHT.runtime, selective_sends=False))
    none, full, selective, kept = (
        price(JOB, Layout.parse(f"{text},precision=bf16,recompute={mode}"), CLUSTER, engine).parts[name]
        for mode, engine in (("none", other), ("full", other), ("selective", MESHWRIGHT), ("selective", other))
    )
    assert kept == pytest.approx(none) and 1.2 * none < full
    assert selective - none == pytest.approx(gathers * (full - none))


def test_a_ring_is_not_sent_again_by_selective_recompute() -> None:
    ring = dataclasses.replace(MESHWRIGHT, runtime=dataclasses.replace(MESHWRIGHT.runtime, context="ring"))
    for engine, repeats in ((ring, False), (MESHWRIGHT, True)):
        text = "cp=4,shard=8,zero=1,precision=bf16"
        none, selective = (
            price(JOB, Layout.parse(text + more), CLUSTER, engine).parts["cp"] for more in ("", ",recompute=selective")
        )
        assert (selective > 1.01 * none) == repeats
