"""The fullest moment of a step: as an allocator would see it event by event, and as a real one did on a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fit_device import Timed, allocated
from meshwright.cluster.cluster import Cluster
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.embedding_and_head import price_embedding, price_head
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.measured_bytes import ActivationBytes, MeasuredBytes
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.layout import Layout

ROWS = Path(__file__).parents[2] / "benchmarks" / "h100.jsonl"
"""What layouts took on one H100, `tests/gpu/parts/layouts.py`."""
CLUSTER = Cluster.parse("8xh100")


class Allocator:
    """Bytes that live, and the most there ever were."""

    def __init__(self) -> None:
        self.live = self.most = 0.0

    def take(self, size: float) -> float:
        """Allocates; returns the size, to be freed by."""
        self.live += size
        self.most = max(self.most, self.live)
        return size

    def free(self, size: float) -> None:
        self.live -= size


def walked_peak(job: PricedJob, layout: Layout) -> float:
    """A step of bf16 compute without a pipeline, event by event: gather, forward, loss, backward, reductions."""
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    model = PricedModel(job, batch, Machine.of(CLUSTER), MESHWRIGHT.for_layout(layout))
    layer, embedding, head = price_bytes(model, job.shape.blocks[0]), price_embedding(model), price_head(model)
    saved, working, logits, ends, first, *sizes = (
        float(np.broadcast_to(value, 1)[0])
        for value in (
            *(layer.saved - layer.spared, layer.working, head.working, embedding.saved + head.saved),
            *(layer.first_gradient, head.parameters, layer.parameters, embedding.parameters),
        )
    )
    count, shards = len(job.shape.blocks), layout.state_shards
    units = [sizes[0], *[sizes[1]] * count, sizes[2]]
    memory, accumulates = Allocator(), layout.microbatches > 1
    memory.take(MESHWRIGHT.workspace_bytes + sum(12 * size / shards + 2 * size for size in units))
    # Sums of the micro-batches before the last.
    whole = accumulates and layout.zero < 2
    if accumulates:
        memory.take(sum(4 * size / (1 if whole else shards) for size in units))
    memory.take(ends + count * saved)
    memory.free(memory.take(logits))
    # Without ZeRO weights stay, and each gradient is widened or added by itself; a lone rank's isn't widened.
    lone = layout.world == 1 and not accumulates
    copied = 0.0
    for index, size in enumerate(units):
        is_layer, is_last = 0 < index <= count, index == len(units) - 1
        weight = first if is_layer else size
        if is_layer:
            wide = 4 if layout.zero == 0 and not accumulates and not lone else 2
            memory.free(memory.take(working + wide * first))
            memory.free(saved)
        if layout.zero == 0:
            if is_last:
                memory.free(ends)
            if accumulates:
                memory.free(memory.take(2 * weight))
            else:
                memory.take((2 if lone else 4) * size)
                memory.free(memory.take(0.0 if lone else 2 * weight))
            continue
        gradient = memory.take(2 * size)
        if whole:  # added up by now
            memory.free(gradient)
            gradient = 4 * size
        memory.free(2 * size)  # the weight
        if is_last:
            memory.free(ends)
        memory.free(copied)
        copied = memory.take(4 * size)
        memory.free(gradient)
        own = memory.take(4 * size / shards)
        if shards == 1:
            memory.free(memory.take(own))
        if accumulates and not whole:
            memory.free(own)  # added to what is there
    memory.free(copied)
    return memory.most


@pytest.mark.parametrize("rows", [8, 64, 512])
@pytest.mark.parametrize("vocab", [1000, 200_000])
@pytest.mark.parametrize(
    "text",
    [
        "replicate=1",
        "replicate=1,recompute=full",
        "replicate=8",
        "replicate=8,recompute=full",
        "replicate=8,microbatches=4",
        "shard=8,zero=1",
        "shard=8,zero=1,microbatches=4,recompute=selective",
        "shard=8,zero=2,microbatches=2",
    ],
)
def test_the_fullest_moment_is_that_of_a_walk_through_the_step(text: str, vocab: int, rows: int) -> None:
    shape = shape_from_sizes(TableSizes(name="some", layers=6, width=1024, heads=8, vocab=vocab))
    job, layout = PricedJob(shape=shape, sequence=256, rows=rows), Layout.parse(f"{text},precision=bf16")
    priced = price(job, layout, CLUSTER)
    assert priced.allocated == pytest.approx(walked_peak(job, layout), rel=0.005)


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("shard=4,ep=4,tp=2", 4 * 512 * 2048),
        ("shard=2,ep=2", 8 * 512 * 2048),
        ("tp=2", 16 * 512 * 1024),
        ("replicate=2", 16 * 512 * 2048),
    ],
)
def test_the_gradient_of_all_experts_of_a_rank_is_one(text: str, local: int) -> None:
    """16 experts whose gate and up-projection, D x 2F, are one weight: ep holds whole ones, tp alone a slice of all."""
    sizes = TableSizes(name="m", layers=2, width=512, heads=8, vocab=512, experts=16, active_experts=2, expert_ffn=1024)
    layout = Layout.parse(f"{text},precision=bf16")
    job = PricedJob(shape=shape_from_sizes(sizes), sequence=64, rows=64)
    model = PricedModel(job, LayoutBatch.from_layouts([layout], 2), Machine.of(CLUSTER), MESHWRIGHT)
    assert np.broadcast_to(price_bytes(model, job.shape.blocks[0]).first_gradient, 1)[0] == local


def test_one_recomputed_layer_has_as_much_at_once_as_all() -> None:
    """Modules that take three times what is priced while a recomputed layer's backward runs, and else as much."""
    shape = shape_from_sizes(TableSizes(name="some", layers=6, width=1024, heads=8, vocab=1000))
    job = PricedJob(shape=shape, sequence=256, rows=64)
    same, thrice = (MeasuredBytes(real=(1.0, 1.0, times), closed=(1.0, 1.0, 1.0)) for times in (1.0, 3.0))
    real = dataclasses.replace(job, activations=ActivationBytes(saved=same, working=thrice))
    more = []
    for text in ("full:1", "full:3", "full"):
        layout = Layout.parse(f"replicate=8,recompute={text},precision=bf16")
        more.append(price(real, layout, CLUSTER).most["activations"] - price(job, layout, CLUSTER).most["activations"])
    assert more[0] > 0 and more == pytest.approx([more[2]] * 3)


