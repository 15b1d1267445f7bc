"""What a tensor-parallel step sends: one sum forward and one backward for each group, however many matrices read it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.session import build_program
from tests.ranks.group import run_ranks

LAYERS = 2


def model() -> BuiltModel:
    return build_meta(ModelConfig(name="llama", layers=LAYERS, width=32, heads=4), 64, 16)


def adapted_model() -> BuiltModel:
    return build_meta(ModelConfig(name="tests.contract.test_adapters:adapted"), 64, 16)


def work(rank: int, layout: Layout, facts: ModelAnalysis, make: Callable[[], BuiltModel] = model) -> int:
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="")
    program = build_program(make(), plan, torch.device("cpu"), facts=facts)
    (batch,) = random_batches(1, 4, 16, 64, documents=False)
    assert program.mesh is not None
    program.mesh.log.drain()
    program.forward_backward([batch], 1.0, (0, 0))
    return sum(total.calls for total in program.mesh.log.drain() if total.axis == "tp" and total.op == "all_reduce")


def test_each_group_sums_once_each_way() -> None:
    layout = Layout.parse("tp=2")
    facts = analyse_model(model(), layout)
    # Two groups a layer, forward and backward; the embedding forward, the head backward, and the loss's two.
    assert run_ranks(2, work, layout, facts) == [4 * LAYERS + 4] * 2


def test_what_an_adapter_reads_enters_a_group_once_with_its_matrices() -> None:
    layout = Layout.parse("tp=2")
    facts = analyse_model(adapted_model(), layout)
    # Forward the sums of two rows and of their adapters' first halves. Backward what q, k and v read, what up reads,
    # and what the second halves of these four read.
    assert run_ranks(2, work, layout, facts, adapted_model) == [(4 + 6) * LAYERS + 4] * 2
