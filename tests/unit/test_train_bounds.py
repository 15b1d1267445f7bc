"""No gradients that AdamW may meet lead beyond the bounds of a state, and damage does."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from meshwright.train.bounds import StateBounds
from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import LocalAdamW


def gradients(kind: str, step: int, size: int) -> torch.Tensor:
    """Returns gradients that move weights far: all of one sign, spikes after silence, noise over eight decades."""
    draw = torch.Generator().manual_seed(step)
    if kind == "constant":
        return torch.full((size,), 0.3)
    if kind == "spikes":
        return torch.full((size,), 5.0 if step % 17 == 0 else 1e-12)
    return torch.randn(size, generator=draw) * 10.0 ** float(torch.rand((), generator=draw) * 8 - 4)


def run(config: OptimizerConfig, kind: str, steps: int = 60) -> tuple[SimpleNamespace, LocalAdamW, StateBounds]:
    """Trains two tensors; fails when their bounds are broken on the way."""
    weights = [
        SimpleNamespace(
            name=name, local=torch.randn(size), shape=(size,), gradient=None, compute=None, widen_gradient=lambda: None
        )
        for name, size in (("one", 7), ("two", 64))
    ]
    optimizer = LocalAdamW(weights, config)  # type: ignore[arg-type]
    bounds = StateBounds(SimpleNamespace(weights=weights, frozen=[]), optimizer)  # type: ignore[arg-type]
    bounds.start()
    for step in range(steps):
        whole = gradients(kind, step, 71)
        weights[0].gradient, weights[1].gradient = whole[:7].clone(), whole[7:].clone()
        norm = float(whole.norm())
        clip = min(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
        optimizer.step(config.lr, torch.tensor(clip, dtype=torch.float64))
        bounds.updated(norm, config.lr)
        if step % 3 == 0:
            assert bounds.broken() is None, step
    return SimpleNamespace(weights=weights), optimizer, bounds


@pytest.mark.parametrize("kind", ["constant", "spikes", "noise"])
@pytest.mark.parametrize(
    ("beta1", "beta2", "clip"), [(0.9, 0.95, 1.0), (0.9, 0.999, 0.0), (0.0, 0.5, 1.0), (0.99, 0.9, 0.0)]
)
def test_what_trains_stays_within(kind: str, beta1: float, beta2: float, clip: float) -> None:
    _, _, bounds = run(OptimizerConfig(lr=0.1, beta1=beta1, beta2=beta2, clip=clip), kind)
    assert bounds.broken() is None


def test_a_learning_rate_that_makes_decay_grow_weights_is_no_damage() -> None:
    """Decay takes 30 times a weight from it, which leaves more than there was; its sign changes with each update."""
    _, _, bounds = run(OptimizerConfig(lr=300.0, decay="all"), "noise", steps=12)
    assert bounds.broken() is None


Damage = Callable[[SimpleNamespace, LocalAdamW], None]
DAMAGES: dict[str, Damage] = {
    "weights/two": lambda program, optimizer: program.weights[1].local[5:6].mul_(2.0**20),
    "weights/one": lambda program, optimizer: program.weights[0].local[0:1].fill_(math.nan),
    "exp_avg holds": lambda program, optimizer: optimizer.moments()[2][3:4].fill_(2.0),
    "exp_avg_sq holds inf": lambda program, optimizer: optimizer.moments()[1][0:1].fill_(math.inf),
    "exp_avg_sq holds -": lambda program, optimizer: optimizer.moments()[3][9:10].mul_(-1.0),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str) -> None:
    program, optimizer, bounds = run(OptimizerConfig(lr=1e-3), "noise")
    assert bounds.broken() is None
    DAMAGES[name](program, optimizer)
    assert str(bounds.broken()).startswith(name)
