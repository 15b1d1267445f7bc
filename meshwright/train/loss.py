"""Cross-entropy summed over target tokens, with the logits' gradient made in the logits' own memory."""

from __future__ import annotations

from typing import Any

import torch

IGNORED = -100
"""Target that counts for nothing."""

_IN_PLACE = {"UnsafeViewBackward0", "ViewBackward0", "MmBackward0", "AddmmBackward0", "ToCopyBackward0"}
"""Makers of logits whose backward doesn't read the logits again, so that their memory may be reused."""


class _CrossEntropy(torch.autograd.Function):
    """Forward makes loss, hits and gradient in one pass over cached rows; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: float, reuse: bool) -> Any:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = (logits if reuse else torch.empty_like(logits)) if wants_gradient else None
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss_sum = torch.zeros((), dtype=torch.float64, device=logits.device)
        hits = torch.zeros((), dtype=torch.float64, device=logits.device)
        rows = max(1, ((1 << 18) if logits.device.type == "cpu" else (1 << 27)) // logits.shape[1])
        for start in range(0, logits.shape[0], rows):
            part, wanted = logits[start : start + rows], targets[start : start + rows]
            counted = wanted != IGNORED
            column = wanted.clamp(min=0).unsqueeze(1)
            top = part.amax(dim=1, keepdim=True).to(kind)
            chosen = part.gather(1, column).to(kind)
            shifted = part.to(kind) - top
            weight = shifted.exp_()
            total = weight.sum(dim=1, keepdim=True)
            loss_sum += ((total.log() + top - chosen).squeeze(1) * counted).sum(dtype=torch.float64)
            hits += ((chosen == top).squeeze(1) & counted).sum()
            if gradient is not None:
                factor = counted.to(kind).unsqueeze(1) * scale
                weight.mul_(factor / total)
                weight.scatter_add_(1, column, -factor)
                gradient[start : start + rows] = weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        sums = torch.stack([loss_sum, (targets != IGNORED).sum().to(torch.float64), hits])
        ctx.mark_non_differentiable(sums)
        return (loss_sum * scale).to(kind), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        factor = upstream[0]
        if factor.device.type != "cpu" or factor.item() != 1.0:
            gradient = gradient * factor.to(gradient.dtype)
        return gradient, None, None, None


def cross_entropy_sums(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (scale x summed cross-entropy, sums) of next-token predictions.

    Args:
        logits: (B, S, V), any floating dtype; its memory is reused for the gradient where that is safe.
        targets: (B, S) int64; -100 where nothing is to be predicted.
        scale: factor on the loss, part of its gradient.

    Returns:
        The loss to differentiate, a scalar, float32 (float64 for float64 logits); and a detached float64 vector (loss
        sum in nats, target tokens, targets whose logit was the largest).
    """
    producer = type(logits.grad_fn).__name__ if logits.grad_fn is not None else ""
    flat = logits.reshape(-1, logits.shape[-1])
    reuse = producer in _IN_PLACE and flat.is_contiguous() and flat.data_ptr() == logits.data_ptr()
    loss, sums = _CrossEntropy.apply(flat, targets.reshape(-1), scale, reuse)
    return loss, sums
