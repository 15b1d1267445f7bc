"""The oracle: training as anyone would write it for one device, in plain PyTorch, sharing no code with the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.train.feed import MicroBatch

Forward = Callable[[nn.Module, Any], torch.Tensor]
"""(module, batch) to logits (B, S, V)."""
AuthorCall = Callable[[nn.Module, Any], "tuple[torch.Tensor | None, torch.Tensor | None]"]
"""(module, batch) to (logits, loss), as the model's author calls it with its targets; one of both may be None."""
Named = Sequence[tuple[str, nn.Parameter]]
"""Trained weights of a module, by name."""
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
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every buffer that forward changed, of any shape, after the last step; none where a step is several calls."""


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
    batches: Sequence[Sequence[MicroBatch]],
    recipe: OptimizerRecipe,
    training: bool = True,
    compared: Collection[int] = (0,),
    compute: torch.dtype | None = None,
    scale: float = 1.0,
    shake: tuple[float, int] = (0.0, 0),
) -> Trace:
    """Trains ``module`` on one device, on the loss that it returns, or else the cross-entropy of its logits.

    With ``compute`` it trains as one device does in mixed precision: forward and backward read the weights rounded to
    that type, gradients come in it, and are summed over the parts of a batch, clipped and applied in that of the
    module. Source: Micikevicius et al., Mixed Precision Training (ICLR 2018), sections 3.1 and 3.2.

    Args:
        module: materialised, in the dtype of the proof.
        call: of the model.
        batches: global batches, one a step, each in the parts with ``.targets`` that are handed to the model at once.
        recipe: optimizer.
        training: whether the module is in training mode.
        compared: steps whose gradients are kept.
        compute: type of forward and backward; None for the module's own.
        scale: factor on the loss in backward, taken out of the gradients again.
        shake: by what share of themselves weights are moved at most before they are rounded to ``compute``, at random,
            and the seed of it.

    Returns:
        Losses, norms, gradients of the steps that are compared, and last weights.
    """
    trace = Trace()
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    masters = {name: parameter.detach().clone() if compute else parameter for name, parameter in trained}
    optimizer = make_adamw(masters, recipe)
    if compute:
        for parameter in module.parameters():  # buffers keep their type, as under a layout
            parameter.data = parameter.data.to(compute) if parameter.is_floating_point() else parameter.data
    module.train(training)
    buffers_before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    generator = torch.Generator().manual_seed(shake[1])
    for step, micro_batches in enumerate(batches):
        if compute:
            round_weights(trained, masters, shake[0], generator)
        loss = accumulate_gradients(module, call, micro_batches, trained, masters, scale)
        if step in compared:
            trace.gradients[step] = {
                name: parameter.grad.clone() for name, parameter in masters.items() if parameter.grad is not None
            }
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), recipe.clip, foreach=False)
        optimizer.step()
        trace.losses.append(loss)
        trace.norms.append(float(norm))
    trace.weights = {name: parameter.detach().clone() for name, parameter in masters.items()}
    # Each call changes them, and under a layout a step is one call: only where that is so here too they are its equal.
    if all(len(micro_batches) == 1 for micro_batches in batches):
        trace.buffers = changed_buffers(module, buffers_before)
    return trace


def changed_buffers(module: nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies of the buffers, of any shape, that aren't what they were.

    Args:
        module: whose buffers they are.
        before: earlier values, by name.
    """
    return {
        name: buffer.detach().clone()
        for name, buffer in module.named_buffers()
        if name not in before
        or buffer.shape != before[name].shape
        or not torch.allclose(buffer, before[name], rtol=0.0, atol=0.0, equal_nan=True)
    }


