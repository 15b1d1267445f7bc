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
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks


def model() -> BuiltModel:
    return build_meta(ModelConfig(name="mixtral", layers=2, width=32, heads=4), 64, 16)


def work(rank: int, text: str, facts: ModelAnalysis) -> tuple[float, ...]:
    """Runs two steps and returns the experts' shares in the second: a pipeline tries a new shape out in the first."""
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
    return [stepper.run(step, micro, targets, 1e-3, False).experts for step in range(2)][1]


@pytest.mark.slow
def test_shares_are_those_of_one_rank() -> None:
    wanted: tuple[float, ...] = ()
    for text in ("replicate=1", "shard=2,ep=2,zero=1", "tp=2", "cp=2", "pp=2,microbatches=2"):
        facts = analyse_model(model(), Layout.parse(text))
        found = run_ranks(Layout.parse(text).world, work, text, facts)
        wanted = wanted or found[0]
        assert len(wanted) == 4 and sum(wanted) == pytest.approx(1.0) and max(wanted) > min(wanted)
        for shares in found:
            assert shares == pytest.approx(wanted, abs=1e-12), text
