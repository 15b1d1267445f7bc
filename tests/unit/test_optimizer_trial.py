"""What a trial of an optimizer shows is what its formula says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from meshwright.strategy.optimizer_trial import try_optimizer
from tests.own_optimizers import (
    ClipsAll,
    EstimatesItsRate,
    FactorsLargeMatrices,
    GroupsSayWhat,
    GroupsTrust,
    NeedsSettings,
    SignOfMomentum,
)

BY_ELEMENT = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((), (7,), (6, 4), (3, 2, 2))]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_optimizers_of_torch_work_element_by_element(name: str) -> None:
    trial = try_optimizer(getattr(torch.optim, name)(weights()))
    assert (trial.by_element, trial.by_weight, trial.failure) == (True, True, "")


def test_kernels_for_gpus_and_rates_in_tensors_are_tried_too() -> None:
    for settings in ({"fused": True}, {"capturable": True, "lr": torch.tensor(0.0)}, {"foreach": True}):
        trial = try_optimizer(torch.optim.AdamW(weights(), **settings))  # type: ignore[arg-type]
        assert trial.by_element and trial.by_weight, settings


@pytest.mark.parametrize(
    ("make", "by_weight"),
    [
        (GroupsSayWhat, True),
        (FactorsLargeMatrices, True),
        (lambda every: FactorsLargeMatrices(every, least=128), True),
        (lambda every: NeedsSettings(every, 100), True),
        (lambda every: GroupsTrust([{"params": every, "trust": True}]), True),
        (lambda every: torch.optim.Muon([item for item in every if item.dim() == 2]), True),
        (torch.optim.Adafactor, True),
        (ClipsAll, False),
        (lambda every: ClipsAll(every, most=50.0), False),
        (EstimatesItsRate, False),
    ],
)
def test_what_reads_more_than_an_element_is_found(make: Callable[[Any], Any], by_weight: bool) -> None:
    trial = try_optimizer(make(weights()))
    assert (trial.by_element, trial.by_weight, trial.failure) == (False, by_weight, "")


def test_a_rate_of_zero_hides_nothing() -> None:
    optimizer = GroupsTrust([{"params": weights(), "trust": True}])
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    trial = try_optimizer(optimizer)
    assert (trial.by_element, trial.by_weight, trial.failure) == (False, True, "")


def test_a_trial_leaves_optimizer_weights_and_random_numbers_alone() -> None:
    every = weights()
    before, optimizer = [item.detach().clone() for item in every], SignOfMomentum(every, "own")
    state = torch.get_rng_state()
    trial = try_optimizer(optimizer)
    assert trial.by_element and trial.by_weight and not trial.failure
    assert torch.equal(state, torch.get_rng_state()) and not optimizer.state
    assert all(torch.equal(item, value) and item.grad is None for item, value in zip(every, before))


def test_what_no_trial_can_step_is_told_by_its_own_error() -> None:
    assert "closure" in try_optimizer(torch.optim.LBFGS(weights())).failure