@pytest.mark.parametrize("axis", ["replicate=8", "tp=8", "tp=8,sequence=true"])
def test_of_two_ways_of_recompute_each_layer_has_its_own_bytes_and_seconds(axis: str) -> None:
    """Four layers that go over to selective recompute save as much beside fully recomputed ones as alone."""
    shape = shape_from_sizes(TableSizes(name="some", layers=8, width=4096, heads=32, vocab=1000))
    job = PricedJob(shape=shape, sequence=4096, rows=64)
    spared, seconds = [], []
    for more, less in (("full:4", "full:4+selective"), ("selective:2", "selective:6"), ("selective:1", "selective:5")):
        before, after = (
            price(job, Layout.parse(f"{axis},precision=bf16,recompute={how}"), CLUSTER) for how in (more, less)
        )
        spared.append(before.most["activations"] - after.most["activations"])
        seconds.append(after.step_s - before.step_s)
    assert spared[0] > 0.0 and spared == pytest.approx([spared[1]] * 3)
    assert seconds[0] > 0.0 and seconds == pytest.approx([seconds[1]] * 3, rel=1e-6)


@pytest.mark.parametrize("times", [None, 3.0])
def test_a_stage_keeps_what_its_own_layers_keep(times: float | None) -> None:
    """Of 8 layers 0, 1, 3, 4 and 6 are five that recompute: the first of four stages has both of its own among them."""
    shape = shape_from_sizes(TableSizes(name="some", layers=8, width=1024, heads=8, vocab=1000))
    job = PricedJob(shape=shape, sequence=256, rows=64)
    if times is not None:  # modules that keep three times what is priced where a layer recomputes
        saved, working = (MeasuredBytes(real=(1.0, 1.0, some), closed=(1.0, 1.0, 1.0)) for some in (times, 1.0))
        job = dataclasses.replace(job, activations=ActivationBytes(saved=saved, working=working))
    for schedule in ("1f1b", "gpipe"):
        text = f"pp=4,replicate=2,microbatches=8,precision=bf16,schedule={schedule},recompute="
        four, five, full = (
            [stage.most["activations"] for stage in price(job, Layout.parse(text + how), CLUSTER).stages]
            for how in ("full:4", "full:5", "full")
        )
        assert five == pytest.approx([full[0], *four[1:]]) and four[0] != pytest.approx(full[0])


