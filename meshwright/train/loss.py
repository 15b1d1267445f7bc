"""Cross-entropy summed over target tokens, with the logits' gradient written into the logits' memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel.triton_kernels import load_kernels
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.torch_compat.tensors import backward_keeps_graph

Scale: TypeAlias = float | torch.Tensor
"""A factor on a loss; a tensor is a scalar on the loss's device."""
IGNORED = -100
"""Target that counts for nothing."""

_IN_PLACE = {
    *("UnsafeViewBackward0", "MmBackward0", "AddmmBackward0", "ToCopyBackward0"),
    *("MulBackward0", "DivBackward0", "AddBackward0", "SubBackward0"),
}
"""Autograd nodes that produce logits and don't read them in backward, so that their memory may be reused."""


class _CrossEntropy(torch.autograd.Function):
    """Computes loss, hits and gradient in forward, chunk by chunk; backward returns the saved gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: Scale,
        reuse: bool,
        vocab: VocabShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        # The logits' memory becomes their gradient: at large V this halves the peak of the head.
        gradient = (logits if reuse else torch.empty_like(logits)) if wants_gradient else None
        loss_sum, hits = sums_of_logits(logits, targets, scale, gradient, vocab)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        # float64 sums: float32 loses digits over 10^6 tokens, and would depend on the layout.
        sums = torch.stack([loss_sum, (targets != IGNORED).sum().to(torch.float64), hits])
        ctx.mark_non_differentiable(sums)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return (loss_sum * scale).to(dtype), sums

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled_gradient(gradient, upstream[0]), None, None, None, None


def scaled_gradient(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns ``gradient``, of any shape, times ``factor``, (); in its memory unless the graph is kept for another."""
    # The incoming gradient is usually 1; testing that on a GPU would synchronise.
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return gradient
    return gradient * factor.to(gradient.dtype) if backward_keeps_graph() else gradient.mul_(factor)


