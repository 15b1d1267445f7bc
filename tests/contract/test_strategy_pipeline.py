"""The pipeline engine trains a model of one's own, convolutional ones too, as plain PyTorch does on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError, DataError, PlanError
from meshwright.strategy import PipelineEngine
from tests.own_models import (
    CLIP,
    Batch,
    convolutional,
    equal,
    flat_convolutional,
    gpt2,
    mean_loss,
    mixtral,
    plainly,
    rows,
    world,
)
from tests.ranks.group import run_ranks


def pipeline(
    _rank: int, text: str, make: Callable[[], nn.Module], batches: list[Batch], example: torch.Tensor | None
) -> tuple[list[float], list[float]]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    engine = PipelineEngine(make(), text, mean_loss, adam, example=example, clip=CLIP)
    index, count = engine.reader
    mine = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in batches]
    losses, norms = [], []
    for batch in mine[:2]:
        losses.append(engine.step(*batch))
        norms.append(float(engine.norm))
    held = engine.evaluate(mine[2:])
    x, y = mine[2]
    assert engine.evaluate([(x[:1], y[:1]), (x[1:], y[1:])]) == pytest.approx(held, rel=1e-9)
    assert engine.train_epoch(mine[2:]) == pytest.approx(held, rel=1e-9)
    return [*losses, held], [*norms, float(engine.norm)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (convolutional, "pp=4,microbatches=4"),
        (convolutional, "pp=2,replicate=2,microbatches=2,schedule=zbv"),
        (flat_convolutional, "pp=3,microbatches=2"),
        (gpt2, "pp=2,replicate=2,tp=2,microbatches=2"),
        (mixtral, "pp=1,shard=2,ep=2,microbatches=2"),
    ],
)
def test_a_pipeline_of_ones_own_model_equals_one_device(make: Callable[[], nn.Module], text: str) -> None:
    image = make in (convolutional, flat_convolutional)
    batches = rows(3, 16, 16) if image else rows()
    example = batches[0][0] if image else None
    found = run_ranks(world(text), pipeline, text, make, batches, example, timeout=250)
    equal(found, plainly(make, batches))


def pipeline_refusals(_rank: int) -> list[str]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    found = []
    (x, y), *_ = rows(3, 16, 16)
    engine = PipelineEngine(convolutional(), "pp=2", mean_loss, adam, microbatches=3, example=x)
    for act in (
        lambda: engine.step(x, y),
        lambda: engine.train_epoch([]),
        lambda: PipelineEngine(convolutional(), "pp=2,microbatches=2", mean_loss, adam, microbatches=3, example=x),
        lambda: PipelineEngine(convolutional(), "pp=2", mean_loss, adam).optimizer,
    ):
        try:
            act()
        except (DataError, PlanError, ConfigError) as error:
            found.append(str(error))
    return found


class Counting(nn.Module):
    """A layer that counts its calls, and computes with the count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
        return torch.tanh(self.linear(x)) * self.calls.clone()


def counting(_rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Counting(4)), nn.Sequential(Counting(4))).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    engine = PipelineEngine(model, "pp=2,microbatches=2", nn.functional.mse_loss, example=x)
    # As a checkpoint's values are loaded: in place.
    for module in engine.modules:
        for buffer in module.buffers():
            buffer.fill_(3)
    with pytest.raises(ConfigError, match=r"forward changes (the|a) buffer .*for each micro-batch"):
        engine.step(x, x)


def test_buffers_that_each_micro_batch_would_change_are_refused() -> None:
    run_ranks(2, counting)


def test_what_a_pipeline_refuses() -> None:
    for uneven, empty, twice, blind in run_ranks(2, pipeline_refusals):
        assert "nearest that works: 6 or 9 rows" in uneven
        assert "gave no batch" in empty
        assert "give one of them" in twice
        assert "example=" in blind
