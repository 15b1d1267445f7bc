"""The oracle: training as anyone would write it for one device, in plain PyTorch, sharing no code with the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Forward = Callable[[nn.Module, Any], torch.Tensor]
"""(module, batch) to logits (B, S, V)."""
AuthorCall = Callable[[nn.Module, Any], "tuple[torch.Tensor | None, torch.Tensor | None]"]
"""(module, batch) to (logits, loss), as the model's author calls it with its targets; one of both may be None."""
SEEDS = 8
"""Random states under which a forward is run that draws numbers: what they decide may seldom matter."""


@dataclass(kw_only=True, slots=True)
class Trace:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step's global batch, nats per target token."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm of each step, before clipping."""
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Step to every weight's gradient before clipping, for the steps that are compared."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every weight after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecipe:
    """AdamW and clipping, as numbers that both sides use."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


def train_plainly(
    module: nn.Module,
    call: AuthorCall,
    batches: Sequence[Sequence[Any]],
    recipe: OptimizerRecipe,
    training: bool = True,
    compared: Collection[int] = (0,),
) -> Trace:
    """Trains ``module`` on one device, on the loss that it returns, or else the cross-entropy of its logits.

    Args:
        module: materialised, in the dtype of the proof.
        call: of the model.
        batches: global batches, one a step, each in the parts with ``.targets`` that are handed to the model at once.
        recipe: optimizer.
        training: whether the module is in training mode.
        compared: steps whose gradients are kept.

    Returns:
        Losses, norms, gradients of the steps that are compared, and last weights.
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
    module.train(training)
    for step, parts in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = own_loss(module, call, parts)
        loss.backward()
        for _, item in named:
            if item.grad is None:
                item.grad = torch.zeros_like(item)
        if step in compared:
            trace.gradients[step] = {name: item.grad.clone() for name, item in named if item.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_([item for _, item in named], recipe.clip, foreach=False)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.norms.append(float(norm))
    trace.weights = {name: item.detach().clone() for name, item in named}
    return trace


def own_loss(module: nn.Module, call: AuthorCall, parts: Sequence[Any]) -> torch.Tensor:
    """Returns the loss of a global batch, a scalar.

    In one part it is what the model returns. In several the cross-entropies are weighted by their targets, and what the
    model adds to them by rows.
    """
    if len(parts) == 1:
        logits, loss = call(module, parts[0])
        return loss if loss is not None else _entropy(logits, parts[0].targets)
    targets, rows = (sum(sizes) for sizes in zip(*(_sizes(part) for part in parts)))
    total = torch.zeros(())
    for part in parts:
        logits, loss = call(module, part)
        entropy = _entropy(logits, part.targets)
        count, share = _sizes(part)
        total = total + entropy * (count / targets)
        total = total + (loss - entropy) * (share / rows) if loss is not None else total
    return total


def _sizes(part: Any) -> tuple[int, int]:
    return int((part.targets != -100).sum()), len(part.targets)


def _entropy(logits: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    if logits is None:
        raise ValueError("a loss without logits can't be taken apart: hand the batch over whole")
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def spread(module: nn.Module, forward: Forward, batch: Any, training: bool = True) -> float:
    """Returns by how much one device's logits differ when random numbers do, relative to the largest; 0 for not at all.

    Dropout of probability zero and layers that are never skipped draw numbers too, but nothing follows from them.

    Args:
        module: as `train_plainly`; its buffers are left as they were.
        forward: of the model.
        batch: one global batch.
        training: whether the module is in training mode.
    """
    module.train(training)
    buffers = {name: item.clone() for name, item in module.named_buffers()}
    device = batch.targets.device
    first, apart = torch.empty(0), 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            before = random_state(device)
            logits = forward(module, batch)
            for name, item in module.named_buffers():  # those that forward changes would make runs differ
                if name in buffers and buffers[name].shape == item.shape:
                    item.copy_(buffers[name])
            first = logits if seed == 0 else first
            apart = max(apart, float((logits - first).abs().max()) / max(float(first.abs().max()), 1e-30))
            if seed and not apart and torch.equal(before, random_state(device)):
                break
    return apart


def drawing(module: nn.Module, forward: Forward, batch: Any) -> str:
    """Returns the name and kind of the first module that draws random numbers; "" where none does."""
    found: list[str] = []
    states: list[torch.Tensor] = []
    device = batch.targets.device

    def enter(_part: nn.Module, _args: Any) -> None:
        states.append(random_state(device))

    def leave(part: nn.Module, _args: Any, _out: Any) -> None:
        if not torch.equal(states.pop(), random_state(device)):
            found.append(f"{names[part]} ({type(part).__name__})")  # what is inside leaves before what is around it

    names = {part: name or "the model" for name, part in module.named_modules()}
    hooks = [part.register_forward_pre_hook(enter) for part in names]
    hooks += [part.register_forward_hook(leave) for part in names]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        forward(module, batch)
    for hook in hooks:
        hook.remove()
    return found[0] if found else ""


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the generator that a device's random numbers come from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
