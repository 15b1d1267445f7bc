"""Copies of weights that compute, beside masters: the same bits as FSDP2 on a group of one, and as a loop by hand."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.compute_copies import MasterGradients
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import StageModule
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.state import adopt_values, plain_values
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.slow

VOCAB, CONTEXT, ROWS, STEPS = 97, 16, 8, 3
MODELS = {
    "llama": {"layers": 2, "width": 48, "heads": 6, "kv_heads": 3, "ffn": 100},
    "gpt2": {"layers": 2, "width": 48, "heads": 6},  # head and embedding are one weight
}
ALONE = [
    "precision=bf16",
    "microbatches=2,precision=bf16",
    "precision=fp16,recompute=full",
    "precision=bf16,recompute=selective",
]
SPLIT = ["tp=2,precision=bf16", "replicate=2,precision=bf16", "replicate=2,microbatches=2,precision=bf16"]


def model(name: str) -> BuiltModel:
    return build_meta(ModelConfig(name=name, **MODELS[name]), vocab=VOCAB, context=CONTEXT)  # type: ignore[arg-type]


@functools.cache
def facts_of(name: str) -> ModelAnalysis:
    """Returns the model's table and its trial, read before ranks start."""
    return ModelAnalysis(table=sharding_table(model(name)), trial=try_forward(model(name)))


def program_of(name: str, layout: Layout) -> Program:
    built = model(name)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="")
    facts = analyse_model(built, layout, facts_of(name))
    return build_program(built, plan, torch.device("cpu"), facts)