def test_which_kind_of_layer_recomputes_is_known() -> None:
    """Dense layers and mixtures in turn: every second of four is of one kind, and which one is known."""
    sizes = TableSizes(name="m", layers=4, width=512, heads=8, vocab=512, ffn=2048)
    dense, mixture = (
        shape_from_sizes(dataclasses.replace(sizes, experts=experts, active_experts=active, expert_ffn=1024 * active))
        for experts, active in ((0, 0), (8, 2))
    )
    beyond = []
    for first, second in ((dense, mixture), (mixture, dense)):
        blocks = (first.blocks[0], second.blocks[0]) * 2
        job = PricedJob(shape=dataclasses.replace(dense, blocks=blocks), sequence=256, rows=64)
        one, two, full = (
            price(job, Layout.parse(f"replicate=8,recompute={how},precision=bf16"), CLUSTER).most["activations"]
            for how in ("full:1", "full:2", "full")
        )
        beyond.append((one - full, two - full))
    (one, mixtures), (_, denses) = beyond
    # Two of each kind beside what all that recompute keep; with one that recomputes, a dense layer, all but that.
    assert mixtures > 1.2 * denses > 0
    assert one == pytest.approx(mixtures + denses / 2)


def measured_rows() -> dict[tuple[str, bool], dict[str, Any]]:
    """Rows that say how much was allocated, by case and whether the runtime was that of before; of each the last."""
    rows = (json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines())
    told = (row for row in rows if row.get("allocated_bytes") and row.get("layout"))
    return {(row["case"], row["call"] < COPIES_FROM): row for row in told}


COPIES_FROM = 8
"""First call of whose rows lone ranks had copies that compute: before, FSDP2 held their weights, as it does in ZeRO."""
MEASURED = measured_rows()
IN_UNITS = MESHWRIGHT.with_options(states__compute_copies=False, states__lone_gradient=4.0)
"""The runtime of before."""
LEAST, MOST = -0.008, 0.025
"""Errors between which a planned peak lies: one that is too small runs out of memory."""
ONCE = (
    "1.1B 4 4096 precision=bf16",
    "1.1B 4 4096 recompute=full,precision=bf16",
    "1.1B 4 4096 precision=bf16,compile=true",
    "1.1B 4 4096 recompute=full,precision=bf16,compile=true",
    "1.1B 1 2048 replicate=1",
    "8B/8 2 8192 precision=fp8,compile=true",
    "gpt2 16 1024 recompute=full,precision=bf16",
    "0.4B 8 1024 microbatches=4,recompute=selective,precision=bf16",
    "0.4B 4 1024 precision=bf16,offload=parameters",
)
"""Of each way to run a layer one, of the runtime of before."""
ONCE_TODAY = (
    "1.1B 4 4096 recompute=full,precision=bf16",
    "8B/8 2 8192 precision=bf16,compile=true",
    "8B/8 1 8192 precision=bf16,loss_chunk=off",
    "gpt2 8 1024 precision=bf16",
)
"""The same of today's."""
CHOSEN = {*((case, True) for case in ONCE), *((case, False) for case in ONCE_TODAY)}
CASES = [pytest.param(*key, marks=() if key in CHOSEN else pytest.mark.long) for key in MEASURED]
"""The others are the same ways at other sizes: half a second of a core each, and more of compiled layers."""


@pytest.mark.parametrize(("case", "is_before"), CASES)
def test_the_planned_peak_is_that_of_a_real_gpu(case: str, is_before: bool) -> None:
    row = MEASURED[case, is_before]
    engine = IN_UNITS if is_before and Timed(row).layout.has_compute_copies else MESHWRIGHT
    planned = allocated(Timed(row).price(Cluster.parse("1xh100"), engine))
    assert LEAST < planned / row["allocated_bytes"] - 1 < MOST


def test_what_runs_each_time_is_there() -> None:
    assert MEASURED.keys() >= CHOSEN