def sums_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, scale: Scale, gradient: torch.Tensor | None, vocab: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes loss, hits and gradient of logits.

    Args:
        logits: (N, V) floating, or this rank's columns of them.
        targets: (N,) int64.
        scale: factor on the gradient.
        gradient: shaped like logits, filled with scale x (softmax - one-hot); may be the logits' own memory; None for
            none.
        vocab: this rank's columns of the vocabulary; None for all.

    Returns:
        (loss sum in nats, number of hits), float64 scalars, equal on the ranks of ``vocab``.
    """
    fits_kernels = logits.is_cuda and logits.dtype != torch.float64 and logits.is_contiguous()
    if fits_kernels and (kernels := load_kernels("cross_entropy")) is not None:
        return _kernel_pass(kernels, logits, targets, scale, gradient, vocab)
    one_pass = _full_vocab_pass if vocab is None else _sharded_vocab_pass
    return one_pass(logits, targets, scale, gradient, vocab)


def _kernel_pass(
    kernels: Any,
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: Scale,
    gradient: torch.Tensor | None,
    vocab: VocabShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `_full_vocab_pass` and `_sharded_vocab_pass` do, by `parallel.triton_kernels.cross_entropy`."""
    is_target = targets != IGNORED
    start, stop = (vocab.start, vocab.stop) if vocab is not None else (0, logits.shape[1])
    in_shard = (targets >= start) & (targets < stop)
    column = torch.where(in_shard, targets - start, -1)
    shift, exp_sum, target_logit = kernels.row_statistics(logits, column)
    row_max = shift
    if vocab is not None:
        row_max = vocab.maximum(shift.clone())
        # The sums were taken with the local maximum.
        exp_sum, target_logit = vocab.sum(torch.stack([exp_sum * (shift - row_max).exp(), target_logit])).unbind()
    loss_sum = ((exp_sum.log() + row_max - target_logit) * is_target).sum(dtype=torch.float64)
    hits = ((target_logit == row_max) & is_target).sum().to(torch.float64)
    if gradient is not None:
        factor = is_target.to(torch.float32) * scale
        kernels.write_gradient(
            logits, gradient, column, row_max, (factor / exp_sum).float(), (factor * in_shard).float()
        )
    return loss_sum, hits


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yields slices of rows of logits (N, V) whose chunk fits the cache, or on a GPU a 128 M-element buffer."""
    rows = max(1, ((1 << 18) if logits.device.type == "cpu" else (1 << 27)) // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _full_vocab_pass(
    logits: torch.Tensor, targets: torch.Tensor, scale: Scale, gradient: torch.Tensor | None, _: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes loss, hits and gradient over the full vocabulary in one pass.

    Args:
        logits: (N, V) floating, whole rows on this rank.
        targets: (N,) int64.
        scale: factor on the gradient.
        gradient: (N, V), filled with scale x (softmax - one-hot); may be the logits' own memory; None for none.

    Returns:
        (loss sum in nats, number of hits), float64 scalars.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss_sum = torch.zeros((), dtype=torch.float64, device=logits.device)
    hits = torch.zeros_like(loss_sum)
    for rows in _chunks(logits):
        chunk, chunk_targets = logits[rows], targets[rows]
        is_target = chunk_targets != IGNORED
        column = chunk_targets.clamp(min=0).unsqueeze(1)
        # log-sum-exp with the row's maximum subtracted: no overflow.
        row_max = chunk.amax(dim=1, keepdim=True).to(dtype)
        target_logit = chunk.gather(1, column).to(dtype)
        # Promotes to the maximum's type: on a GPU in one kernel, without a copy in that type.
        exp_shifted = (chunk - row_max).exp_()
        exp_sum = exp_shifted.sum(dim=1, keepdim=True)
        loss_sum += ((exp_sum.log() + row_max - target_logit).squeeze(1) * is_target).sum(dtype=torch.float64)
        # A hit: the target's logit is the row's largest.
        hits += ((target_logit == row_max).squeeze(1) & is_target).sum()
        if gradient is not None:
            factor = is_target.to(dtype).unsqueeze(1) * scale
            # Softmax x scale in place, then subtract the scale at each target: scale x (softmax - onehot).
            exp_shifted.mul_(factor / exp_sum)
            exp_shifted.scatter_add_(1, column, -factor)
            gradient[rows] = exp_shifted
    return loss_sum, hits


def _sharded_vocab_pass(
    logits: torch.Tensor, targets: torch.Tensor, scale: Scale, gradient: torch.Tensor | None, vocab: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes loss, hits and gradient over logits that are sharded by vocabulary; every rank gets the same sums.

    Args:
        logits: (N, stop - start) floating, this rank's columns [start, stop) of the vocabulary.
        targets: (N,) int64, over the full vocabulary.
        scale: factor on the gradient.
        gradient: shaped like logits, filled; may be the logits' own memory; None for none.
        vocab: this rank's columns, and the collectives over the ranks that share the rows.

    Returns:
        (loss sum in nats, number of hits), float64 scalars.
    """
    assert vocab is not None
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    is_target = targets != IGNORED
    in_shard = (targets >= vocab.start) & (targets < vocab.stop)
    # Targets in another rank's columns point to column 0 here, and are masked out below.
    column = torch.where(in_shard, targets - vocab.start, 0)
    local_max, local_terms = logits.new_empty(len(logits), dtype=dtype), logits.new_empty(2, len(logits), dtype=dtype)
    for rows in _chunks(logits):
        chunk = logits[rows]
        local_max[rows] = chunk.amax(dim=1).to(dtype)
        # Two rows for one all-reduce: the local sum of exponentials, and the target's logit on its owner.
        local_terms[1, rows] = chunk.gather(1, column[rows].unsqueeze(1)).squeeze(1).to(dtype) * in_shard[rows]
        exp_shifted = (chunk - local_max[rows].unsqueeze(1)).exp_()
        local_terms[0, rows] = exp_shifted.sum(dim=1)
        if gradient is not None:
            gradient[rows] = exp_shifted
    # First all-reduce, max: the shift must be the same on all ranks.
    row_max = vocab.maximum(local_max.clone())
    # Exponentials taken with the local maximum are rescaled to the global one.
    rescale = (local_max - row_max).exp_()
    local_terms[0] *= rescale
    # Second all-reduce, sum: the denominators and the targets' logits.
    exp_sum, target_logit = vocab.sum(local_terms).unbind()
    loss_sum = ((exp_sum.log() + row_max - target_logit) * is_target).sum(dtype=torch.float64)
    hits = ((target_logit == row_max) & is_target).sum().to(torch.float64)
    if gradient is not None:
        factor = is_target.to(dtype) * scale
        for rows in _chunks(logits):
            gradient[rows] *= (factor[rows] * rescale[rows] / exp_sum[rows]).unsqueeze(1).to(gradient.dtype)
        # Only the owner of a target's column subtracts there.
        gradient.scatter_add_(1, column.unsqueeze(1), (-factor * in_shard).unsqueeze(1).to(gradient.dtype))
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
        targets: (B, S) int64; -100 for positions without a target.
        scale: factor on the loss and its gradient.
        vocab: this rank's columns of the vocabulary, with logits (B, S, stop - start); None for unsharded logits.
        spare: whether no other operation reads the logits in backward, so that their memory may be reused.

    Returns:
        The loss to differentiate, () float32 (float64 for float64 logits); and a detached (3,) float64 vector: loss sum
        in nats, target tokens, and hits, the targets whose logit was the largest. Equal on the ranks of ``vocab``.
    """
    node: Any = logits.grad_fn
    # A view's memory is that of the node below: a log-softmax, say, reads its own output in backward.
    while type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    flat = logits.reshape(-1, logits.shape[-1])
    # In place only if backward of the producer doesn't read the logits, and they are no view of other memory.
    may_reuse = spare and type(node).__name__ in _IN_PLACE
    reuse = may_reuse and flat.is_contiguous() and flat.data_ptr() == logits.data_ptr()
    loss, sums = _CrossEntropy.apply(flat, targets.reshape(-1), scale, reuse, vocab)
    return loss, sums
