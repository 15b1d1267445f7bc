"""Bytes that ranks really send in a step, axis by axis, are those of the plan: none of them drifts."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.jobs.model_reading import model_parts
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.monitor.drift import compare
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.traffic import step_collectives
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from tests.fake.recorder import build_rank, even_routing
from tests.ranks.group import run_ranks
from tests.tiers import cases

ROWS, TOKENS, VOCAB = 8, 16, 64
CASES = {
    "llama": [
        "replicate=2", "shard=2,zero=1,microbatches=2", "shard=2,zero=2,microbatches=2",
        "shard=2,zero=3,microbatches=2",
        "tp=2,microbatches=2", "tp=2,sequence=true", "cp=2", "cp=2,attention=gather", "cp=2,attention=ring",
        "pp=2,microbatches=2",
        "pp=2,microbatches=4,schedule=interleaved", "shard=2,zero=3,precision=bf16", "cp=2,recompute=full",
        "replicate=2,shard=2,zero=2,microbatches=2", "shard=2,cp=2,zero=3", "pp=2,shard=2,zero=1,microbatches=2",
        "tp=2,cp=2",
        # Chunks under products; recompute stops before a layer's last sum in them too.
        "tp=2,tp_overlap=3", "tp=2,sequence=true,microbatches=2,tp_overlap=3", "tp=2,recompute=full,tp_overlap=2",
        "tp=2,recompute=selective,sequence=true,tp_overlap=3",
        # Stages with the embedding or the head alone send a rank's tokens, as all others do.
        "pp=2,tp=2,sequence=true,microbatches=2,split=0-4", "pp=2,cp=2,split=4-0", "pp=2,cp=2,split=0-4",
        # Rounded numbers: messages of several sizes, shards, nodes of two copies, and what tp and pp leave a rank.
        "replicate=2,microbatches=2,compress=int8", "replicate=2,compress=bf16,precision=bf16",
        "shard=2,zero=3,compress_weights=int8,microbatches=2", "shard=2,zero=1,compress_weights=fp8",
        "cp=2,compress=fp16", "replicate=4,compress=fp8:2", "replicate=4,compress=int8",
        "replicate=2,shard=2,zero=2,microbatches=2,compress=int8,compress_weights=int8",
        # Backward's gathers from a secondary copy, under a name of their own.
        "shard=4,zero=3,secondary=2,microbatches=2", "shard=2,cp=2,zero=3,secondary=2,precision=bf16",
        "shard=4,zero=3,secondary=2,compress_weights=int8",
        "replicate=2,tp=2,compress=int8", "replicate=2,pp=2,microbatches=2,compress=int8",
        # Sums in low rank and of the largest values, of weights that lie plain, in FSDP units, and split.
        "replicate=2,microbatches=2,compress=powersgd:2", "cp=2,compress=powersgd:3,precision=bf16",
        "replicate=2,tp=2,compress=powersgd:2", "replicate=2,tp=2,sequence=true,compress=powersgd:2",
        "cp=2,compress=topk:30,precision=bf16", "replicate=2,tp=2,compress=topk:30",
        "replicate=2,shard=2,zero=1,microbatches=2,compress=powersgd:2",
        "replicate=2,shard=2,zero=2,microbatches=2,precision=bf16,compress=topk:30",
        "replicate=2,shard=2,zero=3,compress=powersgd:2,compress_weights=int8",
    ],
    "mixtral": [
        "replicate=2", "shard=2,ep=2,zero=3,microbatches=2", "cp=2,ep=2", "tp=2,ep=2", "shard=2,cp=2,ep=2,zero=2",
        "replicate=2,shard=2,ep=2,zero=1", "replicate=2,shard=2,ep=2,zero=1,compress=int8",
        "replicate=2,tp=2,ep=2,compress=int8", "shard=4,ep=2,zero=3,secondary=2",
    ],
    # A norm follows each layer's last sum, so that recompute sends it again.
    "gemma3_text": [
        "tp=2,recompute=full,microbatches=2", "tp=2,recompute=selective", "tp=2,recompute=full:2,sequence=true",
        "tp=2,recompute=selective,sequence=true,tp_overlap=2", "tp=2,recompute=full:1+selective,sequence=true",
    ],
    # Its norms are over all heads of queries, and of keys.
    "olmo2": ["tp=2", "tp=2,sequence=true,microbatches=2", "tp=2,recompute=full", "tp=2,recompute=selective"],
}  # fmt: skip
"""Every axis on its own, and where two share a wire."""


@cache
def model(name: str) -> BuiltModel:
    """Builds a model once; what reads it and what makes a rank's program of it leave it unchanged."""
    more: dict[str, Any] = {"experts": 4} if name == "mixtral" else {}
    if name == "deepseek_v3":
        more = {"overrides": {"q_lora_rank": 16, "kv_lora_rank": 16}}
    else:
        more["kv_heads"] = 2
    config = ModelConfig(name=name, layers=4, width=32, heads=4, ffn=64, tie=False, **more)
    return build_meta(config, vocab=VOCAB, context=TOKENS)


