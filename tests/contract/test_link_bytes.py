"""Every link is booked once: no step is shorter than the bytes of each class of links over their rate.

Bytes are counted here by hand, and the links that they cross from the ranks of each group: no formula is the planner's.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.link import Link
from meshwright.cluster.node import standard_node
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.pipeline_floor import PipelineFloor
from meshwright.planner.cost.pipeline_simulation import stage_seconds
from meshwright.planner.cost.price import bound_step_s, price_many
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.question import Question
from meshwright.planner.rank_groups import RankGroups
from meshwright.planner.space import cores, expand, layout_of
from meshwright.schedules.array_makespan import ArraySchedule
from meshwright.schedules.file import build_schedule
from meshwright.schedules.spec import Placement, known_schedules
from meshwright.spec.groups import gradient_axes
from meshwright.spec.layout import Layout
from tests.tiers import further

SEQUENCE, ROWS = 1024, 64
SIZES = {
    "dense": TableSizes(name="dense", layers=8, width=1024, heads=16, kv_heads=4, vocab=8192, ffn=2816),
    "uneven": TableSizes(name="uneven", layers=7, width=1024, heads=16, vocab=8192, ffn=4096),
    "mixture": TableSizes(
        name="mixture", layers=4, width=1024, heads=16, vocab=8192, experts=8, active_experts=2, expert_ffn=2048
    ),
}
RATES = {
    "slow network": (4e11, 1e8),
    "slow links inside": (1e8, 1e10),
    "like compute": (1e10, 4e9),
    "fast": (4e11, 5e10),
}
"""Bytes per second of the links inside nodes and of each card: of slow ones a step is all traffic."""
SAMPLE = 24
"""Layouts of each model and machine."""


def question(name: str, rates: str) -> Question:
    """Two nodes of eight devices and four cards, whose links add no delay."""
    near, far = (Link(name=key, bytes_per_s=rate, latency_s=0.0) for key, rate in zip(("near", "far"), RATES[rates]))
    node = dataclasses.replace(standard_node("h100"), inside=near, outside=far, outside_count=4)
    job = PricedJob(shape=shape_from_sizes(SIZES[name]), sequence=SEQUENCE, rows=ROWS)
    return Question(job=job, cluster=Cluster(groups=(NodeGroup(node=node, count=2),)), base=Layout(precision="bf16"))


def sampled_layouts(asked: Question, seed: int) -> list[Layout]:
    """Layouts all over the space, of each combination of axes and ZeRO level as many."""
    batch = expand(asked.job, asked.space, cores(asked.job, asked.space))
    keys = zip(batch.pp > 1, batch.tp > 1, batch.cp > 1, batch.ep > 1, batch.replicate > 1, batch.zero)
    strata: dict[tuple[object, ...], list[int]] = {}
    for index, key in enumerate(keys):
        strata.setdefault(key, []).append(index)
    draw = random.Random(seed)
    chosen = [draw.choice(draw.choice(list(strata.values()))) for _ in range(SAMPLE)]
    return [layout_of(batch, index, asked.base, len(asked.job.shape.blocks)) for index in chosen]


def closed_steps_s(asked: Question, layouts: list[Layout]) -> list[float]:
    """Seconds of a step by the closed form, of each layout."""
    batch = LayoutBatch.from_layouts(layouts, len(asked.job.shape.blocks))
    return price_many(asked.job, batch, asked.machine, asked.runtime).step_s.tolist()


def rank_traffic(asked: Question, layout: Layout, rank: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields (ranks of a group, bytes that a mean rank of a stage sends to the group's others) of a step.

    Layers, sends and recompute are counted as the mean rank's without recompute: a lower bound.
    """
    shape, groups, axis = asked.job.shape, RankGroups(layout, rank), layout.degree
    block, layers, microbatches = shape.blocks[0], len(shape.blocks) / axis("pp"), layout.microbatches
    tokens = ROWS * SEQUENCE / (axis("replicate") * axis("shard") * axis("cp") * microbatches)
    tp, cp, ep, experts = axis("tp"), axis("cp"), axis("ep"), block.expert_parameters
    hidden, times = tokens * shape.width * 2.0, layers * microbatches
    # Megatron: of attention and of the feed-forward a gather and a scatter (or an all-reduce), forward and backward.
    blocks = 1 if ep > 1 else 2
    yield groups.across(("tp",)).ranks, times * blocks * 4 * hidden * (tp - 1) / tp
    # Tokens for heads: all-to-alls of queries, keys, values and the output, of their gradients in backward.
    features = 2 * (block.heads + block.kv_heads) * block.head_size * 2.0 / tp
    yield groups.across(("cp",)).ranks, times * 2 * tokens * features * (cp - 1) / cp
    if ep > 1:  # to the experts and back, forward and backward
        routed = tokens / tp * block.active_experts * shape.width * 2.0
        yield groups.carved("ep").ranks, times * 4 * routed * (ep - 1) / ep
    yield from state_traffic(layout, groups, layers * (block.parameters - experts) / tp * 0.99, layers * experts)
    if axis("pp") > 1:
        stages = axis("pp") * layout.stages_per_rank
        turns = layout.stages_per_rank - 1 if known_schedules()[layout.schedule].placement is Placement.V else 0
        ranks = groups.across(("pp",)).ranks
        neighbour = ranks[(ranks.index(rank) + 1) % len(ranks)] if rank != ranks[-1] else ranks[-2]
        sent = 2 * (stages - 1 - turns) / axis("pp") * microbatches * hidden / (tp if layout.sequence else 1)
        yield (rank, neighbour), sent


