"""A habit of custom loops, the list of them, and the loops that most of them change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.own_models import VOCAB, Batch, mean_loss, rows
from tests.plain_model import PlainModel

COPIES, SHARDS, SPLIT = "replicate=2", "shard=2", "tp=2"
EVERY = (COPIES, SHARDS, SPLIT)
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
Losses = list[torch.Tensor]


@dataclass(frozen=True)
class Careless:
    """A habit."""

    name: str
    loop: Callable[[Any], Losses]
    refused: dict[str, str] = field(default_factory=dict)
    """Words of the refusal, by the first axis of a layout; equal to one device under the others."""


LOOPS: list[Careless] = []


def careless(refused: str = "", under: tuple[str, ...] = EVERY) -> Callable[[Any], Any]:
    """Lists a loop; ``refused`` are words of the error that it ends in ``under`` some layouts."""

    def listed(loop: Any) -> Any:
        LOOPS.append(Careless(loop.__name__, loop, dict.fromkeys(under, refused) if refused else {}))
        return loop

    return listed


def between(kind: Any, lr: float, own: bool = False, refused: str = "", under: tuple[str, ...] = EVERY, **options: Any):  # type: ignore[no-untyped-def]
    """Lists the usual loop, in which a function of module and optimizer is called between backward and step."""

    def listed(act: Callable[[Any, Any], Any]) -> Any:
        def loop(strategy: Any) -> Losses:
            module, optimizer = sharded(strategy, kind, lr, own, **options)
            return steps(strategy, module, optimizer, lambda: act(module, optimizer))

        loop.__name__ = act.__name__
        return careless(refused, under)(loop)

    return listed


def whole(value: Any) -> Any:
    """A DTensor's values, as users of FSDP2 know to ask for them."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def model() -> nn.Module:
    torch.manual_seed(0)
    return PlainModel(VOCAB, 12, 2).double()


def sharded(strategy: Any, kind: Any = AdamW, lr: float = 1e-2, own: bool = False, **options: Any) -> tuple[Any, Any]:
    """The model, sharded, and an optimizer of torch, or with ``own`` the strategy's."""
    module = strategy.shard(model())
    return module, strategy.optimizer(kind, lr=lr, **options) if own else kind(module.parameters(), lr=lr, **options)


def by_rank(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the vectors."""
    items = list(module.parameters())
    return [item for item in items if item.dim() > 1], [item for item in items if item.dim() < 2]


def shares(strategy: Any) -> list[Batch]:
    """This rank's rows of each batch."""
    index, count = strategy.reader
    return [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]


def updates(batches: list[Batch], loss_of: Callable[[Any, Any], Any], update: Callable[[], Any]) -> Losses:
    """A backward and an update for each batch; nothing clears a gradient."""
    losses = []
    for x, y in batches:
        loss = loss_of(x, y)
        loss.backward()
        update()
        losses.append(loss.detach())
    return losses


def steps(strategy: Any, module: Any, optimizer: Any, act: Callable[[], Any] = lambda: None) -> Losses:
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return mean_loss(module(x), y)

    return updates(shares(strategy), loss_of, lambda: (act(), optimizer.step()))


def trained(strategy: Any, module: Any) -> Losses:
    return steps(strategy, module, AdamW(module.parameters(), lr=1e-2))


def step_and_clear(optimizer: Any) -> Callable[[], Any]:
    return lambda: (optimizer.step(), optimizer.zero_grad())
