"""Every link is booked once: no step is shorter than the bytes of each class of links over their rate.

The bytes are those of `planner.traffic`, the list that is held against real process groups; which links they cross is
counted here from the ranks of each group, and shares no formula with the cost model.
"""

from __future__ import annotations

import dataclasses
import random
from functools import lru_cache

import pytest

from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.link import Link
from meshwright.cluster.node import standard_node
from meshwright.errors import MeshwrightError
from meshwright.jobs.model_reading import model_parts
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.choose import Question, price_candidate
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import bound_step_s, price
from meshwright.planner.space import cores, expand, layout_of
from meshwright.planner.traffic import step_collectives
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import ShardingTable
from meshwright.train.model_analysis import ModelAnalysis, analyse_model

SEQUENCE, ROWS, VOCAB = 256, 64, 512
MODELS = {
    "dense": {"name": "llama", "layers": 8, "width": 128, "heads": 8, "kv_heads": 4, "ffn": 352},
    "uneven": {"name": "llama", "layers": 7, "width": 128, "heads": 8, "kv_heads": 8, "ffn": 512},
    "mixture": {"name": "mixtral", "layers": 4, "width": 128, "heads": 8, "kv_heads": 8, "ffn": 256, "experts": 8},
}
RATES = {"slow network": (1e9, 1e7), "slow links inside": (2e7, 1e8), "all slow": (1e8, 1e8), "fast": (4e11, 5e10)}
"""Bytes per second of the links inside nodes and of each card: of slow ones a step is all traffic."""
SAMPLE = 40
"""Layouts of each model and machine."""


def cluster_of(rates: str) -> Cluster:
    """Two nodes of eight devices, whose links add no delay."""
    node = standard_node("h100")
    inside, outside = (
        Link(name=name, bytes_per_s=rate, latency_s=0.0) for name, rate in zip(("near", "far"), RATES[rates])
    )
    node = dataclasses.replace(node, inside=inside, outside=outside, outside_count=4)
    return Cluster(groups=(NodeGroup(node=node, count=2),))


@lru_cache
def built_model(name: str) -> BuiltModel:
    return build_meta(ModelConfig(**MODELS[name]), vocab=VOCAB, context=SEQUENCE)  # type: ignore[arg-type]


@lru_cache
def table_of(name: str, degree: int) -> ShardingTable | None:
    return sharding_table(built_model(name), degree) if degree > 1 else None


ANALYSES: dict[tuple[str, int, int], ModelAnalysis] = {}


def analysis_of(name: str, layout: Layout) -> ModelAnalysis:
    """What the layout needs to know of the model; each fact is read once."""
    key = name, layout.degree("tp"), layout.degree("cp")
    known = ANALYSES.get(key) or ModelAnalysis(table=table_of(name, key[1] * key[2]))
    ANALYSES[key] = analyse_model(built_model(name), layout, known)
    return ANALYSES[key]


def question(name: str, rates: str) -> Question:
    job = PricedJob(shape=measure_shape(built_model(name)), sequence=SEQUENCE, rows=ROWS)
    return Question(job=job, cluster=cluster_of(rates), base=Layout(precision="bf16"))


def sampled_layouts(asked: Question, seed: int) -> list[Layout]:
    """Layouts all over the space, as many with a pipeline and with each ZeRO level as there are others."""
    job = asked.job
    batch = expand(job, asked.space, cores(job, asked.space))
    strata: dict[tuple[object, ...], list[int]] = {}
    for index in range(batch.count):
        key = batch.pp[index] > 1, batch.tp[index] > 1, batch.cp[index] > 1, batch.ep[index] > 1, batch.zero[index]
        strata.setdefault(key, []).append(index)
    draw = random.Random(seed)
    chosen = [draw.choice(draw.choice(list(strata.values()))) for _ in range(SAMPLE)]
    return [layout_of(batch, index, asked.base, len(job.shape.blocks)) for index in chosen]


