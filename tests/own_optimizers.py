"""Optimizers as users write them or copy them from papers, whose updates read more of the weights than one element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class _Own(Optimizer):
    """Moves each weight against a direction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(self.direction(weight, group), alpha=group["lr"])

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """weight: any shape, with a gradient; to the same shape."""
        assert weight.grad is not None
        return weight.grad


class GroupsSayWhat(_Own):
    """Makes matrices more orthogonal where their group says so, and has no defaults: as Muon beside Adam is written."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        every = list(weights)
        matrices, others = [item for item in every if item.dim() == 2], [item for item in every if item.dim() != 2]
        super().__init__(
            [{"params": matrices, "rule": "matrix", "lr": 0.02}, {"params": others, "rule": "", "lr": 0.1}], {}
        )

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(weight, group)
        if group["rule"] != "matrix":
            return gradient
        unit = gradient / (gradient.norm() + 1e-9)
        return 1.5 * unit - 0.5 * unit @ unit.mT @ unit  # a step of Newton-Schulz


class FactorsLargeMatrices(_Own):
    """Keeps second moments by row and column, where a matrix has as many of both as ``least``."""

    def __init__(self, weights: Iterable[nn.Parameter], least: int = 12) -> None:
        super().__init__(weights, {"lr": 0.02, "least": least})

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(weight, group)
        square = gradient.square() + 1e-30
        if weight.dim() == 2 and min(weight.shape) >= group["least"]:
            square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
        return gradient / square.sqrt()


class NeedsSettings(_Own):
    """Divides a gradient by its norm; can't be made of its defaults."""

    def __init__(self, weights: Iterable[nn.Parameter], total: int) -> None:
        super().__init__(weights, {"lr": 0.1})
        self.total = total

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(weight, group)
        return gradient / (gradient.norm() + 1.0 / self.total)


class GroupsTrust(_Own):
    """Scales by the ratio of two norms, as LAMB does, in the groups that ask for it."""

    def __init__(self, weights: Any, lr: float = 0.05, trust: bool = False) -> None:
        super().__init__(weights, {"lr": lr, "trust": trust})

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(weight, group)
        return gradient * (weight.norm() / (gradient.norm() + 1e-9)) if group["trust"] else gradient


class ClipsAll(_Own):
    """Divides all gradients by their common norm, where that is above ``most``."""

    def __init__(self, weights: Iterable[nn.Parameter], most: float = 0.1) -> None:
        super().__init__(weights, {"lr": 0.3})
        self.most = most

    def step(self, closure: Any = None) -> None:
        every = [item.grad for group in self.param_groups for item in group["params"] if item.grad is not None]
        norm = float(torch.stack([gradient.norm() for gradient in every]).norm())
        self.scale = min(1.0, self.most / (norm + 1e-6))
        super().step(closure)

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(weight, group) * self.scale


class EstimatesItsRate(_Own):
    """Raises one rate for all weights as far as gradients agree with the way so far, as D-Adaptation does."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.01})
        self.progress = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        length = 0.0
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    start = self.state[weight].setdefault("start", weight.clone())
                    self.progress += float((weight.grad * (start - weight)).sum())
                    length += float(weight.grad.abs().sum())
        for group in self.param_groups:
            group["lr"] = max(group["lr"], self.progress / length)
        super().step(closure)


class SignOfMomentum(_Own):
    """Works element by element (Lion), with state of its own and an attribute that can't be copied."""

    def __init__(self, weights: Iterable[nn.Parameter], name: str) -> None:
        super().__init__(weights, {"lr": 0.01})
        self.name, self.uncopied = name, (item for item in "a generator")

    def direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = super().direction(weight, group)
        momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        direction = (0.9 * momentum + 0.1 * gradient).sign()
        momentum.mul_(0.99).add_(gradient, alpha=0.01)
        return direction