def state_traffic(
    layout: Layout, groups: RankGroups, dense: float, experts: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields the gathers (2 bytes an element) and sums of gradients (4 bytes) of a rank's weights over data axes."""
    ep, piped = layout.degree("ep"), layout.degree("pp") > 1
    shards = groups.across(layout.state_axes).ranks
    copies = groups.across(gradient_axes(layout.state_axes)).ranks
    held = [(dense, shards, copies)]
    if ep == 1:
        held = [(dense + experts / layout.degree("tp"), shards, copies)]
    elif layout.zero:
        held += [(experts / ep, groups.carved("ep_shard").ranks, groups.across(("replicate",)).ranks)]
    else:
        held += [(experts / ep, groups.carved("ep_copies").ranks[:1], groups.carved("ep_copies").ranks)]
    microbatches = layout.microbatches if layout.zero >= 2 and not piped else 1
    gathers = (2 * microbatches if layout.zero == 3 and not piped else 1) * bool(layout.zero)
    for elements, members, others in held:
        count = len(members) if layout.zero else 1
        yield members, elements * (2.0 * gathers + 4.0 * microbatches * bool(layout.zero)) * (count - 1) / count
        yield others, 2 * 4.0 * elements / count * (len(others) - 1) / len(others)


def link_floor_s(asked: Question, layout: Layout) -> tuple[float, float]:
    """Returns the least seconds of a step by the bytes on (the links inside nodes, the network)."""
    fabric, world = asked.machine.fabric, layout.world
    assert fabric.outside is not None
    inside, network = 0.0, 0.0
    for rank in range(world):
        for ranks, size in rank_traffic(asked, layout, rank):
            if len(ranks) < 2 or not size:
                continue
            here = sum(peer // fabric.devices == rank // fabric.devices for peer in ranks)
            away = len(ranks) - here
            # A ring's link from this rank leaves the node for one of the group's members here.
            inside += size * (1.0 if not away else (here - 1) / here)
            network += size / here if away else 0.0
    return inside / world / fabric.inside.rate, network / (world / fabric.devices) / (
        fabric.outside.rate * fabric.cards
    )


def sends_floor_s(asked: Question, layout: Layout) -> float:
    """Returns the least seconds of a step with two pipeline ranks on two nodes, of which each sends and gets in turn.

    NCCL carries a rank's sends and receives one after the other: as many bytes go out as come in, over its part of a
    node's cards.
    """
    fabric = asked.machine.fabric
    if layout.degree("pp") != 2 or fabric.outside is None:
        return 0.0
    *_, (_, sent) = rank_traffic(asked, layout, 0)
    return 2.0 * sent / (fabric.outside.rate * fabric.cards / fabric.devices)


@pytest.mark.parametrize("rates", further(RATES, (0, 2)))
@pytest.mark.parametrize("name", SIZES)
def test_no_step_is_shorter_than_the_bytes_of_its_links(name: str, rates: str) -> None:
    asked, near_floor = question(name, rates), 0
    layouts = sampled_layouts(asked, seed=len(name + rates))
    for layout, closed_s in zip(layouts, closed_steps_s(asked, layouts)):
        floor_s = max(*link_floor_s(asked, layout), sends_floor_s(asked, layout))
        told = f"{layout}: {closed_s:.4f} s, links {floor_s:.4f} s"
        assert closed_s >= floor_s * (1 - 1e-6), told
        if layout.microbatches <= 8:  # more take long to simulate
            printed_s = price_candidate(asked, layout).price.step_s
            assert printed_s >= floor_s * (1 - 1e-6), f"{told}, printed {printed_s:.4f} s"
        near_floor += closed_s < 2.0 * floor_s
    # The floors are no idle ones: of slow links most steps are little longer.
    assert near_floor > SAMPLE / 4 or rates in ("fast", "like compute")


@pytest.mark.parametrize("name", SIZES)
def test_the_bound_of_a_core_is_below_the_price_of_its_variants(name: str) -> None:
    asked = question(name, "fast")
    layouts = sampled_layouts(asked, seed=5)
    readers = np.array([layout.degree("replicate") * layout.degree("shard") for layout in layouts], float)
    batch = LayoutBatch.from_layouts(layouts, len(asked.job.shape.blocks))
    # As the search's cores: copies alone, nothing sharded and nothing recomputed.
    nothing = np.zeros(len(layouts))
    plain = {"shard": nothing + 1, "zero": nothing, "recompute": nothing, "recompute_share": nothing + 1}
    batch = dataclasses.replace(batch, replicate=readers, **plain)
    bounds_s = bound_step_s(asked.job, batch, asked.machine, asked.runtime)
    for layout, bound_s, closed_s in zip(layouts, bounds_s, closed_steps_s(asked, layouts), strict=True):
        assert closed_s >= bound_s * (1 - 1e-9), str(layout)


@pytest.mark.parametrize("rates", further(RATES, (0, 2)))
@pytest.mark.parametrize("name", SIZES)
def test_a_pipeline_is_never_simulated_below_the_bound_of_its_search(name: str, rates: str) -> None:
    """Without the links' bytes too: what ranks wait for one another bounds the order of the actions itself."""
    asked = question(name, rates)
    layers = len(asked.job.shape.blocks)
    piped = [layout for seed in range(6) for layout in sampled_layouts(asked, seed) if layout.degree("pp") > 1]
    piped = [layout for layout in piped if layout.microbatches <= 16]
    assert len(piped) > 20
    for layout, bound_s in zip(piped, closed_steps_s(asked, piped), strict=True):
        batch = LayoutBatch.from_layouts([layout], layers)
        ranks = RankTimes(LayerCosts.of(asked.job, batch, asked.machine, asked.runtime))
        floor = PipelineFloor(ranks, *ranks.pipeline_traffic)
        order_s = float(np.maximum(floor.serial_s(), floor.round_trip_s())[0])
        sizes = (layout.schedule, ranks.ranks, layout.stages_per_rank)
        schedule = build_schedule(*sizes, layout.microbatches)
        compiled = ArraySchedule(schedule.unsplit() if layout.recompute else schedule)
        simulated_s = float(compiled.makespan_s(stage_seconds(ranks, np.zeros(1, int)))[0])
        assert simulated_s >= order_s * (1 - 1e-9), str(layout)
        assert price_candidate(asked, layout).price.step_s >= bound_s * (1 - 1e-12), str(layout)
