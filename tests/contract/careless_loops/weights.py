"""Custom loops that read, copy, load, save, freeze or change weights outside of a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.contract.careless_loops.habit import (
    COPIES,
    LOOPS,
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
    whole,
)
from tests.own_models import VOCAB, mean_loss
from tests.plain_model import PlainModel


class ListedWeights(nn.Module):
    """Reads its weights from a list, or in a function that has them, where sharding doesn't find them."""

    def __init__(self, in_closure: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        weights = [self.up.weight, self.down.weight]
        self.products = (lambda: weights) if in_closure else weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.products() if callable(self.products) else self.products
        return x + functional.linear(torch.relu(functional.linear(x, up, self.up.bias)), down, self.down.bias)


def listed_weights(strategy: Any, in_closure: bool) -> Losses:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCAB, 16), ListedWeights(in_closure), nn.Linear(16, VOCAB, bias=False))
    return trained(strategy, strategy.shard(module))


@careless("'1.down.weight' is read as it was before shard()")
def weights_in_a_list(strategy: Any) -> Losses:
    return listed_weights(strategy, in_closure=False)


@careless("'1.down.weight' is read as it was before shard()")
def weights_in_a_closure(strategy: Any) -> Losses:
    return listed_weights(strategy, in_closure=True)


for _item in LOOPS[-2:]:  # the trial of a split finds them before a backward does
    _item.refused[SPLIT] = "from a list, a closure or another place than its module"


@careless("is read as it was before shard()")
def penalty_of_weights_from_before(strategy: Any) -> Losses:
    module = model()
    weights = list(module.parameters())
    module = strategy.shard(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_loss(module(x), y) + 0.01 * sum(weight.square().sum() for weight in weights)

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


@careless("a copy of a sharded model")
def average_of_weights(strategy: Any) -> Losses:
    module = strategy.shard(model())
    average = torch.optim.swa_utils.AveragedModel(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    losses = steps(strategy, module, optimizer, lambda: average.update_parameters(module))
    with torch.no_grad():
        return [*losses, *(mean_loss(average(x), y) for x, y in shares(strategy))]


@careless()
def average_of_weights_by_hand(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    averages = [item.detach().clone() for item in module.parameters()]

    def update() -> None:
        for average, item in zip(averages, module.parameters()):
            average.lerp_(item.detach(), 0.5)

    losses = steps(strategy, module, optimizer, update)
    with torch.no_grad():
        for average, item in zip(averages, module.parameters()):
            item.copy_(average)
        return [*losses, *(mean_loss(module(x), y) for x, y in shares(strategy))]


@careless("a copy of a sharded model")
def copy_that_is_trained(strategy: Any) -> Losses:
    return trained(strategy, copy.deepcopy(strategy.shard(model())))


@careless()
def weights_loaded_after_shard(strategy: Any) -> Losses:
    torch.manual_seed(3)
    other = PlainModel(VOCAB, 12, 2).double().state_dict()
    module = strategy.shard(model())
    module.load_state_dict(other)
    return trained(strategy, module)


@careless("state_dict() would give this rank's part", (SPLIT,))
def weights_saved_by_state_dict(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = steps(strategy, module, optimizer)
    return [*losses, *(whole(value).double().sum() for value in module.state_dict().values())]


@careless()
def frozen_before_shard(strategy: Any) -> Losses:
    module = model()
    module.blocks[0].requires_grad_(False)
    return trained(strategy, strategy.shard(module))


@careless()
def frozen_after_shard(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer)
    module.blocks[0].requires_grad_(False)
    return losses + steps(strategy, module, optimizer)


@careless("was frozen when the model was sharded")
def thawed_after_shard(strategy: Any) -> Losses:
    module = model()
    module.blocks[0].requires_grad_(False)
    module = strategy.shard(module)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    losses = steps(strategy, module, optimizer)
    module.blocks[0].requires_grad_(True)
    return losses + steps(strategy, module, optimizer)


@careless()
def penalty_on_weights(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        penalty = 0.05 * sum(item.square().sum() for item in module.parameters())
        (loss + whole(penalty)).backward()
        step_and_clear(optimizer)()
        losses.append(loss.detach())
    return losses


@careless("has a copy", (COPIES,))
def layer_drawn_anew_on_each_rank(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    with torch.no_grad():  # as on one device for the first rank alone
        module.scale.add_(0.1 * strategy.reader[0])
    return steps(strategy, module, optimizer)


UNCOMPARED = {("layer_drawn_anew_on_each_rank", SHARDS)}
"""A shard has no copy: its values are what the loop put there."""


@careless("is a weight of layer 'blocks.0' too", (SHARDS,))
def norm_of_two_layers(strategy: Any) -> Losses:
    module: Any = model()
    first, second = module.blocks
    (name,) = [key for key, child in first.named_children() if isinstance(child, nn.LayerNorm)][:1]
    setattr(second, name, getattr(first, name))
    return trained(strategy, strategy.shard(module))


@careless("max_norm=1")
def embedding_that_shortens_its_rows(strategy: Any) -> Losses:
    module: Any = model()
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.max_norm = 1.0
    return trained(strategy, strategy.shard(module))


@careless("scale_grad_by_freq=True", (COPIES, SHARDS))
def embedding_that_counts_its_rows(strategy: Any) -> Losses:
    module: Any = model()
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.scale_grad_by_freq = True
    return trained(strategy, strategy.shard(module))
