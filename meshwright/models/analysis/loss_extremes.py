"""What a loss makes of large logits, certain targets and other number formats, which a new model doesn't show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from meshwright.models.analysis.clone import Clone, duplicate_module
from meshwright.models.analysis.loss_coefficients import float_of
from meshwright.models.analysis.objective import mean_cross_entropy, nothing_dropped
from meshwright.models.forward import IGNORED, ModelOutput, author_output
from meshwright.parallel.float64_ops import Float64Ops

FACTORS = (8.0, 64.0, 512.0)
"""Factors on a clone's matrices that are tried for large logits."""
LARGEST_LOGIT = 300.0
"""Largest magnitude of these: beyond about 700 probabilities are 0 in float64."""


@contextlib.contextmanager
def scaled_matrices(module: nn.Module, factor: float) -> Iterator[None]:
    """Scales a clone's matrices while it is entered."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    for item in matrices:
        item.data.mul_(factor)
    try:
        yield
    finally:
        for item in matrices:
            item.data.div_(factor)


def large_factors(module: nn.Module, run: Callable[[], torch.Tensor | None]) -> tuple[float, float]:
    """Returns 1 and the largest factor on a clone's matrices whose logits stay below `LARGEST_LOGIT`.

    Args:
        module: of the clone.
        run: returns its logits, of any shape; None without.
    """
    largest = 1.0
    for factor in FACTORS:
        with scaled_matrices(module, factor):
            logits = run()
        if logits is None or not float_of(logits.abs().max()) < LARGEST_LOGIT:
            break
        largest = factor
    return 1.0, largest


def extreme_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns ``targets: (B, S)`` of which a third are the likeliest and a third the least likely words.

    Args:
        logits: (B, S, V).
        targets: (B, S) int64, of the tokens whose logits these are.
    """
    third = torch.arange(targets.numel(), device=targets.device).view_as(targets) % 3
    extremes = torch.where(third == 0, logits.argmax(dim=-1), torch.where(third == 1, logits.argmin(dim=-1), targets))
    return torch.where(targets == IGNORED, IGNORED, extremes)


def is_cross_entropy(
    output: ModelOutput, targets: torch.Tensor, trained: Sequence[torch.Tensor], tolerance: float
) -> bool:
    """Returns whether a loss is the cross-entropy of the logits, in its value and in every gradient.

    Args:
        output: with both, in float64.
        targets: (B, S) int64, as the model counts them.
        trained: weights with a gradient.
        tolerance: largest relative difference.
    """
    assert output.logits is not None and output.loss is not None
    with Float64Ops():
        entropy = mean_cross_entropy(output.logits, targets)
    if not abs(float_of(output.loss) - float_of(entropy)) <= tolerance * abs(float_of(entropy)):
        return False
    # a detached or zero-valued term shows in the gradients alone
    expected_grads = torch.autograd.grad(entropy, trained, allow_unused=True, retain_graph=True)
    actual_grads = torch.autograd.grad(output.loss, trained, allow_unused=True, retain_graph=True)
    entries = [float(grad.abs().max()) for grad in expected_grads if grad is not None and grad.numel()]
    limit = tolerance * max(entries, default=1.0)
    for actual, expected in zip(actual_grads, expected_grads):
        difference = torch.zeros(()) if actual is None else actual
        difference = difference if expected is None else difference - expected
        if float(difference.abs().sum()) and float(difference.abs().max()) > limit:
            return False
    return True


def reaches_logits(clone: Clone, tokens: torch.Tensor, targets: torch.Tensor, labels: str, dtype: torch.dtype) -> bool:
    """Returns whether the loss has a gradient by the logits in a number format; a cast may stand between them.

    Args:
        clone: of the model.
        tokens: (B, S) int64.
        targets: (B, S) int64.
        labels: one of `forward.LABELS`.
        dtype: of the weights.
    """
    module = duplicate_module(clone.module).to(dtype)
    with nothing_dropped():
        output = author_output(module, clone.structure, tokens, targets, labels)
    if output.loss is None or output.logits is None:
        return False
    (gradient,) = torch.autograd.grad(output.loss, output.logits, allow_unused=True)
    return gradient is not None
