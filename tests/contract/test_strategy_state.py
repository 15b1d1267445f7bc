"""A sharded model keeps the modes of submodules, start values of optimizers, and dropout across a resume."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from meshwright.strategy import HybridParallelStrategy, PipelineEngine
from tests.own_models import Batch, equal, gpt2, mean_loss, output, plain_model, rows, world
from tests.ranks.group import run_ranks
from tests.tiers import further


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer of the user's, which knows nothing of this project."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for item in group["params"]:
                item.sub_(self.direction(self.state[item], item.grad), alpha=group["lr"])

    def direction(self, state: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Returns where a weight goes; the first gradient begins the momentum."""
        if "momentum" in state:
            state["momentum"].mul_(0.9).add_(gradient, alpha=0.1)
        else:
            state["momentum"] = gradient.clone()
        return state["momentum"]


Optimizers = dict[str, Callable[..., torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.3, t0=0),
    "rprop": functools.partial(torch.optim.Rprop, lr=1e-2),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "dampened": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "own": OwnOptimizer,
    "averaged": functools.partial(torch.optim.RMSprop, lr=1e-2, centered=True),
}


def with_quiet_block() -> nn.Module:
    """A model whose first block evaluates while the rest trains, as a frozen encoder does."""
    model = gpt2().train()
    model.get_submodule("transformer.h.0").eval()
    return model


def names_in_eval(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if not child.training]


def modes_under(_rank: int, text: str) -> list[list[str]]:
    x, y = rows()[0]
    if "pp" in text:
        engine = PipelineEngine(with_quiet_block(), text, mean_loss, functools.partial(torch.optim.SGD, lr=0.1))
        found = [names_in_eval(engine.modules[0])]
        engine.evaluate([(x, y)])
        return [*found, names_in_eval(engine.modules[0])]
    model = HybridParallelStrategy(text).shard(with_quiet_block())
    return [names_in_eval(model)]


@pytest.mark.parametrize("text", further(["shard=2", "tp=2", "pp=2"]))
def test_submodules_keep_their_modes(text: str) -> None:
    wanted = names_in_eval(with_quiet_block())
    assert wanted[0] == "transformer.h.0"
    for found in run_ranks(2, modes_under, text):
        assert all(names == wanted for names in found)


