"""Custom loops that call the model, or parts of it, in unusual ways and on unusual rows."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.contract.careless_loops.habit import (
    COPIES,
    SGD,
    SHARDS,
    SPLIT,
    AdamW,
    Losses,
    careless,
    model,
    sharded,
    shares,
    step_and_clear,
    steps,
    trained,
    updates,
)
from tests.own_models import VOCAB, mean_loss, rows
from tests.plain_model import PlainModel


def compiled(strategy: Any, module: Any, optimizer: Any) -> Losses:
    with warnings.catch_warnings():  # Dynamo warns of what it traces: autograd functions, .grad of what is no leaf
        warnings.simplefilter("ignore")
        return steps(strategy, torch.compile(module, backend="eager"), optimizer)


@careless()
def compiled_model(strategy: Any) -> Losses:
    return compiled(strategy, *sharded(strategy))


@careless()
def compiled_model_in_float32(strategy: Any) -> Losses:
    module = strategy.shard(model().float())
    return compiled(strategy, module, SGD(module.parameters(), lr=1e-2))


@careless()
def output_changed_in_place(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, lambda x: module(x).div_(2.0), optimizer)


@careless()
def evaluation_between_steps(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    held_out = []

    def evaluate() -> None:
        module.eval()
        with torch.no_grad():
            held_out.extend(mean_loss(module(x), y) for x, y in shares(strategy)[:1])
        module.train()

    losses = steps(strategy, module, optimizer, evaluate)
    evaluate()
    return losses + held_out


@careless()
def forward_that_is_thrown_away(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, module, optimizer, lambda: module(shares(strategy)[0][0]))


@careless("mixed torch.Tensor and DTensor", (SHARDS,))
def submodule_called_alone(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        try:
            return module.embedding(x).square().mean()
        except RuntimeError as error:  # torch's own sentence
            raise SystemError(str(error)) from error

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = PlainModel(VOCAB, 12, 2), nn.Linear(VOCAB, 5), nn.Linear(VOCAB, 5)

    def forward(self, tokens: torch.Tensor, second: bool = False) -> torch.Tensor:
        found = (self.second if second else self.first)(self.body(tokens))
        return functional.pad(found, (0, VOCAB - 5))


@careless()
def heads_in_turn(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(TwoHeads().double())
    optimizer = AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    turns = iter(range(100))
    return updates(
        shares(strategy), lambda x, y: mean_loss(module(x, next(turns) % 2 == 1), y), step_and_clear(optimizer)
    )


class SomeTokens(nn.Module):
    """Calls a linear for the tokens it is for, where there are any, as experts in a list are called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.experts = PlainModel(VOCAB, 12, 2), nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.body(tokens)
        for number, expert in enumerate(self.experts):
            chosen = tokens == 3 * number
            if chosen.any():
                logits = logits.index_put((chosen,), logits[chosen] + expert(logits[chosen]))
        return logits


@careless()
def experts_that_a_rank_has_no_tokens_for(strategy: Any) -> Losses:
    torch.manual_seed(0)
    module = strategy.shard(SomeTokens().double())
    optimizer = AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


@careless()
def checkpoint_around_the_model(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return steps(strategy, lambda x: checkpoint(module, x, use_reentrant=False), optimizer)


@careless("called on other rows", (SPLIT,))
def rows_by_global_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    alone = isinstance(strategy.reader, tuple) and not torch.distributed.is_initialized()
    index, count = (0, 1) if alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    batches = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]
    return updates(batches, lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


@careless()
def same_rows_on_every_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    return updates(rows(), lambda x, y: mean_loss(module(x), y), step_and_clear(optimizer))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = PlainModel(VOCAB, 12, 2), nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(tokens))


@careless("BatchNorm", (COPIES, SHARDS))
def batch_norm(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Normed().double()))


class Averaging(PlainModel):
    """Keeps an average of what it saw, and a count, and uses both."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__(VOCAB, 12, 2)
        self.of_rows = of_rows
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens) * (1 + self.average)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(logits.abs().mean() if self.of_rows else 0.1)
        return logits


@careless("the buffer 'average'", (COPIES, SHARDS))
def average_of_rows(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Averaging(of_rows=True).double()))


@careless()
def average_of_steps(strategy: Any) -> Losses:
    torch.manual_seed(0)
    return trained(strategy, strategy.shard(Averaging(of_rows=False).double()))
