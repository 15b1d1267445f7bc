"""No step is shorter than what one wire carries: time that hides traffic hides it once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from meshwright.cluster import traffic
from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.link import Link
from meshwright.cluster.node import standard_node
from meshwright.jobs.model_reading import model_parts
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.collectives import Collectives, StateTraffic
from meshwright.planner.cost.groups import Machine, span
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.pipeline_floor import is_long
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.layer_traffic import LayerTraffic
from meshwright.planner.question import Question
from meshwright.planner.space import cores, expand
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelShape
from meshwright.spec.sharding_table import ShardingTable
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from tests.tiers import further

DENSE = shape_from_sizes(TableSizes(name="dense", layers=8, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000))
MIXTURE = shape_from_sizes(
    TableSizes(
        name="mixture", layers=4, width=2048, heads=16, vocab=32000, experts=16, active_experts=2, expert_ffn=4096
    )
)
LAYERS = {"dense": 8, "mixture": 4}


def _weights(name: str, degrees: LayoutBatch) -> tuple[np.ndarray, np.ndarray]:
    """Parameters in the layers of the mean rank along pp: without experts, and of experts; by hand."""
    shape = DENSE if name == "dense" else MIXTURE
    block = shape.blocks[0]
    rest = (block.parameters - block.expert_parameters) / degrees.tp
    experts = block.expert_parameters / np.where(degrees.ep > 1, degrees.ep, degrees.tp)
    return LAYERS[name] * rest / degrees.pp, LAYERS[name] * experts / degrees.pp


def _seconds(kind: object, size: np.ndarray, before: np.ndarray, ranks: np.ndarray, machine: Machine, world: int):
    """Seconds of a collective over each layout's group."""
    group = span(before, ranks, machine.fabric.devices, np.full(len(ranks), float(world)))
    took = kind(size, group.inside, group.nodes, machine.fabric, group.sharing)  # type: ignore[operator]
    return np.where(ranks > 1, took, 0.0)


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("cluster", further(["16xh100", "16xa100-40@ethernet-100g", "64xrtx3090@ethernet-10g"], (1,)))
def test_no_step_is_shorter_than_what_a_wire_carries(name: str, cluster: str) -> None:
    shape = DENSE if name == "dense" else MIXTURE
    job = PricedJob(shape=shape, sequence=4096, rows=64)
    asked = Question(job=job, cluster=Cluster.parse(cluster), base=Layout(precision="bf16"))
    machine, world = asked.machine, asked.cluster.devices
    every = expand(job, asked.space, cores(job, asked.space))
    degrees = every.take(np.arange(0, every.count, max(1, every.count // 20000)))
    took = price_many(job, degrees, machine, asked.runtime).step_s
    own, experts = _weights(name, degrees)
    # Of the wire that ZeRO's state crosses: gathers in 2 bytes, scatters in 4, as often as the runtime makes them.
    shards = degrees.shard * degrees.cp
    holders = np.where(degrees.ep > 1, shards * degrees.tp / degrees.ep, shards)
    gathers = np.where((degrees.zero == 3) & (degrees.pp == 1), 2 * degrees.microbatches, 1.0)
    scatters = np.where((degrees.zero >= 2) & (degrees.pp == 1), degrees.microbatches, 1.0)
    state = np.zeros(degrees.count)
    for count, before, ranks in ((own, degrees.tp, shards), (experts, np.maximum(degrees.ep, 1), holders)):
        state += gathers * _seconds(traffic.all_gather_s, 2.0 * count, before, ranks, machine, world)
        state += scatters * _seconds(traffic.reduce_scatter_s, 4.0 * count, before, ranks, machine, world)
    assert (took >= np.where(degrees.zero > 0, state, 0.0) * (1 - 1e-9)).all()
    assert (degrees.zero == 3).any()
    # Of the wires of tp: two sums a group of matrices, forward and backward.
    size = 2.0 * shape.width * 64 * 4096 / (degrees.data * degrees.microbatches * degrees.cp)
    each = _seconds(traffic.all_reduce_s, size, np.ones(degrees.count), degrees.tp, machine, world)
    whole = (degrees.sequence == 0) & (degrees.ep == 1)
    inside = 4 * each * degrees.microbatches * LAYERS[name] / degrees.pp
    assert (took[whole] >= inside[whole] * (1 - 1e-9)).all()


def _alone(rate: float, count: int) -> Cluster:
    """Machines of one device each, on a wire of some bytes per second that adds no delay of its own."""
    wire = Link(name="wire", bytes_per_s=rate, latency_s=0.0)
    node = dataclasses.replace(standard_node("a100-40").resized(1), outside=wire, outside_count=1)
    return Cluster(groups=(NodeGroup(node=node, count=count),))


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("float32", 4)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_lone_micro_batch_waits_for_each_of_its_sends(stages: int, schedule: str, precision: str, width: int) -> None:
    """Nothing else is there to compute meanwhile: a wire half as fast costs its bytes at each boundary, both ways."""
    layout = Layout.parse(f"pp={stages},microbatches=1,schedule={schedule},precision={precision}")
    rows, sequence, fast = 16, 1024, 2e9
    job = PricedJob(shape=DENSE, sequence=sequence, rows=rows, precision=precision)
    slow, quick = (
        price_candidate(Question(job=job, cluster=_alone(rate, stages), base=Layout()), layout).price
        for rate in (fast / 2, fast)
    )
    slow_s, fast_s = (one.step_s - one.parts["stragglers"] for one in (slow, quick))
    activation = rows * sequence * 4096 * width
    assert slow_s - fast_s == pytest.approx(2 * (stages - 1) * activation / fast, rel=1e-6)


def test_a_pipeline_too_long_to_simulate_waits_for_its_sends() -> None:
    """1F1B in closed form, where ranks compute for longer than a wire is busy: each of m + p - 1 passes waits."""
    stages, microbatches, sequence, width, fast = 64, 4096, 1024, 1024, 2e10
    layout = Layout.parse(f"pp={stages},microbatches={microbatches},schedule=1f1b,precision=bf16")
    deep = shape_from_sizes(TableSizes(name="deep", layers=stages, width=width, heads=8, vocab=1000))
    job = PricedJob(shape=deep, sequence=sequence, rows=microbatches, precision="bf16")
    assert is_long(LayoutBatch.from_layouts([layout], stages)).all()
    slow, quick = (
        price_candidate(Question(job=job, cluster=_alone(rate, stages), base=Layout()), layout).price
        for rate in (fast / 2, fast)
    )
    slow_s, fast_s = (one.step_s - one.parts["stragglers"] for one in (slow, quick))
    activation = sequence * width * 2
    assert slow_s - fast_s == pytest.approx(2 * (microbatches + stages - 1) * activation / fast, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "layout"),
    further([
        ("untied", "shard=4,zero=3,microbatches=2"), ("tied", "shard=4,zero=3,microbatches=2"),
        ("untied", "shard=4,zero=3,precision=bf16"), ("untied", "shard=2,cp=2,zero=3,microbatches=2"),
        ("untied", "replicate=2,shard=2,zero=3,precision=bf16"), ("untied", "shard=4,zero=2,microbatches=2"),
        ("untied", "shard=4,zero=1"), ("untied", "replicate=4"),
        ("untied", "shard=4,zero=3,microbatches=2,secondary=2"), ("mixture", "shard=4,ep=2,zero=3,microbatches=2"),
    ], (0, 1, 2, 4)),
)  # fmt: skip
def test_state_is_priced_for_the_bytes_that_the_runtime_sends(name: str, layout: str) -> None:
    """The runtime's bytes over the wire's rate are the seconds, where nothing hides them; half of all are the ends."""
    sizes: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "tie": name == "tied"}
    sizes |= {"name": "mixtral", "experts": 4} if name == "mixture" else {"name": "llama"}
    built, asked, rate = build_meta(ModelConfig(**sizes), vocab=512, context=16), Layout.parse(layout), 1e6
    facts = analyse_model(built, asked, ModelAnalysis(table=sharding_table(built, 2)))
    sent = Collectives()
    StateTraffic(model_parts(built, facts), asked, 0).add_to(sent)
    job = PricedJob(shape=measure_shape(built), sequence=16, rows=8, precision=asked.precision)
    hidden = dict.fromkeys(("dp_overlap", "gather_overlap", "interference"), 0.0)
    engine = MESHWRIGHT.with_options(**{f"runtime__{option}": share for option, share in hidden.items()})
    parts = price(job, asked, _alone(rate, asked.world), engine).parts
    assert parts["gather"] + parts["reduce"] == pytest.approx(sum(sent.sent().values()) / rate, rel=1e-3)
    assert (parts["gather"] > 0) == (asked.zero == 3)


@functools.cache
def _small(name: str) -> tuple[BuiltModel, ShardingTable, ModelShape]:
    """A small model without memory, as a sharding table and as sizes."""
    sizes: dict[str, Any] = {"name": name, "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
    built = build_meta(ModelConfig(**sizes | ({"experts": 4} if name == "mixtral" else {})), vocab=512, context=16)
    table = sharding_table(built, 2)
    assert table is not None
    return built, table, measure_shape(built)


@pytest.mark.parametrize("compiled", further([False, True], (0,)), ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("name", "layout"),
    further([
        ("llama", "tp=2"), ("llama", "tp=2,sequence=true"), ("llama", "cp=2,attention=heads"),
        ("llama", "cp=2,tp=2,sequence=true"), ("mixtral", "tp=2"), ("mixtral", "shard=2,ep=2"),
        ("olmo2", "tp=2"), ("olmo2", "tp=2,sequence=true"),
    ], (0, 3, 5, 6)),
)  # fmt: skip
def test_recompute_is_priced_for_the_bytes_that_it_sends_again(name: str, layout: str, compiled: bool) -> None:
    """What the runtime sends more than without recompute, over the wire's rate; OLMo 2 has a norm behind its sums."""
    built, table, shape = _small(name)
    rate = 1e6

    def seconds(mode: str) -> tuple[float, float]:
        asked = Layout.parse(f"{layout},recompute={mode},compile={str(compiled).lower()}")
        facts = analyse_model(built, asked, ModelAnalysis(table=table))
        job, sent = PricedJob(shape=shape, sequence=16, rows=8, precision=asked.precision), Collectives()
        LayerTraffic(job, asked, model_parts(built, facts), 0).add_to(sent)
        parts = price(job, asked, _alone(rate, asked.world), MESHWRIGHT.for_layout(asked)).parts
        return sum(parts[axis] for axis in ("tp", "cp", "ep")), sum(sent.sent().values()) / rate

    priced, sent = seconds("none")
    for mode in ("full", "selective"):
        again, sent_again = seconds(mode)
        assert again - priced == pytest.approx(sent_again - sent, rel=3e-3, abs=1e-9)