def trained(name: str, layout: Layout, facts: ModelAnalysis, rank: int) -> dict[str, Any]:
    """Trains two steps; returns the last one's record, as a run keeps it: a pipeline's first tries shapes out."""
    program = build_rank(model(name), layout, facts)
    stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False), clip=1.0, seed=0)
    assert program.mesh is not None
    first, last = layout.span(rank, ROWS)
    for step, batch in enumerate(random_batches(2, ROWS, TOKENS, VOCAB, documents=False)):
        pairs = zip(*(item[first:last].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
        micro = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
        program.mesh.log.drain()
        with even_routing():
            stepper.run(step, micro, int((batch.targets != -100).sum()), 1e-3, 0.0).read()
    sums: dict[str, int] = {}
    for total in program.mesh.log.drain():
        sums[total.axis] = sums.get(total.axis, 0) + total.bytes
    return {"traffic": {axis: size for axis, size in sums.items() if size}}


def analyses(name: str, texts: list[str]) -> dict[tuple[str, str], ModelAnalysis]:
    """Analyses a model for one layout after another, as a run does: each thing once for the layouts that share it."""
    newest = ModelAnalysis(table=sharding_table(model(name), 2), trial=try_forward(model(name)))
    by_split: dict[tuple[int, int, str], ModelAnalysis] = {}
    found = {}
    for text in texts:
        layout = Layout.parse(text)
        split = layout.degree("tp"), layout.degree("cp"), layout.attention
        earlier = by_split.get(split) or ModelAnalysis(table=newest.table, trial=newest.trial)
        earlier = dataclasses.replace(earlier, layer_graph=newest.layer_graph)
        newest = by_split[split] = found[name, text] = analyse_model(model(name), layout, earlier)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "world"),
    cases(
        [(("llama", "gemma3_text", "olmo2"), 2), (("mixtral",), 4), (("llama",), 4), (("mixtral",), 2)],
        (0,),
        extended=(1,),
    ),
)
def test_no_axis_drifts_in_bytes(names: tuple[str, ...], world: int) -> None:
    texts = [(name, text) for name in names for text in CASES[name] if Layout.parse(text).world == world]
    facts = {}
    for name in names:
        facts |= analyses(name, [text for other, text in texts if other == name])

    def work(rank: int) -> dict[tuple[str, str], Any]:
        torch.set_num_threads(1)
        return {(name, text): trained(name, Layout.parse(text), facts[name, text], rank) for name, text in texts}

    found = run_ranks(world, work, timeout=250)
    for name, text in texts:
        layout, shape = Layout.parse(text), measure_shape(model(name))
        job = PricedJob(shape=shape, sequence=TOKENS, rows=ROWS, precision=layout.precision)
        for rank in range(world):
            planned = step_collectives(job, layout, model_parts(model(name), facts[name, text]), rank).sent()
            drifts = compare({"traffic": planned}, found[rank][name, text], 0.0)
            # The runtime rounds the bytes of each sum down.
            off = [(item.part, item.planned, item.measured) for item in drifts if abs(item.planned - item.measured) > 8]
            assert drifts and not off, (name, text, rank)
