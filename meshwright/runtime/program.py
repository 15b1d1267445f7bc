"""A built layout that can run: micro-batches in, summed gradients and loss sums out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.runtime.clock import Clock
from meshwright.runtime.memory import StateMeter
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.weights import Weight, named_weights

Compute = Callable[[nn.Module, Any, float], tuple[torch.Tensor, torch.Tensor]]
"""(module, micro-batch, scale) to (loss to differentiate, sums): the loss is scale x the sum over target tokens, the
sums are a float64 vector (loss sum, target tokens, right predictions), detached."""


class Sync(Protocol):
    """What an axis that sums gradients gives the step to steer it."""

    def begin(self, last: bool) -> None:
        """Called before each micro-batch; ``last`` for the last one before the optimizer."""

    def finish(self) -> None:
        """Called after the last backward; when it returns, every gradient is the sum over the axis."""


@dataclass(slots=True)
class Stamp:
    """Tells a watcher where this rank is: phase, micro-batch, and what it waits for."""

    phase: Callable[[str, int], None]
    waits: Callable[[str], None]


class Program:
    """The model as this rank runs it under a layout.

    Args:
        module: wrapped and materialised.
        compute: forward and loss of one micro-batch.
        sync: axes that sum gradients, in the order in which they finish.
        mesh: ranks and wires; None for a single rank without a process group.
        clock: books the parts of a step.
    """

    def __init__(
        self, module: nn.Module, compute: Compute, sync: Sequence[Sync], mesh: Mesh | None, clock: Clock
    ) -> None:
        self.module, self.mesh, self.clock = module, mesh, clock
        self._compute, self._sync = compute, tuple(sync)
        self.weights: list[Weight] = named_weights(module)
        self.meter: StateMeter | None = StateMeter(module, self.weights)
        """Looks at the state's bytes while set; the trainer unsets it after the first steps."""

    def forward_backward(
        self, batches: Sequence[Any], scale: float, seed_for: Callable[[int], int], stamp: Stamp | None = None
    ) -> torch.Tensor:
        """Runs a step's micro-batches and sums gradients over every axis that reads other data.

        Args:
            batches: this rank's micro-batches, in order.
            scale: factor on the summed loss before backward.
            seed_for: micro-batch number to the seed of its random state (dropout).
            stamp: where to report progress.

        Returns:
            This rank's (loss sum, target tokens, right predictions), float64, not yet summed over ranks.
        """
        total: torch.Tensor | None = None
        for number, batch in enumerate(batches):
            for sync in self._sync:
                sync.begin(number == len(batches) - 1)
            torch.manual_seed(seed_for(number))
            if stamp:
                stamp.phase("forward", number)
            loss, sums = self._compute(self.module, batch, scale)
            self.clock.lap("forward")
            if self.meter is not None:
                self.meter.sample()
            if stamp:
                stamp.phase("backward", number)
            loss.backward()
            total = sums if total is None else total + sums
            del loss
            self.clock.lap("backward")
            if self.meter is not None:
                self.meter.sample()
        for sync in self._sync:
            sync.finish()
        self.clock.lap("reduce")
        assert total is not None
        return total

    @torch.no_grad()
    def evaluate(self, batch: Any) -> torch.Tensor:
        """Returns (loss sum, target tokens, right predictions) of one batch, without gradients."""
        training = self.module.training
        self.module.eval()
        try:
            return self._compute(self.module, batch, 1.0)[1]
        finally:
            self.module.train(training)

    def clear_gradients(self) -> None:
        """Frees all gradients."""
        for weight in self.weights:
            weight.parameter.grad = None
