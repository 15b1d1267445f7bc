"""The oracle: training as anyone would write it for one device, in plain PyTorch, sharing no code with the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(kw_only=True, slots=True)
class Trace:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step's global batch, nats per target token."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm of each step, before clipping."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every weight's gradient of the first step, before clipping."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every weight after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """AdamW and clipping, as numbers that both sides use."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


def train_plainly(
    module: nn.Module, forward: Callable[[nn.Module, Any], torch.Tensor], batches: Sequence[Any], recipe: Recipe
) -> Trace:
    """Trains ``module`` on one device, a whole global batch at a time.

    Args:
        module: materialised, in the dtype of the proof.
        forward: (module, batch) to logits (B, S, V).
        batches: global batches with ``.targets``, one a step.
        recipe: optimizer.

    Returns:
        Losses, norms, first gradients and last weights.
    """
    trace = Trace()
    named = [(name, item) for name, item in module.named_parameters() if item.requires_grad]
    groups = [
        {"params": [item for _, item in named if item.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [item for _, item in named if item.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, foreach=False
    )
    module.train()
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        logits = forward(module, batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        loss.backward()
        for _, item in named:
            if item.grad is None:
                item.grad = torch.zeros_like(item)
        if not trace.gradients:
            trace.gradients = {name: item.grad.clone() for name, item in named if item.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_([item for _, item in named], recipe.clip, foreach=False)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.norms.append(float(norm))
    trace.weights = {name: item.detach().clone() for name, item in named}
    return trace