def losses_after_early_state(_rank: int, name: str, early: bool) -> list[float]:
    strategy = HybridParallelStrategy("shard=2")
    model = strategy.shard(plain_model())
    optimizer = strategy.optimizer(OPTIMIZERS[name])
    if early:
        state = strategy.state_dict(optimizer)
        assert state["optimizer"]
        assert all(item.grad is None for group in optimizer.param_groups for item in group["params"])
    index, count = strategy.reader
    losses = []
    for x, y in rows() * 2:
        loss = mean_loss(model(x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    return losses


@pytest.mark.parametrize("name", further(OPTIMIZERS, ("adamw", "own")))
def test_a_state_that_is_asked_for_before_the_first_step_changes_no_training(name: str) -> None:
    model = plain_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    wanted = []
    for x, y in rows() * 2:
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    equal(run_ranks(2, losses_after_early_state, name, True), wanted)


def dampened_losses(_rank: int, text: str, batches: list[Batch], load: str, save: str) -> list[float]:
    if "pp" in text:
        engine = PipelineEngine(gpt2(), text, mean_loss, OPTIMIZERS["dampened"])
        dcp.load(engine.state_dict(), checkpoint_id=load) if load else engine.state_dict()
        losses = [engine.step(*batch) for batch in batches]
        dcp.save(engine.state_dict(), checkpoint_id=save)
        return losses
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(gpt2())
    optimizer = strategy.optimizer(OPTIMIZERS["dampened"])
    early = strategy.state_dict(optimizer)
    if load:
        dcp.load(early, checkpoint_id=load)
    losses, (index, count) = [], strategy.reader
    for x, y in batches:
        loss = mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    # what a loop may have asked for once, before its first step
    dcp.save(early, checkpoint_id=save)
    return losses


@pytest.mark.parametrize("text", ["shard=2", "pp=2,microbatches=2"])
def test_momentum_that_was_loaded_is_damped_and_a_state_asked_for_early_is_the_optimizers(
    text: str, tmp_path: Path
) -> None:
    batches = rows() * 2
    model = gpt2()
    optimizer = OPTIMIZERS["dampened"](model.parameters())
    wanted = []
    for x, y in batches:
        loss = mean_loss(output(model, x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    equal(run_ranks(2, dampened_losses, text, batches[:2], "", first), wanted[:2])
    equal(run_ranks(2, dampened_losses, text, batches[2:], first, second), wanted[2:])


class CountingDecay(OwnOptimizer):
    """Its state is a number that it counts up."""

    def direction(self, state: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient over the number of the step."""
        state["step"] = state.get("step", 0) + 1
        return gradient / state["step"]


def steps_counted(_rank: int) -> set[int]:
    strategy = HybridParallelStrategy("replicate=2")
    strategy.shard(plain_model())
    optimizer = strategy.optimizer(CountingDecay)
    strategy.state_dict(optimizer)
    return {state["step"] for state in optimizer.state.values()}


def test_numbers_of_an_optimizer_of_ones_own_start_at_zero() -> None:
    assert run_ranks(2, steps_counted) == [{0}, {0}]


def dropping() -> nn.Module:
    model = gpt2().train()
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.4
    return model


def dropped_losses(_rank: int, text: str, batches: list[Batch], load: str, save: str, partial: bool) -> list[float]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    planner = DefaultLoadPlanner(allow_partial_load=True) if partial else None
    if "pp" in text:
        engine = PipelineEngine(dropping(), text, mean_loss, adam)
        if load:
            dcp.load(engine.state_dict(), checkpoint_id=load, planner=planner)
        losses = [engine.step(*batch) for batch in batches]
        if save:
            dcp.save(engine.state_dict(), checkpoint_id=save)
        return losses
    strategy = HybridParallelStrategy(text)
    model = strategy.shard(dropping())
    optimizer = strategy.optimizer(adam)
    if load:
        dcp.load(strategy.state_dict(optimizer), checkpoint_id=load, planner=planner)
    losses, (index, count) = [], strategy.reader
    for x, y in batches:
        loss = mean_loss(output(model, x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    if save:
        dcp.save(strategy.state_dict(optimizer), checkpoint_id=save)
    return losses


@pytest.mark.parametrize("text", further(["shard=2", "pp=2,microbatches=2"]))
def test_dropout_goes_on_after_a_resume(text: str, tmp_path: Path) -> None:
    batches = rows()
    whole = run_ranks(2, dropped_losses, text, batches, "", "", False)
    run_ranks(2, dropped_losses, text, batches[:2], "", str(tmp_path), False)
    resumed = run_ranks(2, dropped_losses, text, batches[2:], str(tmp_path), "", False)
    equal(resumed, whole[0][2:])


def test_dropout_goes_on_under_another_layout(tmp_path: Path) -> None:
    batches = rows()
    whole = run_ranks(2, dropped_losses, "shard=2", batches, "", "", False)
    run_ranks(2, dropped_losses, "shard=2", batches[:2], "", str(tmp_path), False)
    equal(run_ranks(2, dropped_losses, "tp=2", batches[2:], str(tmp_path), "", True), whole[0][2:])


def frozen_stage_losses(rank: int, text: str, frozen: list[str], make: str) -> list[float]:
    model = gpt2()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    optimizer = adam([item for item in model.parameters() if item.requires_grad]) if make == "made" else adam
    engine = PipelineEngine(model, text, mean_loss, optimizer, clip=0.3)
    index, count = engine.reader
    batches = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]
    losses = [engine.step(*batch) for batch in batches[:2]]
    assert engine.state_dict()["optimizer"].keys() <= {"step", "exp_avg", "exp_avg_sq"}
    return [*losses, engine.evaluate(batches[2:])]


@pytest.mark.parametrize(
    ("text", "frozen", "make"),
    further(
        [
            ("pp=2,microbatches=2", ["transformer.wte", "transformer.wpe", "transformer.h.0"], "called"),
            ("pp=2,microbatches=2", ["transformer.wte", "transformer.wpe", "transformer.h.0"], "made"),
            (
                "pp=2,microbatches=2,schedule=zerobubble",
                ["transformer.h.1", "transformer.ln_f", "transformer.wte"],
                "called",
            ),
            (
                "pp=2,shard=2,microbatches=2,schedule=zerobubble",
                ["transformer.h.0", "transformer.wpe", "transformer.wte"],
                "called",
            ),
        ],
        (0, 1),
    ),
)
def test_a_stage_may_be_frozen_as_a_whole(text: str, frozen: list[str], make: str) -> None:
    model = gpt2()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    wanted = []
    for step, (x, y) in enumerate(rows()):
        loss = mean_loss(output(model, x), y)
        wanted.append(loss.item())
        if step < 2:
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 0.3)
            optimizer.step()
            optimizer.zero_grad()
    equal(run_ranks(world(text), frozen_stage_losses, text, frozen, make), wanted)
