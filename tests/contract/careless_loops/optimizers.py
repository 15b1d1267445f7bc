"""Custom loops that make, hand in or step their optimizers in ways of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.careless_loops.habit import (
    SGD,
    SHARDS,
    SPLIT,
    AdamW,
    Losses,
    between,
    by_rank,
    careless,
    model,
    sharded,
    shares,
    steps,
    trained,
    updates,
)
from tests.own_models import mean_loss, rows


@careless("made before shard(model)")
def optimizer_before_shard(strategy: Any) -> Losses:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2)
    return steps(strategy, strategy.shard(module), optimizer)


@careless()
def optimizer_handed_in(strategy: Any) -> Losses:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    module, optimizer = strategy.shard(module, optimizer)
    return steps(strategy, module, optimizer, lambda: optimizer.step() or scheduler.step() or optimizer.zero_grad())


@careless()
def trained_optimizer_handed_in(strategy: Any) -> Losses:
    module = model()
    decayed, others = by_rank(module)
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)
    x, y = rows()[0]
    mean_loss(module(x), y).backward()
    optimizer.step()
    return steps(strategy, *strategy.shard(module, optimizer))


@between(AdamW, 1e-2)
def torch_optimizer_after_shard(_module: Any, _optimizer: Any) -> None:
    pass


@careless()
def schedulers(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    return steps(strategy, module, optimizer, lambda: optimizer.step() or scheduler.step() or optimizer.zero_grad())


@careless()
def optimizer_made_after_a_forward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    module(shares(strategy)[0][0])
    return trained(strategy, module)


@careless("state is of this rank's parts", (SHARDS, SPLIT))
def optimizer_saved_by_state_dict(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer)
    return [*losses, *(item["exp_avg"].sum() for item in optimizer.state_dict()["state"].values())]


@careless("a hook was registered on")
def optimizer_within_backward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    optimizers = {item: AdamW([item], lr=1e-2) for item in module.parameters()}
    for item in module.parameters():
        item.register_post_accumulate_grad_hook(lambda item: optimizers[item].step())
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), lambda: None)


@careless()
def groups_by_name(strategy: Any) -> Losses:
    module = strategy.shard(model())
    named = dict(module.named_parameters())
    decayed = [item for name, item in named.items() if "norm" not in name]
    others = [item for name, item in named.items() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    return steps(strategy, module, strategy.optimizer(AdamW, groups, lr=1e-2))


def by_closure(strategy: Any, module: Any, optimizer: Any) -> Losses:
    losses = []
    for x, y in shares(strategy):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(module(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses


@careless("LBFGS decides by the loss")
def lbfgs(strategy: Any) -> Losses:
    return by_closure(strategy, *sharded(strategy, torch.optim.LBFGS, 0.1, max_iter=3))


@careless("step() takes no closure", (SHARDS, SPLIT))
def closures(strategy: Any) -> Losses:
    return by_closure(strategy, *sharded(strategy))


@careless("doesn't work element by element", (SHARDS, SPLIT))
def adafactor(strategy: Any) -> Losses:
    module = strategy.shard(model())
    return steps(strategy, module, strategy.optimizer(torch.optim.Adafactor, by_rank(module)[0], lr=1e-2))


@between(AdamW, 1e-2, own=True, fused=True)
def fused_optimizer(_module: Any, _optimizer: Any) -> None:
    pass


@between(AdamW, 1e-2, foreach=True)
def foreach_optimizer(_module: Any, _optimizer: Any) -> None:
    pass


@careless()
def update_by_hand(strategy: Any) -> Losses:
    module = strategy.shard(model())

    @torch.no_grad()
    def update() -> None:
        for item in module.parameters():
            item.sub_(item.grad, alpha=0.1)
        module.zero_grad()

    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), update)


@careless("call strategy.optimizer after shard()")
def function_and_optimizer(strategy: Any) -> Losses:
    return steps(strategy, *strategy.shard(model, AdamW(model().parameters(), lr=1e-2)))


@careless("isn't one of the sharded model")
def parameters_listed_before_shard(strategy: Any) -> Losses:
    module = model()
    listed = list(module.parameters())
    module = strategy.shard(module)
    return steps(strategy, module, strategy.optimizer(AdamW, listed, lr=1e-2))


@careless()
def two_optimizers(strategy: Any) -> Losses:
    module = strategy.shard(model())
    matrices, vectors = by_rank(module)
    first, second = strategy.optimizer(AdamW, matrices, lr=1e-2), SGD(vectors, lr=0.1)
    return steps(strategy, module, first, lambda: second.step() or second.zero_grad())
