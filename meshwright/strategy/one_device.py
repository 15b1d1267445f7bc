"""Implements a strategy's methods on one device in plain torch: the reference of a custom loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class OneDevice:
    """Runs a loop on one device with the methods of `HybridParallelStrategy`.

    It shares none of that class's code, so that it can serve as the reference.
    """

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._clip = 0.0
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] = self.loss
        self.model: nn.Module | None = None
        """The model of the last `shard`."""

    reader = (0, 1)

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> object:
        """Returns the model, or what the function builds."""
        # a function is called as strategy.shard would call it
        self.model = model if isinstance(model, nn.Module) else model()
        self._optimizer = optimizer
        self._loss, self._clip = options.get("loss") or self.loss, options.get("clip", 0.0)
        return self.model if optimizer is None else (self.model, optimizer)

    def step(self, batch: Any) -> float:
        """Trains on one batch, all rows at once; returns its loss.

        Args:
            batch: (inputs, targets), or a mapping with ``input_ids`` and ``labels``, which the next tokens' are.
        """
        assert self.model is not None and self._optimizer is not None
        inputs, targets = (batch["input_ids"], batch["labels"]) if isinstance(batch, Mapping) else batch
        output = self.model(inputs)
        logits = getattr(output, "logits", output)
        if isinstance(batch, Mapping):
            logits, targets = logits[:, :-1], targets[:, 1:]
        loss = self._loss(logits, targets)
        loss.backward()
        if self._clip:
            self.clip_grad_norm_(self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        groups: Iterable[object] | None = None,
        **settings: object,
    ) -> torch.optim.Optimizer:
        """Creates an optimizer over the model's parameters."""
        return optimizer_class(self._parameters() if groups is None else list(groups), **settings)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Does nothing: gradients add up."""
        yield

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips by torch's own function; returns the norm before, a scalar."""
        return nn.utils.clip_grad_norm_(self._parameters(), max_norm)

    def grad_norm(self) -> torch.Tensor:
        """Returns the 2-norm of the gradient, a scalar."""
        return nn.utils.get_total_norm(
            [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        )

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """Returns the mean cross-entropy over the targets, a scalar.

        Args:
            logits: (..., V).
            targets: (...) int64.
            total: divides the sum, in place of the number of these targets.
        """
        if total is None:
            return cross_entropy(logits.flatten(0, -2), targets.flatten())
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / total

    def count_targets(self, targets: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the number of targets other than -100, a scalar.

        Args:
            targets: (...) int64, one tensor or several.
        """
        parts = [targets] if isinstance(targets, torch.Tensor) else list(targets)
        return torch.cat([part.flatten() for part in parts]).ne(-100).sum()

    def mean(self, value: torch.Tensor | float) -> float:
        """Returns a value, () where it is a tensor, as a number."""
        return float(value)

    def _parameters(self) -> list[nn.Parameter]:
        """Returns the model's parameters."""
        assert self.model is not None
        return list(self.model.parameters())
