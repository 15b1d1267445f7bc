"""Custom loops that accumulate gradients, count targets and clear gradients, each in its own order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from meshwright.strategy.one_device import OneDevice
from tests.contract.careless_loops.habit import (
    COPIES,
    SGD,
    SHARDS,
    AdamW,
    Losses,
    careless,
    sharded,
    shares,
    step_and_clear,
    steps,
    updates,
)
from tests.own_models import Batch, mean_loss, rows


def accumulated(strategy: Any, around: Callable[[int], Any], clip: float = 0.0) -> Losses:
    module, optimizer = sharded(strategy)
    losses = []
    for x, y in shares(strategy):
        total = torch.zeros((), dtype=torch.float64)
        for number, (part, wanted) in enumerate(zip(x.chunk(2), y.chunk(2))):
            with around(number):
                loss = mean_loss(module(part), wanted) / 2
                loss.backward()
                total += loss.detach()
                if clip:
                    clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@careless()
def accumulation_without_a_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda _: contextlib.nullcontext())


@careless()
def accumulation_in_its_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda number: strategy.accumulate() if number == 0 else contextlib.nullcontext())


@careless("leave it out of accumulate()")
def all_of_a_step_in_the_context(strategy: Any) -> Losses:
    return accumulated(strategy, lambda _: strategy.accumulate())


@careless("inside strategy.accumulate()")
def clipping_within_accumulation(strategy: Any) -> Losses:
    return accumulated(strategy, lambda number: strategy.accumulate() if number == 0 else contextlib.nullcontext(), 0.1)


def masked_shares(strategy: Any) -> list[Batch]:
    """This rank's rows, of which micro-batches and readers have unequal numbers of targets, and some none."""
    index, count = strategy.reader
    uncounted = torch.arange(8)[None, :] >= torch.tensor([0, 3, 0, 0, 7, 8, 5, 2])[:, None]
    return [(x.chunk(count)[index], y.masked_fill(uncounted, -100).chunk(count)[index]) for x, y in rows()]


def by_targets(strategy: Any, total_of: Callable[[Any, list[Any]], Any], within: bool) -> Losses:
    """Four micro-batches a step; on one device, if it is to be equal, one call on all rows."""
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for x, y in masked_shares(strategy):
        if isinstance(strategy, OneDevice):
            losses.append(mean_loss(module(x), y))
            losses[-1].backward()
        else:
            parts = list(zip(x.chunk(4), y.chunk(4)))
            total = total_of(strategy, [part for _, part in parts])
            terms = []
            for number, (part, wanted) in enumerate(parts):
                with strategy.accumulate() if within and number < 3 else contextlib.nullcontext():
                    terms.append(strategy.loss(module(part), wanted, total))
                    terms[-1].backward()
            losses.append(torch.stack(terms).sum())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@careless()
def targets_counted_over_a_step(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: strategy.count_targets(targets), within=True)


@careless()
def targets_counted_over_a_step_without_a_context(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: float(strategy.count_targets(torch.cat(targets))), False)


@careless("each was divided by its own")
def unequal_targets_of_each_micro_batch(strategy: Any) -> Losses:
    return by_targets(strategy, lambda *_: None, within=True)


@careless("each was divided by its own")
def unequal_targets_of_each_backward(strategy: Any) -> Losses:
    return by_targets(strategy, lambda *_: None, within=False)


@careless("total= says")
def targets_counted_in_one_micro_batch(strategy: Any) -> Losses:
    return by_targets(strategy, lambda strategy, targets: strategy.count_targets(targets[0]), within=True)


@careless("total= says", (COPIES, SHARDS))
def targets_counted_by_each_reader(strategy: Any) -> Losses:
    return by_targets(strategy, lambda _, targets: (torch.cat(targets) != -100).sum(), within=True)


@careless("one number")
def targets_counted_by_row(strategy: Any) -> Losses:
    return by_targets(strategy, lambda _, targets: (torch.cat(targets) != -100).sum(dim=1), within=True)


@careless()
def two_losses_of_a_micro_batch(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for x, y in masked_shares(strategy):
        first = y.clone()
        first[:, 1:] = -100
        logits = module(x)
        loss = strategy.loss(logits.clone(), y) + 0.5 * strategy.loss(logits, first)
        loss.backward()
        step_and_clear(optimizer)()
        losses.append(loss)
    return losses


@careless()
def other_targets_after_gradients_were_cleared(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = []
    for clear in (optimizer.zero_grad, lambda: module.zero_grad(set_to_none=False)):
        optimizer.zero_grad()
        first, *others = masked_shares(strategy)
        for x, y in others:
            with strategy.accumulate():
                strategy.loss(module(first[0]), first[1]).backward()
            clear()
            y[:, 1:3] = -100
            losses += updates([(x, y)], lambda x, y: strategy.loss(module(x), y), optimizer.step)
            clear()
    return losses


@careless()
def every_other_batch_steps(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    turns = iter(range(100))

    def update() -> None:
        if next(turns) % 2:
            step_and_clear(optimizer)()

    return updates(shares(strategy) * 2, lambda x, y: mean_loss(module(x), y) / 2, update)


@careless()
def zeros_instead_of_none(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, own=True)
    losses = steps(strategy, module, optimizer, lambda: optimizer.step() or optimizer.zero_grad(set_to_none=False))
    other = AdamW(module.parameters(), lr=1e-2)
    return losses + steps(strategy, module, other, lambda: other.step() or module.zero_grad(set_to_none=False))


@careless()
def zero_grad_between_forward_and_backward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(module(x), y)
        module.zero_grad()
        return loss

    return updates(shares(strategy), loss_of, optimizer.step)


@careless()
def zero_grad_forgotten(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy, SGD, 0.1)
    return updates(shares(strategy), lambda x, y: mean_loss(module(x), y), optimizer.step)


@careless()
def two_forwards_a_backward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_loss(module(x), y) + mean_loss(module(x.flip(1)), y.flip(1))

    return updates(shares(strategy), loss_of, step_and_clear(optimizer))


@careless()
def two_backwards_a_forward(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = []
    for x, y in shares(strategy):
        logits = module(x)
        first, second = mean_loss(logits[:, :4], y[:, :4]), mean_loss(logits[:, 4:], y[:, 4:])
        first.backward(retain_graph=True)
        second.backward()
        step_and_clear(optimizer)()
        losses += [first.detach(), second.detach()]
    return losses


@careless()
def accumulation_given_up(strategy: Any) -> Losses:
    module, optimizer = sharded(strategy)
    losses = steps(strategy, module, optimizer)
    for clear in (optimizer.zero_grad, lambda: module.zero_grad(set_to_none=False)):
        optimizer.zero_grad()
        x, y = shares(strategy)[0]
        with strategy.accumulate():
            mean_loss(module(x), y).backward()
        clear()
        losses += updates([(x, y)], lambda x, y: mean_loss(module(x), y), optimizer.step)
    return losses
