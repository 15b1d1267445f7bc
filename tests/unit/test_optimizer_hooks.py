"""Hooks of every optimizer's step, while strategies come and go."""

from __future__ import annotations

import gc

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.strategy.optimizer_binding import OptimizerBinding, _observe_optimizers


class _Quiet(OptimizerBinding):
    def __init__(self) -> None:
        self.own, self.steps = self, 0  # a circle, which only the collector frees
        _observe_optimizers(self)

    def _before_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self.steps += 1

    def _after_optimizer_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self.steps += 1


def test_a_strategy_may_be_collected_inside_of_another_s_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept = _Quiet()
    _Quiet()
    collecting = register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    try:
        _Quiet()
        weight.grad = torch.ones(2)
        optimizer.step()
    finally:
        collecting.remove()
    assert kept.steps == 2
    kept.own = None
