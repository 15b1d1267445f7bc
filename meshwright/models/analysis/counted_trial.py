"""Finds out whether a loss is a mean over targets that its own code chooses: by a word, by what stands before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from meshwright.models.analysis.loss_coefficients import float_of
from meshwright.models.analysis.loss_extremes import extreme_targets
from meshwright.models.analysis.objective import Objective, count_targets, mean_cross_entropy, with_words
from meshwright.models.forward import ModelOutput

BATCHES = 4
"""Batches on which a loss is taken apart; what fits all of them by chance is no mean."""
TOLERANCE = 1e-9
"""Largest relative difference between equal losses and gradients, in float64."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """How a clone is run."""

    forward: Callable[[torch.Tensor, torch.Tensor], ModelOutput]
    """Of tokens and targets, (B, S) int64 each, in float64, with nothing dropped."""
    trained: Tensors
    """Its trained weights."""
    scaled: Callable[[float], AbstractContextManager[None]]
    """Enters a factor on its matrices."""
    factors: Sequence[float]
    """Factors on its matrices with which it is tried in turn, the last one for large logits."""


def chooses_targets(runs: Runs, objective: Objective, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Returns whether a loss is a mean over targets of its own choice, which show in its gradient by the logits.

    It is where loss and gradients of a batch are those of its row slices, weighted by the targets that each counted.

    Args:
        runs: of the clone.
        objective: how it takes targets, and the words that it names, which some of the tokens and targets become.
        batches: tokens and targets, (B, S) int64 each, at least `BATCHES` of them.
    """
    chooses = 0
    for number, (tokens, targets) in enumerate(batches[:BATCHES]):
        tokens, targets = (
            with_words(item, objective.words, 2 * number + place) for place, item in enumerate((tokens, targets))
        )
        with runs.scaled(runs.factors[number % len(runs.factors)]):
            if number > 1:
                targets = _with_extremes(runs, tokens, targets)
            whole = _measure(runs, tokens, targets)
            parts = [_measure(runs, tokens[rows], targets[rows]) for rows in (slice(0, 1), slice(1, None))]
            if whole is None or None in parts:
                return False
            if not whole.number:
                continue
            if not _is_sum(whole, [part for part in parts if part is not None]):
                return False
            with torch.no_grad():
                entropy = float_of(mean_cross_entropy(whole.logits, objective.counted(targets)))
        chooses += abs(whole.value - entropy) > TOLERANCE * abs(entropy)
    # Batches without an effect of the choice say nothing of it.
    return chooses > 1


def _with_extremes(runs: Runs, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns ``targets: (B, S)`` of which some are the likeliest and some the least likely words."""
    with torch.no_grad():
        logits = runs.forward(tokens, targets).logits
    return targets if logits is None else extreme_targets(logits, targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """The loss of some rows."""

    value: float
    number: float
    """Targets that it counted."""
    sums: Tensors
    """Gradients of the sum over these, from the gradient by the logits."""
    mean: Tensors
    """Gradients of the loss itself."""
    logits: torch.Tensor
    """(B, S, V)."""


def _measure(runs: Runs, tokens: torch.Tensor, targets: torch.Tensor) -> _Measured | None:
    """Returns loss, count and gradients of rows; None for a loss that isn't computed of the logits."""
    output = runs.forward(tokens, targets)
    if output.loss is None or output.logits is None or not output.logits.requires_grad:
        return None
    mean = _gradients(output.loss, runs.trained, None)
    counts = count_targets(output.loss, output.logits, 1.0)
    if counts is None:
        return None
    _, number, gradient = counts
    sums = _gradients(output.logits, runs.trained, gradient * number)
    return _Measured(
        value=float_of(output.loss),
        number=float(number),
        sums=sums,
        mean=mean,
        logits=output.logits.detach(),
    )


def _gradients(output: torch.Tensor, trained: Tensors, upstream: torch.Tensor | None) -> Tensors:
    """Returns a gradient for each trained weight, zeros where it has none."""
    gradients = torch.autograd.grad(output, trained, upstream, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(weight) if item is None else item for weight, item in zip(trained, gradients)]


def _is_sum(whole: _Measured, parts: Sequence[_Measured]) -> bool:
    """Returns whether a batch's mean is the sum over its parts by their number of targets."""
    if sum(part.number for part in parts) != whole.number:
        return False
    total = sum(part.value * part.number for part in parts if part.number)
    if not abs(total / whole.number - whole.value) <= TOLERANCE * abs(whole.value):
        return False
    largest = max(float(item.abs().max()) for item in whole.mean if item.numel())
    summed = [torch.stack(items).sum(dim=0) / whole.number for items in zip(*(part.sums for part in parts))]
    return all(
        float((one - other).abs().max()) <= TOLERANCE * largest for one, other in zip(summed, whole.mean) if one.numel()
    )
