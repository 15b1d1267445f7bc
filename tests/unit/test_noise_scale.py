"""The gradient noise scale against per-row gradients, made by autograd one row at a time in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from meshwright.errors import ConfigError, PlanError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig, TrainConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.noise_scale import NoiseScale, check_noise_scale, small_batch
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks

ROWS, SEQUENCE, VOCAB = 16, 12, 32


def program_of(text: str) -> Any:
    model = build_meta(ModelConfig(name="gpt2", layers=2, width=32, heads=4), VOCAB, SEQUENCE)
    layout = Layout.parse(text)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=1, reason="")
    return build_program(model, plan, torch.device("cpu"), facts=analyse_model(model, layout))


def row_gradients(module: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """(rows, parameters) float64: of the mean loss of each row."""
    rows = []
    parameters = [item for item in module.parameters() if item.requires_grad]
    for row, target in zip(tokens, targets):
        loss = functional.cross_entropy(module(row[None]).logits[0], target)
        rows.append(torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, parameters)]).numpy())
    return np.stack(rows)


def count_call(module: torch.nn.Module, _: object) -> None:
    module.get_buffer("calls").add_(1)


def work(rank: int) -> dict[str, Any]:
    """Measures small batches of 16 rows in one and in four micro-batches, and the gradient of each of 48 rows."""
    draw = np.random.default_rng(5)
    tokens, targets = (torch.from_numpy(draw.integers(0, VOCAB, (48, SEQUENCE))) for _ in range(2))
    found: dict[str, Any] = {"norms": [], "losses": [], "calls": []}
    for count in (1, 4):
        program = program_of(f"microbatches={count},precision=float64")
        if count == 1:
            found["gradients"] = row_gradients(program.module, tokens, targets)
        # Counts its calls, as batch norm does: a buffer that forward changes.
        program.module.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        program.module.register_forward_pre_hook(count_call)
        program.moving_buffers = MovingBuffers([program.module], ["calls"])
        stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False), 0.0, 0)
        chunks = zip(tokens[:ROWS].chunk(count), targets[:ROWS].chunk(count))
        batches = [MicroBatch(*chunk, None) for chunk in chunks]
        part = stepper.part_norm(0, small_batch(batches, 0, ROWS), ROWS * SEQUENCE)
        calls = [int(program.module.calls)]
        values = stepper.run(0, batches, ROWS * SEQUENCE, 1e-3, 0.0).read()
        found["calls"].append([*calls, int(program.module.calls)])
        found["norms"].append((*part, values["grad_norm"]))
        found["losses"].append(values["loss"])
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return run_ranks(1, work)[0]


def test_norms_are_those_of_per_row_gradients(measured: dict[str, Any]) -> None:
    gradients = measured["gradients"][:ROWS]
    for small_norm, counted, norm in measured["norms"]:
        # Rows 0 and 8 of 16.
        assert counted == 2 * SEQUENCE
        assert small_norm == pytest.approx(np.linalg.norm(gradients[[0, 8]].mean(axis=0)), rel=1e-12)
        assert norm == pytest.approx(np.linalg.norm(gradients.mean(axis=0)), rel=1e-12)
    # A step is one call, in however many micro-batches, and a measurement none.
    assert measured["calls"] == [[0, 1], [0, 1]]
    assert measured["losses"][0] == pytest.approx(measured["losses"][1], rel=1e-12)


def test_the_estimates_are_unbiased(measured: dict[str, Any]) -> None:
    """Over batches drawn from per-row gradients, whose mean and variance are known, the means are these."""
    draw, gradients = np.random.default_rng(6), measured["gradients"]
    mean = gradients.mean(axis=0)
    signal = float(mean @ mean)
    variance = float(np.square(gradients - mean).sum(axis=1).mean())
    gram = gradients @ gradients.T
    found = []
    for _ in range(4000):
        rows = draw.integers(0, len(gradients), ROWS)  # as if the text were endless
        norms = [math.sqrt(gram[np.ix_(part, part)].sum()) / len(part) for part in (rows[::8], rows)]
        scalars = NoiseScale(1, ROWS).observe((norms[0], 2.0 * SEQUENCE), (norms[1], float(ROWS * SEQUENCE)))
        found.append((scalars["noise/signal"], scalars["noise/variance"]))
    values = np.array(found)
    errors = values.std(axis=0) / math.sqrt(len(values))
    for mean_found, error, wanted in zip(values.mean(axis=0), errors, (signal, variance)):
        assert abs(mean_found - wanted) < 4 * error and error < 0.1 * wanted


def test_means_are_divided_and_odd_steps_are_left_out() -> None:
    noise = NoiseScale(10, 16)
    assert [step for step in range(30) if noise.is_due(step)] == [9, 19, 29]
    assert not any(NoiseScale(0, 16).is_due(step) for step in range(30))
    assert noise.observe((math.inf, 2.0), (1.0, 16.0)) == {} == noise.observe((1.0, 0.0), (1.0, 16.0))
    # |G|^2 = 1 and S = 4: 1 + 4 / 2 with 2 rows, 1 + 4 / 16 with 16.
    scalars = noise.observe((math.sqrt(3.0), 2.0), (math.sqrt(1.25), 16.0))
    assert scalars == pytest.approx({"noise/signal": 1.0, "noise/variance": 4.0, "noise/scale_rows": 4.0})
    # |G|^2 = 3 and S = 0 beside it: the ratio of means is 2 / 2, not the mean of 4 and 0.
    assert noise.observe((math.sqrt(3.0), 2.0), (math.sqrt(3.0), 16.0))["noise/scale_rows"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("layout", "own_loss", "why"),
    [
        ("replicate=2,compress=topk:16", False, "take compress=int8 or none"),
        ("islands=2", False, "take replicate in place of islands"),
        ("shard=2", True, "terms that aren't of targets"),
    ],
)
def test_what_has_no_noise_scale_is_refused(layout: str, own_loss: bool, why: str) -> None:
    check_noise_scale(0, Layout.parse(layout), own_loss)
    # A planner passes over a layout, and no layout helps a model.
    with pytest.raises(ConfigError if own_loss else PlanError, match=why):
        check_noise_scale(10, Layout.parse(layout), own_loss)
    with pytest.raises(ConfigError, match="give 2 rows or more"):
        TrainConfig(noise_scale=5, batch=1).check()


def test_a_peak_follows_the_batch() -> None:
    assert OptimizerConfig(lr=1e-3).peak(512) == 1e-3
    assert OptimizerConfig(lr=1e-3, lr_batch=128).peak(512) == 2e-3
    assert OptimizerConfig(lr=1e-3, lr_batch=128, lr_rule="linear").peak(32) == 2.5e-4
    with pytest.raises(ConfigError, match="no effect without optimizer"):
        OptimizerConfig(lr_rule="linear").check()
