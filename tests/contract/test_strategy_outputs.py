"""Outputs, weights and frozen models that a custom loop has, and `train` has not, equal one device or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import logsigmoid

from meshwright.errors import ConfigError, DataError
from meshwright.strategy import HybridParallelStrategy
from tests.own_models import STEPS, VOCAB, mean_loss, plain_model, rows
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    name: str = "an answer"
    extras: dict[str, Any] = field(default_factory=dict)


class Answering(PlainModel):
    """Gives its logits in a dataclass."""

    def forward(self, tokens: torch.Tensor) -> Answer:  # type: ignore[override]
        logits = super().forward(tokens)
        return Answer(logits, extras={"doubled": 2 * logits})


def answering() -> nn.Module:
    torch.manual_seed(0)
    return Answering(VOCAB, 12, 2).double()


def answer_loss(answer: Answer, targets: torch.Tensor) -> torch.Tensor:
    return mean_loss(answer.logits + 0.1 * answer.extras["doubled"], targets)


def masked() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of which rows have unequal numbers of targets, and one none."""
    uncounted = torch.arange(64).view(8, 8) % 7 < torch.arange(8)[:, None]
    return [(x, y.masked_fill(uncounted, -100)) for x, y in rows()]


def answers(_rank: int, text: str) -> list[float]:
    strategy, model = HybridParallelStrategy(text), answering()
    strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=answer_loss, microbatches=4)
    return [strategy.step(batch) for batch in masked()]


@pytest.mark.parametrize("text", ["pp=2", "pp=2,schedule=zbv,split=0-1-1-0"])
def test_a_pipeline_takes_dataclasses_of_logits(text: str) -> None:
    model, wanted = answering(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in masked():
        optimizer.zero_grad()
        loss = answer_loss(model(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    for losses in run_ranks(2, answers, text):
        assert losses == pytest.approx(wanted, rel=1e-9)


class Rotated(PlainModel):
    """Multiplies the spectrum of its logits by a complex weight."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 12, 2)
        self.spectrum = nn.Parameter(torch.randn(VOCAB, dtype=torch.complex128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(super().forward(tokens)) * self.spectrum).real


def refused_weights(_rank: int) -> None:
    sparse = plain_model()
    next(child for child in sparse.modules() if isinstance(child, nn.Embedding)).sparse = True
    for text in ("replicate=2,compress=int8", "shard=2,zero=3"):
        with pytest.raises(ConfigError, match=r"'\w+' has sparse=True.* nearest that works: sparse=False"):
            HybridParallelStrategy(text).shard(sparse)
    for text in ("shard=2,zero=1", "shard=2,zero=3"):
        with pytest.raises(ConfigError, match=r"'spectrum' is complex .*zero=\d.* nearest that works: replicate"):
            HybridParallelStrategy(text).shard(Rotated().double())


def test_complex_weights_that_are_sharded_and_sparse_gradients_are_refused_by_name() -> None:
    run_ranks(2, refused_weights)


def preferences(shard: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Losses of a loop that compares the model with a frozen one."""
    model, reference = plain_model(), plain_model()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.9)
    model, reference = shard(model), shard(reference.requires_grad_(False)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def score(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return module(x).log_softmax(-1).gather(-1, y[..., None]).sum((1, 2))

    losses = []
    for x, y in rows():
        with torch.no_grad():
            base = score(reference, x, y) - score(reference, x, x)
        loss = -logsigmoid(0.1 * (score(model, x, y) - score(model, x, x) - base)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def preferences_on_ranks(_rank: int) -> list[float]:
    return preferences(lambda module: HybridParallelStrategy("tp=2").shard(module))


def test_a_frozen_model_beside_the_trained_one_is_split_too() -> None:
    for losses in run_ranks(2, preferences_on_ranks):
        assert losses == pytest.approx(preferences(lambda module: module), rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none"), "shape (64,)"),
        (lambda out, y: (mean_loss(out, y), out), "a tuple, and step() trains one real number"),
        (lambda out, y: mean_loss(out, y).detach(), "a number without a gradient; nearest that works: leave out .det"),
        (lambda out, y: out.argmax(dim=-1).sum(), "a tensor of torch.int64"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Callable[..., Any], words: str) -> None:
    def train(_rank: int) -> None:
        strategy, model = HybridParallelStrategy("pp=2"), plain_model()
        strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, microbatches=2)
        strategy.step(rows()[0])

    with pytest.raises(DataError, match=re.escape(words)):
        run_ranks(2, train)


def test_a_loss_of_one_element_trains_as_its_scalar() -> None:
    def train(_rank: int) -> list[float]:
        losses = []
        for loss in (mean_loss, lambda out, y: mean_loss(out, y).reshape(1, 1)):
            strategy, model = HybridParallelStrategy("pp=2"), plain_model()
            strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, microbatches=2)
            losses += [strategy.step(batch) for batch in rows()]
        return losses

    for losses in run_ranks(2, train):
        assert losses[:STEPS] == losses[STEPS:]
