"""Readers that draw micro-batches from a queue train what plain PyTorch trains on one device, in float64."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.spec.layout import Layout
from meshwright.strategy import DynamicTaskScheduler, HybridParallelStrategy
from tests.own_models import mean_loss, output, plain_model, rows
from tests.ranks.group import run_ranks
from tests.tiers import cases

TASKS = 8


def one_device(_rank: int) -> tuple[list[float], list[float]]:
    """Returns losses and gradient norms of three steps of plain PyTorch."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for x, y in rows():
        loss = mean_loss(output(model, x), y)
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def drawn(_rank: int, layout: str, average: bool = True) -> tuple[list[float], list[float], list[list[int]], list[int]]:
    """Returns a reader's terms of the losses, the norms, its tasks of each step, and the statistics' counts."""
    strategy = HybridParallelStrategy(layout, average=average)
    model = strategy.shard(plain_model())
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-2)
    # One of an epoch before, whose last step's queue nobody empties.
    for task in DynamicTaskScheduler(strategy, timeout_s=100).tasks(3):
        with task:
            mean_loss(output(model, rows()[0][0]), rows()[0][1]).backward()
    optimizer.zero_grad()
    scheduler = DynamicTaskScheduler(strategy, timeout_s=100)
    losses, norms, steps = [], [], []
    for x, y in rows():
        indices, total = [], 0.0
        for task in scheduler.tasks(TASKS):
            with task:
                part = slice(task.index, task.index + 1)
                loss = mean_loss(output(model, x[part]), y[part])
                # Reader 1 is slow: it must not get half of them.
                time.sleep(0.2 if strategy.reader[0] == 1 else 0.0)
                (loss * task.weight).backward()
            indices.append(task.index)
            total += float(loss.detach()) / TASKS
        norms.append(float(strategy.grad_norm()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        steps.append(indices)
    return losses, norms, steps, [item.tasks for item in scheduler.statistics()]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    cases([("replicate=2", 2), ("shard=2,zero=1", 2), ("replicate=2,tp=2", 4)], (0,), extended=(1,)),
)
def test_who_draws_which_makes_no_difference(layout: str, ranks: int) -> None:
    ((losses, norms),) = run_ranks(1, one_device)
    results = run_ranks(ranks, drawn, layout)
    readers = [results[0], results[-1]]
    for step, loss in enumerate(losses):
        indices = [index for _, _, steps, _ in readers for index in steps[step]]
        assert sorted(indices) == list(range(TASKS)), indices
        # A later step's loss shows the updates of those before.
        assert sum(terms[step] for terms, _, _, _ in readers) == pytest.approx(loss, rel=1e-11)
    assert all(row[1] == pytest.approx(norms, rel=1e-11) for row in results)
    # All ranks of a reader ran the same; the slow reader ran fewer.
    assert ranks == 2 or (results[0][2] == results[1][2] and results[2][2] == results[3][2])
    counts = results[0][3]
    assert sum(counts) == TASKS * len(losses) and counts[0] > counts[1], counts
    assert all(row[3] == counts for row in results)


def test_strategies_that_sum_have_the_same_gradient() -> None:
    ((losses, norms),) = run_ranks(1, one_device)
    results = run_ranks(2, drawn, "replicate=2", False)
    assert results[0][1] == pytest.approx(norms, rel=1e-11)
    assert sum(row[0][-1] for row in results) == pytest.approx(losses[-1], rel=1e-11)


def unequal_targets() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches whose rows have 8 down to no targets."""
    uncounted = torch.arange(8)[None, :] >= torch.tensor([0, 3, 8, 1, 7, 8, 5, 2])[:, None]
    return [(x, y.masked_fill(uncounted, -100)) for x, y in rows()]


def drawn_by_targets(_rank: int) -> tuple[list[float], list[float], str]:
    """Returns losses and norms of a loop that counts the targets of the global batch; and what a loss without says."""
    strategy = HybridParallelStrategy("replicate=2")
    model = strategy.shard(plain_model())
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-2)
    scheduler = DynamicTaskScheduler(strategy, timeout_s=100)
    losses, norms, said = [], [], ""
    for x, y in unequal_targets():
        total = torch.zeros((), dtype=torch.float64)
        for task in scheduler.tasks(TASKS):
            with task:
                part = slice(task.index, task.index + 1)
                logits = output(model, x[part])
                with pytest.raises(ConfigError) as caught:
                    strategy.loss(logits, y[part])
                said = str(caught.value)
                loss = strategy.loss(logits, y[part], total=int((y != -100).sum()))
                loss.backward()
                total += loss.detach()
        losses.append(strategy.mean(total))
        norms.append(float(strategy.clip_grad_norm_(1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, said


def test_unequal_targets_of_drawn_micro_batches_weigh_alike() -> None:
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for x, y in unequal_targets():
        loss = mean_loss(output(model, x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    for found_losses, found_norms, said in run_ranks(2, drawn_by_targets):
        assert found_losses == pytest.approx(losses, rel=1e-11)
        assert found_norms == pytest.approx(norms, rel=1e-11)
        assert "total=(all_targets != -100).sum()" in said


def misused(_rank: int) -> list[str]:
    strategy = HybridParallelStrategy("replicate=2")
    model = strategy.shard(plain_model())
    scheduler = DynamicTaskScheduler(strategy)
    said = []
    for misuse in (lambda: scheduler.statistics(), lambda: list(scheduler.tasks(1)), lambda: list(scheduler.tasks(4))):
        with pytest.raises(ConfigError) as caught:
            misuse()
        said.append(str(caught.value))
    del model
    return said


def test_misuse_is_named() -> None:
    for said in run_ranks(2, misused):
        assert "first" in said[0] and "each needs one" in said[1] and "not run" in said[2]


@pytest.mark.parametrize(
    ("layout", "why"),
    [("shard=2,zero=3", "meet in every backward"), ("pp=2", "schedule"), ("ep=2,shard=2,zero=1", "exchange")],
)
def test_readers_in_lockstep_are_refused(layout: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DynamicTaskScheduler(SimpleNamespace(layout=Layout.parse(layout)))  # type: ignore[arg-type]