def make_adamw(masters: Mapping[str, torch.Tensor], recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Returns the optimizer: matrices decay, vectors and scalars don't."""
    matrices = [parameter for parameter in masters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in masters.values() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, foreach=False
    )


def round_weights(
    trained: Named, masters: Mapping[str, torch.Tensor], share: float, generator: torch.Generator
) -> None:
    """Copies master weights to the module's type, each entry first moved at random by at most a share of itself.

    Args:
        trained: the module's trained parameters.
        masters: weight to its master, each of the weight's full shape.
        share: of itself by which an entry is moved at most.
        generator: of the random numbers.
    """
    with torch.no_grad():
        for name, parameter in trained:
            shaken = masters[name]
            if share:
                shaken = shaken * (1 + share * (2 * torch.rand(shaken.shape, generator=generator) - 1)).to(
                    shaken.device
                )
            parameter.copy_(shaken)


def accumulate_gradients(
    module: nn.Module,
    call: AuthorCall,
    micro_batches: Sequence[MicroBatch],
    trained: Named,
    masters: Mapping[str, torch.Tensor],
    scale: float,
) -> float:
    """Sets the master weights' gradients to the sums over a batch, and returns its loss.

    Args:
        module: whose parameters are the weights, or these rounded.
        call: of the model.
        micro_batches: parts of the batch.
        trained: the module's trained parameters.
        masters: weight to its master, each of the weight's full shape.
        scale: factor on the loss in backward.
    """
    sums = {name: torch.zeros_like(parameter) for name, parameter in masters.items()}
    total = 0.0
    for loss in own_losses(module, call, micro_batches):
        module.zero_grad(set_to_none=True)
        (loss * scale).backward()
        for name, parameter in trained:
            if parameter.grad is not None:
                sums[name] += parameter.grad.to(sums[name].dtype) / scale
        total += loss.item()
    module.zero_grad(set_to_none=True)
    for name, parameter in masters.items():
        parameter.grad = sums[name]
    return total


def own_losses(module: nn.Module, call: AuthorCall, micro_batches: Sequence[MicroBatch]) -> Iterator[torch.Tensor]:
    """Yields what each part of a global batch adds to its loss, scalars.

    In one part it is what the model returns. In several the cross-entropies are weighted by their targets, and what the
    model adds to them by rows.
    """
    if len(micro_batches) == 1:
        logits, loss = call(module, micro_batches[0])
        yield loss if loss is not None else _cross_entropy(logits, micro_batches[0].targets)
        return
    targets, rows = (
        sum(sizes) for sizes in zip(*(_target_and_row_counts(micro_batch) for micro_batch in micro_batches))
    )
    for micro_batch in micro_batches:
        logits, loss = call(module, micro_batch)
        entropy = _cross_entropy(logits, micro_batch.targets)
        count, share = _target_and_row_counts(micro_batch)
        contribution = entropy * (count / targets)
        yield contribution + (loss - entropy) * (share / rows) if loss is not None else contribution


def _target_and_row_counts(micro_batch: MicroBatch) -> tuple[int, int]:
    return int((micro_batch.targets != -100).sum()), len(micro_batch.targets)


def _cross_entropy(logits: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    if logits is None:
        raise ValueError("a loss without logits can't be taken apart: hand the batch over whole")
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(upcast.flatten(0, 1), targets.flatten(), ignore_index=-100)


def measure_batch_spread(module: nn.Module, forward: Forward, batch: MicroBatch, training: bool = True) -> float:
    """Returns by how much one device's logits differ when random numbers do, relative to the largest; 0 for not at all.

    Dropout of probability zero and layers that are never skipped draw numbers too, but nothing follows from them.

    Args:
        module: as `train_plainly`; its buffers are left as they were.
        forward: of the model.
        batch: one global batch.
        training: whether the module is in training mode.
    """
    module.train(training)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    device = batch.targets.device
    first_logits, difference = torch.empty(0), 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            state_before = random_state(device)
            logits = forward(module, batch)
            for name, buffer in module.named_buffers():  # those that forward changes would make runs differ
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
            first_logits = logits if seed == 0 else first_logits
            difference = max(difference, _relative_spread(logits, first_logits))
            if seed and not difference and torch.equal(state_before, random_state(device)):
                break
    return difference


def _relative_spread(logits: torch.Tensor, first_logits: torch.Tensor) -> float:
    """Returns the largest difference of two runs' outputs, of one shape, relative to the first's largest entry.

    Infinite where an entry is finite in one run alone, which no comparison sees: all with a NaN are false.
    """
    is_finite = first_logits.isfinite()
    if not torch.equal(is_finite, logits.isfinite()):
        return math.inf
    difference, scale = (
        float(values[is_finite].abs().max()) if is_finite.any() else 0.0
        for values in (logits - first_logits, first_logits)
    )
    return difference / max(scale, 1e-30)


def find_random_modules(module: nn.Module, forward: Forward, batch: MicroBatch) -> str:
    """Returns the name and kind of the first module that draws random numbers; "" where none does."""
    drawing_modules: list[str] = []
    states: list[torch.Tensor] = []
    device = batch.targets.device

    def enter(_module: nn.Module, _args: object) -> None:
        states.append(random_state(device))

    def leave(submodule: nn.Module, _args: object, _out: object) -> None:
        if not torch.equal(states.pop(), random_state(device)):
            # Inner modules leave before outer ones, so the first entry is the innermost that draws.
            drawing_modules.append(f"{names[submodule]} ({type(submodule).__name__})")

    names = {submodule: name or "the model" for name, submodule in module.named_modules()}
    hooks = [submodule.register_forward_pre_hook(enter) for submodule in names]
    hooks += [submodule.register_forward_hook(leave) for submodule in names]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        forward(module, batch)
    for hook in hooks:
        hook.remove()
    return drawing_modules[0] if drawing_modules else ""


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state, (bytes,) uint8, of the generator that a device's random numbers come from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
