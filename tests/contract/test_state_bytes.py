"""Bytes of state as the planner prices them are those that the ranks' tensors add up to, for every axis."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.planner.memory import ModelParts, rest_bytes, state_memory
from meshwright.planner.state_rule import predict
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.slow

VOCAB, CONTEXT, ROWS = 97, 16, 8
"""The vocabulary divides by no degree."""
DENSE = [
    "tp=2", "tp=2,shard=2,zero=1", "tp=2,shard=2,zero=3", "tp=2,shard=2,zero=2,microbatches=2,precision=bf16", "tp=3",
    "pp=2,microbatches=2", "pp=2,shard=2,zero=3,microbatches=4", "pp=2,tp=2,microbatches=2", "cp=2",
    "tp=2,precision=bf16", "replicate=2,precision=bf16",
    "shard=4,zero=3,secondary=2,microbatches=2", "shard=4,zero=3,secondary=2,recompute=full,precision=bf16",
]  # fmt: skip
FOLDED = [f"pp=2,microbatches=4,schedule=zbv{more}" for more in ("", ",shard=2,zero=1", ",precision=bf16")]
"""The first rank holds both ends of the model, and so a tied weight twice, whose moments it keeps once."""
MIXED = [
    "tp=2", "pp=2,microbatches=2", "ep=2,shard=2,zero=1", "ep=2,shard=2,zero=3", "ep=2,replicate=2,tp=2",
    "ep=2,shard=4,zero=3,precision=bf16", "shard=4,ep=2,zero=3,secondary=2,recompute=full",
    "ep=2,tp=2,precision=bf16,microbatches=2",
]  # fmt: skip
ROUNDED = [
    "replicate=2,compress=int8", "replicate=4,compress=fp8:2", "replicate=2,shard=2,zero=2,compress=bf16",
    "replicate=2,shard=2,zero=3,microbatches=2,compress=int8,compress_weights=int8", "cp=2,compress=int8",
    "pp=2,replicate=2,microbatches=2,compress=int8",
    "replicate=2,compress=powersgd:3", "cp=2,compress=powersgd:2,precision=bf16",
    "replicate=2,tp=2,compress=powersgd:2",
    "replicate=2,compress=topk:20", "replicate=2,microbatches=2,precision=bf16,compress=topk:20",
    "cp=2,compress=topk:7", "replicate=4,compress=topk:5", "replicate=2,tp=2,compress=topk:20",
    "replicate=2,shard=2,zero=1,compress=powersgd:2", "replicate=2,shard=2,zero=2,microbatches=2,compress=topk:20",
    "replicate=2,shard=2,zero=3,precision=bf16,compress=powersgd:2,compress_weights=int8",
    "replicate=2,shard=2,zero=1,compress=topk:7",
]  # fmt: skip
"""Buffers of rounded numbers come on top, but for the planner's own estimate of what is under way at once."""
CASES = {
    "llama": ({"layers": 4, "width": 48, "heads": 6, "kv_heads": 3, "ffn": 100}, DENSE[:4] + DENSE[6:]),
    "gpt2": ({"layers": 4, "width": 48, "heads": 6}, [*DENSE, *FOLDED]),
    # Two experts on four ranks: some hold none between the steps.
    "mixtral": ({"layers": 3, "width": 32, "heads": 4, "ffn": 64, "experts": 2}, MIXED),
}
WITHIN = 0.02
"""Allowed relative difference of what is sampled while a step runs; what rests is exact."""


@cache
def model(name: str) -> BuiltModel:
    """Builds a model once; what reads it leaves it unchanged, and each program of a rank takes a copy."""
    return build_meta(ModelConfig(name=name, **CASES[name][0]), vocab=VOCAB, context=CONTEXT)


@cache
def known(name: str) -> ModelAnalysis:
    """Returns what no layout changes, as a run that analyses one layout after another reads it once."""
    return ModelAnalysis(table=sharding_table(model(name)), trial=try_forward(model(name)))


def collect_local_shards(built: BuiltModel, facts: ModelAnalysis) -> ModelParts:
    named = built.module.named_parameters(remove_duplicate=False)
    structure = built.structure
    found = (structure.layers, structure.ties, facts.table, facts.layer_graph, facts.experts)
    return ModelParts.of(named, *found, ends=facts.trial.ends)


def trained(built: BuiltModel, facts: ModelAnalysis, layout: Layout, rank: int) -> dict[str, int]:
    """Trains two steps; returns the bytes held at most, and those of the masters."""
    program = build_rank(built, layout, facts)
    optimizer = LocalAdamW(program.weights, OptimizerConfig())
    index, count = layout.reader(rank)
    stepper = Stepper(program, optimizer, LossScaler(False), clip=1.0, seed=0)
    rows = ROWS // count
    mine = slice(index * rows, (index + 1) * rows)
    for step, batch in enumerate(random_batches(2, ROWS, CONTEXT, VOCAB, documents=False)):
        pairs = zip(*(item[mine].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
        micro = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
        stepper.run(step, micro, int((batch.targets != -100).sum()), 1e-3, False).read()
    return program.state_meter.read(optimizer.bytes()) | {"rest": program.state_meter.master}


def measured(name: str, texts: list[str]) -> list[tuple[str, ModelParts, list[dict[str, int]]]]:
    """Runs layouts of one number of ranks in one group of them."""
    facts = {text: analyse_model(model(name), Layout.parse(text), known(name)) for text in texts}

    def work(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        return {text: trained(model(name), facts[text], Layout.parse(text), rank) for text in texts}

    found = run_ranks(Layout.parse(texts[0]).world, work, timeout=250)
    return [(text, collect_local_shards(model(name), facts[text]), [ranks[text] for ranks in found]) for text in texts]


def groups() -> list[tuple[str, int]]:
    return sorted({(name, Layout.parse(text).world) for name, (_, texts) in CASES.items() for text in texts})


@pytest.mark.parametrize(("name", "world"), further(groups(), (1, 3, 5)))
def test_bytes_held_are_bytes_planned(name: str, world: int) -> None:
    texts = [text for text in CASES[name][1] if Layout.parse(text).world == world]
    for text, parts, found in measured(name, texts):
        layout = Layout.parse(text)
        for rank, held in enumerate(found):
            assert held["rest"] == rest_bytes(layout, parts, rank), (text, rank)
        planned, formula = state_memory(layout, parts)
        assert planned.keys() == formula.keys()
        fullest = max(found, key=lambda held: sum(held[part] for part in planned))
        for part, size in planned.items():
            assert fullest[part] == pytest.approx(size, rel=WITHIN), (text, part, planned, found)


@pytest.mark.parametrize("world", further([2, 4]))
def test_buffers_of_rounded_numbers_are_planned(world: int) -> None:
    texts = [text for text in ROUNDED if Layout.parse(text).world == world]
    for text, parts, found in measured("llama", texts):
        planned = predict(Layout.parse(text), parts).memory["buffers"]
        assert max(held["buffers"] for held in found) == planned > 0, (text, planned, found)


def test_whole_gradients_of_an_early_stage_are_seen() -> None:
    """Its last forward comes before its first backward, after which it holds them until the last."""
    ((_, _, found),) = measured("gpt2", ["pp=2,shard=2,zero=3,microbatches=2"])
    for held in found:
        assert held["gradients"] == pytest.approx(2 * held["rest"], rel=WITHIN)
