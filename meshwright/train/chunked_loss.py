"""Cross-entropy of a linear head, whose logits exist a chunk of tokens at a time.

A chunk's logits, loss and gradients are computed in forward, one after the other, so that each product of matrices is
computed once: logits, the hidden state's gradient, the weight's. What waits for backward are two gradients, (N, D) and
(V, D), in place of logits (N, V).
Source: Hsu et al., Liger Kernel (2024), section 3.2; Wijmans et al., Cut Your Losses (2025), section 3.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.models.analysis.logit_map import LogitMap
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.train.loss import IGNORED, Scale, scaled_gradient, sums_of_logits


class _HeadCrossEntropy(torch.autograd.Function):
    """Computes loss, hits and the gradients of head and hidden state in forward; backward returns the latter."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: Scale,
        chunk: int,
        logit_map: LogitMap,
        vocab: VocabShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], chunk)
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hits = torch.zeros_like(loss_sum)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = logit_map.apply_(nn.functional.linear(hidden[rows], weight, bias))
            # Read off the logits before their memory becomes their gradient.
            slope = logit_map.slope(logits) if gradients.wanted else 1.0
            chunk_loss, chunk_hits = sums_of_logits(
                logits, targets[rows], scale, logits if gradients.wanted else None, vocab
            )
            loss_sum += chunk_loss
            hits += chunk_hits
            if gradients.wanted:
                gradients.add(rows, logits if isinstance(slope, float) and slope == 1.0 else logits.mul_(slope))
            # Before the next chunk's logits are made.
            del logits, slope
        ctx.save_for_backward(*gradients.finish())
        sums = torch.stack([loss_sum, (targets != IGNORED).sum().to(torch.float64), hits])
        ctx.mark_non_differentiable(sums)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return (loss_sum * scale).to(dtype), sums

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if item is None else scaled_gradient(item, upstream[0]) for item in ctx.saved_tensors)
        return *gradients, None, None, None, None, None


class _HeadGradients:
    """Gradients of a head's operands, added up over chunks.

    Args:
        hidden: (N, D).
        weight: (V, D).
        bias: (V,) or None.
        wanted: which of the three need one.
        chunk: tokens of a chunk.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        chunk: int,
    ) -> None:
        self._hidden, self._operand = hidden, weight
        self.wanted = any(wanted)
        # Sums of many chunks in 16 bits would lose the small ones.
        sums_in_float32 = chunk < len(hidden) and weight.dtype.itemsize == 2
        sum_dtype = torch.float32 if sums_in_float32 else weight.dtype
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self._of_weight = torch.empty_like(weight, dtype=sum_dtype) if wanted[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and wanted[2] else None

    def add(self, rows: slice, of_logits: torch.Tensor) -> None:
        """Adds a chunk's gradients.

        Args:
            rows: of the hidden state.
            of_logits: (rows, V), the gradient of its logits before `LogitMap`.
        """
        if self._of_hidden is not None:
            torch.mm(of_logits, self._operand, out=self._of_hidden[rows])
        # At the first chunk the sum's memory holds nothing yet, which a factor of 0 leaves unread.
        kept = 0.0 if rows.start == 0 else 1.0
        if self._of_weight is not None and self._of_weight.dtype == of_logits.dtype:
            self._of_weight.addmm_(of_logits.t(), self._hidden[rows], beta=kept)
        elif self._of_weight is not None and _adds_in_float32(of_logits.device, of_logits.dtype):
            # Tensor cores add up in float32 anyway: beside the operands the sum alone is read and written.
            total, wide = self._of_weight, torch.float32
            torch.addmm(total, of_logits.t(), self._hidden[rows], out_dtype=wide, beta=kept, out=total)
        elif self._of_weight is not None:
            product = of_logits.t() @ self._hidden[rows]
            self._of_weight = self._of_weight.add_(product) if kept else self._of_weight.copy_(product)
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(dim=0, dtype=self._of_bias.dtype)

    def finish(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of hidden state, weight and bias in their types; None where none is wanted."""
        dtype = self._operand.dtype
        return self._of_hidden, *(None if item is None else item.to(dtype) for item in (self._of_weight, self._of_bias))


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch adds a product of 16-bit matrices to a float32 one without rounding it first; tried once.

    Args:
        device: of the matrices.
        dtype: of the factors.
    """
    # Source: torch.addmm's documentation, ``out_dtype``: on CUDA alone.
    if device.type != "cuda":
        return False
    total, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor.t(), factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # an older GPU's or another maker's library
        return False
    return True


def head_cross_entropy_sums(
    head: HeadInput,
    targets: torch.Tensor,
    scale: Scale,
    chunk: int,
    logit_map: LogitMap,
    vocab: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `cross_entropy_sums` returns of the head's logits, of which no more exist than those of a chunk.

    Args:
        head: the hidden state (..., D) of N tokens and the head's weights, whole or this rank's rows of them.
        targets: N int64 in any shape; `IGNORED` for positions without a target.
        scale: factor on the loss and its gradients.
        chunk: tokens whose logits exist at once.
        logit_map: what the model does to its head's product.
        vocab: this rank's columns of the vocabulary; None where the head is whole. Each chunk is two all-reduces.
    """
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
    loss, sums = _HeadCrossEntropy.apply(
        hidden, head.weight, head.bias, targets.reshape(-1), scale, chunk, logit_map, vocab
    )
    return loss, sums
