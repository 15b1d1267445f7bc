"""Gradients summed over copies in rounded numbers: copies stay equal to the bit, and near the exact sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import local_tensor
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import cases

ROWS, TOKENS, VOCAB = 8, 16, 64
LAYOUTS = {
    2: ["replicate=2", "replicate=2,microbatches=2", "cp=2", "replicate=2,precision=bf16,microbatches=2"],
    4: [
        "replicate=4", "replicate=4,compress=int8:2", "replicate=2,shard=2,zero=1,microbatches=2",
        "replicate=2,shard=2,zero=2,microbatches=2", "replicate=2,shard=2,zero=3", "replicate=2,tp=2,sequence=true",
        "replicate=2,tp=2", "replicate=2,pp=2,microbatches=4", "replicate=2,cp=2",
        "replicate=2,shard=2,zero=3,rows=3-2-2-1", "replicate=2,shard=2,zero=3,precision=fp16",
    ],
}  # fmt: skip
EXPERTS = ["replicate=2,shard=2,ep=2,zero=2", "replicate=2,cp=2,ep=2"]


def model(experts: bool) -> BuiltModel:
    mixture: dict[str, Any] = {"name": "mixtral", "experts": 4} if experts else {"name": "llama"}
    config = ModelConfig(layers=4, width=32, heads=4, kv_heads=2, ffn=64, tie=False, **mixture)
    return build_meta(config, vocab=VOCAB, context=TOKENS)


def gradients(layout: Layout, facts: ModelAnalysis, rank: int, experts: bool, steps: int = 2) -> dict[str, Any]:
    """Trains some steps; returns the last one's gradients, this rank's part by name, and what its collectives book."""
    program = build_rank(model(experts), layout, facts)
    stepper = Stepper(
        program,
        LocalAdamW(program.weights, OptimizerConfig()),
        LossScaler(layout.precision == "fp16"),
        clip=1.0,
        seed=0,
    )
    parts: dict[str, torch.Tensor] = {}

    def probe(factor: torch.Tensor) -> None:
        for weight in program.weights:
            assert weight.gradient is not None
            parts[weight.name] = weight.gradient.double() * factor

    stepper.probe = probe
    assert program.mesh is not None
    first, last = layout.span(rank, ROWS)
    for step, batch in enumerate(random_batches(steps, ROWS, TOKENS, VOCAB, documents=False)):
        pairs = zip(*(item[first:last].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
        micro = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
        program.mesh.log.drain()
        stepper.run(step, micro, int((batch.targets != -100).sum()), 1e-3, 0.0).read()
    weights = {weight.name: local_tensor(weight.parameter.detach()).clone() for weight in program.weights}
    whole_over_tp = [weight.name for weight in program.weights if "tp" not in weight.sharded_on]
    return {
        "gradients": parts,
        "weights": weights,
        "whole_over_tp": whole_over_tp,
        "comm": program.mesh.log.drain(),
    }


def relative_error(measured: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    off = sum(float((measured[name] - exact[name]).square().sum()) for name in exact)
    return (off / sum(float(exact[name].square().sum()) for name in exact)) ** 0.5


BOUNDS = {"bf16": 0.006, "fp16": 0.001, "int8": 0.03, "fp8": 0.1}
"""Relative error of a step's whole gradient: some roundings of each format's unit."""


@pytest.mark.parametrize(("world", "experts"), cases([(2, False), (4, False), (4, True)], (0,), extended=(2,)))
def test_copies_stay_equal_and_near_the_exact_sum(world: int, experts: bool) -> None:
    texts = EXPERTS if experts else LAYOUTS[world]
    # As a run analyses one layout after another: what doesn't depend on the layout is read once.
    known = ModelAnalysis(table=sharding_table(model(experts), 2), trial=try_forward(model(experts)))
    facts = {text: analyse_model(model(experts), Layout.parse(text), known) for text in texts}
    names = ["int8", "fp8", "bf16", "fp16"]

    def work(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        results = {}
        for number, text in enumerate(texts):
            plain = text.replace(",compress=int8:2", "")
            exact = gradients(Layout.parse(plain), facts[text], rank, experts, steps=1)["gradients"]
            # Every format with some layout, int8 with all of them.
            for name in {"int8", names[number % len(names)]}:
                given = text if text != plain else f"{text},compress={name}"
                results[given, name] = (
                    exact,
                    gradients(Layout.parse(given), facts[text], rank, experts, steps=1),
                    gradients(Layout.parse(given), facts[text], rank, experts, steps=1),
                )
        return results

    ranks = run_ranks(world, work, timeout=500)
    for given, name in ranks[0]:
        layout = Layout.parse(given)
        for rank in range(world):
            exact, first, again = ranks[rank][given, name]
            error = relative_error(first["gradients"], exact)
            assert 0 < error < BOUNDS[name], (given, rank, error)
            for key in ("gradients", "weights"):
                assert all(torch.equal(first[key][item], again[key][item]) for item in exact), (given, rank)
            booked = [total for total in first["comm"] if total.rounding_error]
            assert booked and all(total.bytes < total.raw_bytes for total in booked if name == "int8")
        for axis in ("replicate", "tp"):
            for rank, of in firsts_along(axis, layout).items():
                mine, theirs = ranks[rank][given, name][1], ranks[of][given, name][1]
                items = mine["weights"] if axis == "replicate" else mine["whole_over_tp"]
                for key in ("gradients", "weights"):
                    assert all(torch.equal(mine[key][item], theirs[key][item]) for item in items), (given, axis, rank)


def firsts_along(axis_name: str, layout: Layout) -> dict[int, int]:
    """Each rank to the one at index 0 along an axis that is like it along all others, by coordinates."""
    shape = list(layout.shape().items())
    firsts = {}
    for rank in range(layout.world):
        rest, other, stride = rank, rank, 1
        for axis, size in reversed(shape):
            rest, index = divmod(rest, size)
            other -= index * stride if axis == axis_name else 0
            stride *= size
        firsts[rank] = other
    return firsts
