"""Custom loops over more than one model, and over what lies beside the model: equal to one device, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.strategy import HybridParallelStrategy
from meshwright.strategy.one_device import OneDevice
from tests.contract.careless_loops.habit import Losses, model, shares
from tests.own_models import VOCAB, mean_loss
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks
from tests.tiers import further

AdamW = torch.optim.AdamW
BESIDE = "a parameter that an optimizer has beside the sharded model's"


def another(strategy: Any) -> Any:
    """A strategy of the same layout for a second model."""
    return OneDevice() if isinstance(strategy, OneDevice) else HybridParallelStrategy(str(strategy.layout))


def distance(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (logits.softmax(-1) - wanted.softmax(-1)).square().mean()


def updated(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def two_towers(strategy: Any) -> Losses:
    first, second = strategy.shard(model()), another(strategy).shard(model())
    optimizer = AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    return [
        updated(distance(first(x), second(y)) + mean_loss(first(x), y), optimizer)
        for _ in range(3)
        for x, y in shares(strategy)
    ]


def moving_teacher(strategy: Any) -> Losses:
    student = model()
    teacher = another(strategy).shard(copy.deepcopy(student).requires_grad_(False))
    student = strategy.shard(student)
    optimizer, losses = AdamW(student.parameters(), lr=1e-2), []
    for x, y in shares(strategy):
        with torch.no_grad():
            wanted = teacher(x)
        logits = student(x)
        losses.append(updated(mean_loss(logits, y) + distance(logits, wanted), optimizer))
        with torch.no_grad():
            for item, other in zip(teacher.parameters(), student.parameters()):
                item.lerp_(other, 0.1)
    return losses


def temperature_beside(strategy: Any) -> Losses:
    module, temperature = strategy.shard(model()), nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = AdamW([*module.parameters(), temperature], lr=1e-2)
    return [updated(mean_loss(module(x) * temperature.exp(), y), optimizer) for x, y in shares(strategy)]


def head_beside(strategy: Any) -> Losses:
    module, head = strategy.shard(model()), nn.Linear(VOCAB, VOCAB).double()
    optimizers = AdamW(module.parameters(), lr=1e-2), AdamW(head.parameters(), lr=1e-2)
    return [updated(mean_loss(head(module(x)), y), *optimizers) for x, y in shares(strategy)]


class WithEmbedded(PlainModel):
    """Returns what it embeds beside its logits."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 12, 2)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = embedded = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x), embedded


def gradient_penalty(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(WithEmbedded().double())
    optimizer, losses = AdamW(module.parameters(), lr=1e-2), []
    for x, y in shares(strategy):
        logits, embedded = module(x)
        loss = mean_loss(logits, y)
        (slope,) = torch.autograd.grad(loss * len(x), embedded, create_graph=True)
        losses.append(updated(loss + slope.square().sum((1, 2)).mean(), optimizer))
    return losses


def substituted_weights(strategy: Any) -> Losses:
    module = strategy.shard(model())
    optimizer, losses = AdamW(module.parameters(), lr=1e-2), []
    for x, y in shares(strategy):
        weights = {name: item * 1.01 for name, item in module.named_parameters()}
        losses.append(updated(mean_loss(torch.func.functional_call(module, weights, (x,)), y), optimizer))
    return losses


def noise_on_gradients(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(model())
    optimizer, losses = AdamW(module.parameters(), lr=1e-2), []
    torch.manual_seed(1)
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        loss.backward()
        for item in module.parameters():
            item.grad.add_(0.01 * torch.randn_like(item.grad))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


LOOPS = (
    two_towers,
    moving_teacher,
    temperature_beside,
    head_beside,
    gradient_penalty,
    substituted_weights,
    noise_on_gradients,
)
READERS = {"temperature_beside": BESIDE, "head_beside": BESIDE}
REFUSED = {
    "replicate=2": READERS,
    "shard=2,zero=2": READERS
    | {
        "gradient_penalty": "a backward with create_graph=True",
        "substituted_weights": "as by torch.func.functional_call",
        "noise_on_gradients": "would draw the part's numbers alone",
    },
}


def on_ranks(_rank: int, text: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for loop in LOOPS:
        strategy = HybridParallelStrategy(text)
        try:
            outcome[loop.__name__] = [strategy.mean(loss) for loss in loop(strategy)]
        except ConfigError as error:
            outcome[loop.__name__] = str(error)
    return outcome


@pytest.mark.parametrize("text", further(["replicate=2", "shard=2,zero=2"], (0, 1)))
def test_loops_equal_one_device_or_are_refused(text: str) -> None:
    for outcome in run_ranks(2, on_ranks, text, timeout=100):
        for loop in LOOPS:
            words, found = REFUSED[text].get(loop.__name__), outcome[loop.__name__]
            if words:
                assert words in found, (loop.__name__, found)
            else:
                wanted = [float(loss) for loss in loop(OneDevice())]
                assert found == pytest.approx(wanted, rel=1e-9), loop.__name__


def data_replaced(strategy: Any) -> Losses:
    module = strategy.shard(model())
    optimizer, losses = strategy.optimizer(torch.optim.SGD, lr=0.1), []
    for x, y in shares(strategy):
        losses.append(updated(mean_loss(module(x), y), optimizer))
        for item in module.parameters():
            item.data = item.data * 0.99
    return losses


def replacing(_rank: int) -> list[float]:
    strategy = HybridParallelStrategy("replicate=2")
    return [strategy.mean(loss) for loss in data_replaced(strategy)]


def test_data_that_a_loop_replaces_is_what_the_optimizer_steps_on() -> None:
    wanted = [float(loss) for loss in data_replaced(OneDevice())]
    for losses in run_ranks(2, replacing):
        assert losses == pytest.approx(wanted, rel=1e-9)