def micro_batches(layout: Layout, step: int, rank: int) -> tuple[list[MicroBatch], int]:
    batch = random_batches(step + 1, ROWS, CONTEXT, VOCAB, documents=False)[step]
    index, count = layout.reader(rank)
    pairs = zip(*(item.chunk(count)[index].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
    return [MicroBatch(tokens, targets, None) for tokens, targets in pairs], int((batch.targets != -100).sum())


def trained(name: str, text: str, rank: int) -> dict[str, Any]:
    """Trains some steps, evaluates, halves the weights, evaluates again; returns what came of it."""
    layout = Layout.parse(text)
    program = program_of(name, layout)
    optimizer, scaler = LocalAdamW(program.weights, OptimizerConfig()), LossScaler(layout.precision == "fp16")
    # Without clipping no step depends on the norm, whose last digits do on the order of its sums.
    stepper = Stepper(program, optimizer, scaler, clip=0.0, seed=0)
    losses, norms, types = [], [], set()
    for step in range(STEPS):
        micro, targets = micro_batches(layout, step, rank)
        stepper.probe = lambda _: types.update(weight.gradient.dtype for weight in program.weights)
        outcome = stepper.run(step, micro, targets, 1e-2, False).read()
        losses.append(outcome["loss"])
        norms.append(outcome["grad_norm"])
    evaluated = program.evaluate(micro[0])
    # Weights that something else than an update changes, as a checkpoint does, compute at once.
    with torch.no_grad():
        for weight in program.weights:
            weight.local.mul_(0.5)
    adopt_values(plain_values(optimizer, scaler, 0), program, optimizer, scaler)
    halved = program.evaluate(micro[0])
    state = [*(weight.local.clone() for weight in program.weights), *optimizer.moments()]
    return {
        "losses": losses, "norms": norms, "types": types, "state": state, "evaluated": evaluated, "halved": halved,
        "parameters": [weakref.ref(parameter) for parameter in program.module.parameters()],
        "sharded": isinstance(program.module, FSDPModule), "held": program.state_meter.read(optimizer.bytes()),  # type: ignore[union-attr]
    }  # fmt: skip


def of_both(name: str, text: str, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with mock.patch.object(Layout, "has_compute_copies", property(lambda _: False)):
        sharded = trained(name, text, rank)
    own = trained(name, text, rank)
    gc.collect()
    # As where ranks are rebuilt: a program that is dropped leaves no weights behind, whatever hooks they have.
    parameters = [*own.pop("parameters"), *sharded.pop("parameters")]
    assert parameters and not [parameter for parameter in parameters if parameter() is not None]
    return own, sharded


HOST_MASTERS = ["precision=float32", "microbatches=2,precision=float32", "microbatches=3,precision=bf16",
                "precision=fp16,recompute=full", "precision=float64"]  # fmt: skip


def test_masters_in_host_memory_have_the_usual_bits() -> None:
    """Here host and device are the same processor: what differs from a GPU is when copies are made, not which.

    The usual way is FSDP2 on a group of one for bf16 and fp16, and the model as it is for the others.
    """
    for name in MODELS:
        facts_of(name)

    def work(rank: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        torch.set_num_threads(1)
        results = []
        for name, text in ((name, text) for name in MODELS for text in HOST_MASTERS):
            with mock.patch.object(Layout, "has_compute_copies", property(lambda _: False)):
                usual = trained(name, text, rank)
            with mock.patch.object(Layout, "has_host_masters", property(lambda _: True)):
                own = trained(name, text, rank)
            del own["parameters"], usual["parameters"]
            results.append((f"{name} {text}", own, usual))
        return results

    ((*results,),) = run_ranks(1, work, timeout=250)
    for case, own, usual in results:
        assert usual["sharded"] is ("16" in case) and not own["sharded"]
        for part in ("losses", "evaluated", "halved"):
            assert torch.equal(torch.as_tensor(own[part]), torch.as_tensor(usual[part])), (case, part)
        assert own["norms"] == pytest.approx(usual["norms"], rel=1e-6), case
        assert all(torch.equal(*pair) for pair in zip(own["state"], usual["state"], strict=True)), case
        # Whatever the type of compute, what is updated has the masters'.
        assert own["types"] == {torch.float64 if "float64" in case else torch.float32}, case


@pytest.mark.parametrize(("world", "texts"), further([(1, ALONE), (2, SPLIT)], (1,)))
def test_bits_are_those_of_fsdp2_on_a_group_of_one(world: int, texts: list[str]) -> None:
    for name in MODELS:
        facts_of(name)

    def work(rank: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        torch.set_num_threads(1)
        return [(f"{name} {text}", *of_both(name, text, rank)) for name in MODELS for text in texts]

    for results in run_ranks(world, work, timeout=250):
        for case, own, sharded in results:
            assert sharded["sharded"] and not own["sharded"]
            for part in ("losses", "evaluated", "halved"):
                assert torch.equal(torch.as_tensor(own[part]), torch.as_tensor(sharded[part])), (case, part)
            assert own["norms"] == pytest.approx(sharded["norms"], rel=1e-6), case
            assert own["losses"][0] != own["losses"][-1] and not torch.equal(own["evaluated"], own["halved"]), case
            assert len(own["state"]) == len(sharded["state"])
            assert all(torch.equal(*pair) for pair in zip(own["state"], sharded["state"])), case
            # What is summed, over micro-batches or ranks, is in float32, as under FSDP2.
            layout = Layout.parse(case.split()[1])
            narrow = torch.bfloat16 if "bf16" in case else torch.float16
            assert sharded["types"] == {torch.float32}
            is_sum = layout.microbatches > 1 or not layout.sums_no_gradients
            assert own["types"] == {torch.float32} if is_sum else narrow in own["types"], case
            assert own["held"]["parameters"] == sharded["held"]["parameters"], case
            assert own["held"]["optimizer"] == sharded["held"]["optimizer"], case


def test_which_layouts_keep_copies() -> None:
    kept = ("precision=bf16", "tp=2,precision=fp16", "islands=2,precision=bf16", "precision=fp8,microbatches=4",
            "offload=optimizer,precision=bf16", "replicate=2,precision=bf16", "cp=2,precision=bf16")  # fmt: skip
    gathered = ("shard=2,zero=1,precision=bf16", "replicate=2,precision=bf16,compress=int8", "precision=float32",
                "pp=2,microbatches=2,precision=bf16", "offload=parameters,precision=bf16", "tp=2")  # fmt: skip
    assert [Layout.parse(text).has_compute_copies for text in (*kept, *gathered)] == [True] * 7 + [False] * 6
    assert [Layout.parse(text).sums_no_gradients for text in kept] == [True] * 5 + [False] * 2


def test_a_program_that_is_dropped_leaves_no_weights() -> None:
    """A hook on a tensor is out of the garbage collector's sight: it must not hold what holds the tensor."""
    stage = StageModule(nn.Linear(4, 4), [])
    gradients = MasterGradients(stage, torch.bfloat16, False)
    gradients.make_compute_copies(torch.device("cpu"))
    gradients.begin_microbatch(is_last=True, no_gradients=True)
    stage.module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    compute = weakref.ref(stage.module.weight)
    assert next(iter(stage.masters.values())).grad is not None
    del stage, gradients
    gc.collect()
    assert compute() is None