def link_floor_s(asked: Question, layout: Layout, name: str) -> tuple[float, float]:
    """Returns the least seconds of a step by the bytes on (the links inside nodes, the network)."""
    fabric, parts = asked.machine.fabric, model_parts(built_model(name), analysis_of(name, layout))
    inside_s, network_s = 0.0, 0.0
    for node in {0, layout.world // fabric.devices - 1}:
        network_bytes = 0.0
        for rank in range(node * fabric.devices, min((node + 1) * fabric.devices, layout.world)):
            rank_inside_s = 0.0
            for (group, kind), size in step_collectives(asked.job, layout, parts, rank).bytes.items():
                here = sum(peer // fabric.devices == node for peer in group.ranks)
                inside, network = link_bytes(kind, size, here, len(group.ranks), fabric.devices)
                inside_rate = float(fabric.inside.rate_among(here))
                if kind == "all_reduce" and here == len(group.ranks) and fabric.inside.reduce_share:
                    # The switch may sum, so that each rank sends its bytes once.
                    switch_s = size / (fabric.inside.bytes_per_s * fabric.inside.reduce_share)
                    rank_inside_s += min(switch_s, inside / inside_rate)
                else:
                    rank_inside_s += inside / inside_rate
                network_bytes += network
            inside_s = max(inside_s, rank_inside_s)
        if fabric.outside is not None:
            network_s = max(network_s, network_bytes / (fabric.outside.rate * max(fabric.cards, 1.0)))
    return inside_s, network_s


def link_bytes(kind: str, size: float, here: int, ranks: int, devices: int) -> tuple[float, float]:
    """Returns a rank's bytes on (links inside its node, its part of what its node sends over the network).

    Args:
        kind: of collective.
        size: bytes, as `Collectives` counts them.
        here: members of the group on the rank's node.
        ranks: members.
        devices: of a node.
    """
    away = ranks - here
    if kind == "send":
        return (0.0, size) if away else (size, 0.0)
    if kind in ("all_to_all", "exchange"):
        return size * (here - 1) / (ranks - 1), size * away / (ranks - 1)
    if kind == "all_reduce":
        # Each node must send its sum and get those of the others: 2 (k-1)/k of the bytes with k nodes.
        nodes = ranks / here
        network = 2 * size * (nodes - 1) / nodes / here
        return 2 * size * (here - 1) / here * (1.0 if away == 0 else 0.5), network
    # Gathers and scatters: `size` is a rank's part; the node gets (or sends) those of all others once.
    return size * (ranks - 1) * (here - 1) / here, size * away / here


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", MODELS)
def test_no_step_is_shorter_than_the_bytes_of_its_links(name: str, rates: str) -> None:
    asked, checked = question(name, rates), 0
    for layout in sampled_layouts(asked, seed=len(name + rates)):
        try:
            inside_s, network_s = link_floor_s(asked, layout, name)
        except MeshwrightError:  # refused by the runtime
            continue
        closed_s = price(asked.job, layout, asked.machine, asked.runtime).step_s
        printed_s = price_candidate(asked, layout).price.step_s
        floors = f"{layout}: {closed_s:.4f} s, printed {printed_s:.4f} s, links {inside_s:.4f}, {network_s:.4f} s"
        assert min(closed_s, printed_s) >= max(inside_s, network_s) * (1 - 1e-6), floors
        checked += 1
    assert checked >= SAMPLE // 2


@pytest.mark.parametrize("name", MODELS)
def test_the_bound_of_a_core_is_below_every_printed_price(name: str) -> None:
    asked = question(name, "slow network")
    for layout in sampled_layouts(asked, seed=5):
        plain = dataclasses.replace(layout, recompute=Layout().recompute)
        batch = LayoutBatch.from_layouts([plain], len(asked.job.shape.blocks))
        bound_s = float(bound_step_s(asked.job, batch, asked.machine, asked.runtime)[0])
        assert price_candidate(asked, layout).price.step_s >= bound_s * (1 - 1e-9), str(layout)
