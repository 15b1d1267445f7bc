"""Custom loops that clip, change, scale, hook or compute gradients by themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.contract.careless_loops.habit import (
    COPIES,
    LOOPS,
    SGD,
    SHARDS,
    SPLIT,
    Losses,
    between,
    careless,
    model,
    sharded,
    shares,
    steps,
    trained,
    whole,
)
from tests.own_models import VOCAB, mean_loss


@between(SGD, 0.5, momentum=0.9)
def torch_clipping(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5, own=True)
def torch_clipping_of_a_strategy_optimizer(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5, own=True)
def torch_clipping_of_groups(_module: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        clip_grad_norm_(group["params"], 0.1)


@between(SGD, 0.5)
def clipping_by_other_norms(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5, norm_type=1.0)
    clip_grad_norm_(module.parameters(), 0.01, norm_type=float("inf"), foreach=False)


@between(SGD, 0.5)
def clipping_of_values(module: Any, _optimizer: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)


@between(SGD, 0.5)
def clipping_by_hand(module: Any, _optimizer: Any) -> None:
    grads = [item.grad for item in module.parameters()]
    total = sum(float(grad.norm()) ** 2 for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, 0.1 / total))


@between(SGD, 0.5)
def clipping_twice(module: Any, _optimizer: Any) -> None:
    clip_grad_norm_(module.parameters(), 0.5)
    for item in module.parameters():
        item.grad.mul_(3.0)
    clip_grad_norm_(module.parameters(), 0.1)


@between(SGD, 0.5)
def rows_of_gradients_written(module: Any, _optimizer: Any) -> None:
    block = module.blocks[0]
    module.embedding.weight.grad[:20] = 0.0
    block.out.weight.grad[[1, 7]] = torch.arange(12.0).double() / 100
    block.down.weight.grad[:, 3:9] = 0.01
    block.up.bias.grad[-3:] = 0.02


@between(SGD, 0.5)
def masked_gradients(module: Any, _optimizer: Any) -> None:
    block, new_words = module.blocks[0], torch.arange(VOCAB)[:, None] >= 20
    module.embedding.weight.grad.mul_(new_words)
    block.out.weight.grad.mul_(torch.arange(12.0).double())
    block.down.weight.grad.masked_fill_(torch.ones(12, 25).triu() > 0, 0.01)
    block.up.weight.grad = torch.where(
        torch.arange(25)[:, None] < 9, torch.zeros((), dtype=torch.float64), block.up.weight.grad
    )


@between(SGD, 0.5, refused="would be one of the part", under=(SHARDS, SPLIT))
def rows_of_a_gradient_cleared(module: Any, _optimizer: Any) -> None:
    module.embedding.weight.grad[:20].zero_()


@between(SGD, 0.5, refused="part", under=(SPLIT,))
def sum_of_a_gradient_as_a_number(module: Any, _optimizer: Any) -> None:
    for item in module.parameters():
        item.grad.div_(1.0 + float((item.grad * item.grad).sum()) + item.grad.abs().max().item())


@between(SGD, 0.5, refused="part", under=(SPLIT,))
def largest_gradient_by_hand(module: Any, _optimizer: Any) -> None:
    for item in module.parameters():
        item.grad.div_(float(whole(item.grad.abs().max())))


@careless()
def grad_scaler(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for number, (x, y) in enumerate(shares(strategy) * 2):
        loss = mean_loss(module(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number == 1:  # not a number in one element, which one rank alone may hold
            next(module.parameters()).grad.mul_(float("nan"))
        scaler.unscale_(optimizer)
        clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale(), dtype=torch.float64)]
    return losses


@careless()
def grad_scaler_over_a_strategy_optimizer(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1, own=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@careless("a hook was registered on")
def hook_on_a_gradient(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    for item in module.parameters():
        item.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return steps(strategy, module, optimizer)


@careless("a hook was registered on")
def hook_on_a_gradient_before_shard(strategy: Any) -> Losses:
    module = model()
    for item in module.parameters():
        item.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return trained(strategy, strategy.shard(module))


@careless("not have been used in the graph", (SHARDS,))
def gradients_by_autograd_grad(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    losses = []
    for x, y in shares(strategy):
        loss = mean_loss(module(x), y)
        try:
            grads = torch.autograd.grad(loss, list(module.parameters()))
        except RuntimeError as error:  # torch's own sentence
            raise SystemError(str(error)) from error
        for item, grad in zip(module.parameters(), grads):
            item.grad = grad
        optimizer.step()
        losses.append(loss.detach())
    return losses


LOOPS[-1].refused.update({COPIES: "torch.autograd.grad gives this rank's", SPLIT: "torch.autograd.grad gives this"})


@careless("a backward ended in an error", (SHARDS,))
def error_in_a_backward(strategy: Any) -> Losses:
    module = strategy.shard(model())
    x, y = shares(strategy)[0]
    logits = module(x)
    logits.register_hook(lambda _: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        mean_loss(logits, y).backward()
    module.zero_grad()
    return trained(strategy, module)
