"""Cross-entropy summed over target tokens, with the logits' gradient made in the logits' own memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from meshwright.parallel.vocab_cross_entropy import VocabShard

Scale: TypeAlias = float | torch.Tensor
"""A factor on a loss; a tensor is a scalar on the loss's device."""
IGNORED = -100
"""Target that counts for nothing."""

_IN_PLACE = {"UnsafeViewBackward0", "ViewBackward0", "MmBackward0", "AddmmBackward0", "ToCopyBackward0"}
"""Makers of logits whose backward doesn't read the logits again, so that their memory may be reused."""


class _CrossEntropy(torch.autograd.Function):
    """Forward makes loss, hits and gradient in one pass over cached rows; backward hands the gradient on."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: Scale, reuse: bool, vocab: VocabShard | None
    ) -> Any:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = (logits if reuse else torch.empty_like(logits)) if wants_gradient else None
        work = _whole if vocab is None else _split
        loss_sum, hits = work(logits, targets, scale, gradient, vocab)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        sums = torch.stack([loss_sum, (targets != IGNORED).sum().to(torch.float64), hits])
        ctx.mark_non_differentiable(sums)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return (loss_sum * scale).to(kind), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        factor = upstream[0]
        if factor.device.type != "cpu" or factor.item() != 1.0:
            gradient = gradient * factor.to(gradient.dtype)
        return gradient, None, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yields runs of rows that fit the cache, or on a GPU a reasonable buffer."""
    rows = max(1, ((1 << 18) if logits.device.type == "cpu" else (1 << 27)) // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _whole(
    logits: torch.Tensor, targets: torch.Tensor, scale: Scale, gradient: torch.Tensor | None, _: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss sum, hits) of logits (N, V) and fills their gradient, in one pass."""
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss_sum = torch.zeros((), dtype=torch.float64, device=logits.device)
    hits = torch.zeros_like(loss_sum)
    for rows in _chunks(logits):
        part, wanted = logits[rows], targets[rows]
        counted = wanted != IGNORED
        column = wanted.clamp(min=0).unsqueeze(1)
        top = part.amax(dim=1, keepdim=True).to(kind)
        chosen = part.gather(1, column).to(kind)
        weight = (part.to(kind) - top).exp_()
        total = weight.sum(dim=1, keepdim=True)
        loss_sum += ((total.log() + top - chosen).squeeze(1) * counted).sum(dtype=torch.float64)
        hits += ((chosen == top).squeeze(1) & counted).sum()
        if gradient is not None:
            factor = counted.to(kind).unsqueeze(1) * scale
            weight.mul_(factor / total)
            weight.scatter_add_(1, column, -factor)
            gradient[rows] = weight
    return loss_sum, hits


def _split(
    logits: torch.Tensor, targets: torch.Tensor, scale: Scale, gradient: torch.Tensor | None, vocab: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_whole`, for logits (N, stop - start) of a run of the vocabulary; every rank gets the same sums.

    The first pass leaves exp(logit - own top) where the gradient goes, so that the exponential is taken once.
    """
    assert vocab is not None
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    counted = targets != IGNORED
    mine = (targets >= vocab.start) & (targets < vocab.stop)
    column = torch.where(mine, targets - vocab.start, 0)
    own, parts = logits.new_empty(len(logits), dtype=kind), logits.new_empty(2, len(logits), dtype=kind)
    for rows in _chunks(logits):
        part = logits[rows]
        own[rows] = part.amax(dim=1).to(kind)
        parts[1, rows] = part.gather(1, column[rows].unsqueeze(1)).squeeze(1).to(kind) * mine[rows]
        weight = (part.to(kind) - own[rows].unsqueeze(1)).exp_()
        parts[0, rows] = weight.sum(dim=1)
        if gradient is not None:
            gradient[rows] = weight
    top = vocab.maximum(own.clone())
    lift = (own - top).exp_()
    parts[0] *= lift
    total, chosen = vocab.sum(parts).unbind()
    loss_sum = ((total.log() + top - chosen) * counted).sum(dtype=torch.float64)
    hits = ((chosen == top) & counted).sum().to(torch.float64)
    if gradient is not None:
        factor = counted.to(kind) * scale
        for rows in _chunks(logits):
            gradient[rows] *= (factor[rows] * lift[rows] / total[rows]).unsqueeze(1).to(gradient.dtype)
        gradient.scatter_add_(1, column.unsqueeze(1), (-factor * mine).unsqueeze(1).to(gradient.dtype))
    return loss_sum, hits


def cross_entropy_sums(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: Scale,
    vocab: VocabShard | None = None,
    spare: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (scale x summed cross-entropy, sums) of next-token predictions.

    Args:
        logits: (B, S, V), any floating dtype; its memory is reused for the gradient where that is safe.
        targets: (B, S) int64; -100 where nothing is to be predicted.
        scale: factor on the loss, part of its gradient.
        vocab: the run of the vocabulary that the logits are of, (B, S, stop - start); None for all of it.
        spare: whether nobody else reads the logits in backward, so that their memory may become their gradient.

    Returns:
        The loss to differentiate, a scalar, float32 (float64 for float64 logits); and a detached float64 vector (loss
        sum in nats, target tokens, targets whose logit was the largest).
    """
    producer = type(logits.grad_fn).__name__ if logits.grad_fn is not None else ""
    flat = logits.reshape(-1, logits.shape[-1])
    reuse = spare and producer in _IN_PLACE and flat.is_contiguous() and flat.data_ptr() == logits.data_ptr()
    loss, sums = _CrossEntropy.apply(flat, targets.reshape(-1), scale, reuse, vocab)
    return loss, sums
