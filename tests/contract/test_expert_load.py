"""The load of experts in a step's record: the router's own choices, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.noise_scale import small_batch
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks


def model() -> BuiltModel:
    return build_meta(ModelConfig(name="mixtral", layers=2, width=32, heads=4), 64, 16)


def work(rank: int, text: str, facts: ModelAnalysis) -> tuple[tuple[float, ...], list[float]]:
    """Runs two steps and returns the experts' shares in the second: a pipeline tries a new shape out in the first.

    Before the second it measures the small batch of the noise scale, whose norm and targets it returns too, with the
    loss and norm of the second.
    """
    layout = Layout.parse(f"precision=float64,{text}")
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="")
    program = build_program(model(), plan, torch.device("cpu"), facts=facts)
    index, count = layout.reader(rank)
    stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False), 1.0, 0)
    (batch,) = random_batches(1, 4, 16, 64, documents=False)
    rows = slice(index * 4 // count, (index + 1) * 4 // count)
    chunks: Any = zip(batch.tokens[rows].chunk(layout.microbatches), batch.targets[rows].chunk(layout.microbatches))
    micro = [MicroBatch(tokens, targets, None) for tokens, targets in chunks]
    targets = int((batch.targets != -100).sum())
    stepper.run(0, micro, targets, 1e-3, False)
    small = small_batch(micro, program.first_row(len(batch.tokens[rows])), 4)
    part = stepper.part_norm(1, small, targets)
    outcome = stepper.run(1, micro, targets, 1e-3, False)
    values = outcome.read()
    return outcome.experts, [*part, values["loss"], values["grad_norm"]]


@pytest.mark.slow
def test_shares_are_those_of_one_rank() -> None:
    wanted: tuple[float, ...] = ()
    norms: list[float] = []
    for text in ("replicate=1", "shard=2,ep=2,zero=1", "tp=2", "cp=2", "pp=2,microbatches=2"):
        facts = analyse_model(model(), Layout.parse(text))
        found = run_ranks(Layout.parse(text).world, work, text, facts)
        wanted, norms = wanted or found[0][0], norms or found[0][1]
        assert len(wanted) == 4 and sum(wanted) == pytest.approx(1.0) and max(wanted) > min(wanted)
        for shares, own_norms in found:
            assert shares == pytest.approx(wanted, abs=1e-12), text
            assert own_norms == pytest.approx(norms, rel=1e-9), text
