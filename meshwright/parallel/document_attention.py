"""Causal attention within the documents of packed rows, by a kernel of variable lengths and without a dense mask.

What would be a mask (B, 1, S, S) is the documents' first tokens, a vector. It travels where masks do, so that whatever
passes a layer its mask (recompute, stages, exchanged heads) passes this too. A compiled layer must not be compiled
again for another number of documents: the two numbers that the kernel needs are therefore sizes of the tensor, which
takes no memory for them.
Source: Dao, FlashAttention-2 (2023); torch.nn.attention.varlen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.torch_compat.tensors import TorchFunction
from meshwright.torch_compat.varlen import varlen_kernel

KERNEL_MULTIPLE = 8
"""Elements of a head that the kernel takes come in multiples of this; others are padded with zeros."""


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Where the documents of a micro-batch begin, its rows one after the other."""

    starts: torch.Tensor
    """(n + 1,) int32: first token of each document, then the number of tokens B S."""
    longest: int
    """Tokens of the longest document."""
    on_host: tuple[int, ...] | None = None
    """``starts`` where the host has read them."""

    def to(self, device: torch.device) -> DocumentBounds:
        """Returns the bounds on a device; a copy to a GPU is queued and not waited for."""
        if device.type == "cpu":
            return self
        moved = self.starts.pin_memory().to(device, non_blocking=True)
        return DocumentBounds(moved, self.longest, tuple(self.starts.tolist()))


def document_bounds(positions: torch.Tensor) -> DocumentBounds:
    """Returns the bounds of documents; from positions on a GPU it waits for the device.

    Args:
        positions: (B, S) int64, each token's position in its document; a row begins a document.
    """
    follows = torch.zeros_like(positions, dtype=torch.bool)
    follows[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    first_tokens = (~follows.flatten()).nonzero().flatten()
    starts = torch.cat([first_tokens, first_tokens.new_tensor([positions.numel()])])
    return DocumentBounds(starts.to(torch.int32), int(starts.diff().max()))


def row_bounds(rows: int, tokens: int, device: torch.device) -> DocumentBounds:
    """Returns the bounds of ``rows`` documents of ``tokens`` each: rows without a boundary inside."""
    starts = range(0, (rows + 1) * tokens, tokens)
    device_starts = torch.arange(0, starts.stop, tokens, dtype=torch.int32, device=device)
    return DocumentBounds(device_starts, tokens, tuple(starts))


class PackedMask(NamedTuple):
    """What a document mask says."""

    starts: torch.Tensor
    """(n + 1,) int32."""
    longest: int
    """Tokens of the longest document."""
    window: int
    """Number of tokens that a query sees, its own with them; 0 for all of its document before it."""


def pack_mask(bounds: DocumentBounds, window: int) -> torch.Tensor:
    """Returns a document mask, (n + 1, longest, window + 1) int32 with strides (1, 0, 0).

    Args:
        bounds: of the documents.
        window: number of tokens that a query sees, its own with them; 0 for all.
    """
    # A size of 1 would be a case of its own for the compiler; a longer bound costs the kernel nothing.
    mask: Any = bounds.starts.view(-1, 1, 1).expand(-1, max(2, bounds.longest), window + 1)
    # For `attention=ring`, whose host plans by them: it needn't wait for a device to read them.
    mask.document_starts = bounds.on_host
    return mask  # type: ignore[no-any-return]


def is_packed_mask(mask: object) -> bool:
    """Returns whether what a layer got as its mask is a document mask; other masks are bool or floating."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32 and mask.dim() == 3


def unpack_mask(mask: torch.Tensor) -> PackedMask:
    """Returns what `pack_mask` put into a mask, (n + 1, longest, window + 1) int32."""
    return PackedMask(mask[:, 0, 0], mask.shape[1], mask.shape[2] - 1)


def dense_mask(mask: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Returns (B, 1, S, S) bool, what a document mask stands for; for comparisons.

    Args:
        mask: (n + 1, longest, window + 1).
        rows: B.
        tokens: S.
    """
    starts, _, window = unpack_mask(mask)
    token = torch.arange(rows * tokens, device=mask.device)
    document = (torch.searchsorted(starts[1:-1].contiguous(), token, right=True)).view(rows, tokens)
    distance = torch.arange(tokens, device=mask.device)[:, None] - torch.arange(tokens, device=mask.device)
    visible = (distance >= 0) & (distance < (window or tokens))
    return (visible & (document[:, :, None] == document[:, None, :])).unsqueeze(1)


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Computes causal attention within documents: torch's kernel for 16 bits on a GPU, else `reference_attention`.

    So a proof in float64 goes the same way up to here, on any device.

    Args:
        query: (B, H, S, E).
        key: (B, K, S, E), K dividing H.
        value: (B, K, S, E').
        mask: (n + 1, longest, window + 1) int32, `pack_mask`.
        scale: factor on the scores; 1 / sqrt(E) by default.

    Returns:
        (B, S, H, E').
    """
    # As torch's own functions, so that a TorchFunctionMode can take its place (`parallel.ring_attention`).
    if has_torch_function((query, key, value)):
        replaced: torch.Tensor = handle_torch_function(
            document_attention, (query, key, value), query, key, value, mask, scale
        )
        return replaced
    rows, _, tokens, size = query.shape
    scale = 1.0 / math.sqrt(size) if scale is None else float(scale)
    # (B, heads, S, E) to (T, heads, E); models transpose what their linears give, so that this is a view mostly.
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    starts, longest, window = unpack_mask(mask)
    if not _has_kernel(query):
        output = reference_attention(flat_query, flat_key, flat_value, starts, window, scale)
        return output.unflatten(0, (rows, tokens))
    value_size = value.shape[-1]
    kernel_size = -(-max(size, value_size) // KERNEL_MULTIPLE) * KERNEL_MULTIPLE
    # Zeros add nothing to scores; those of values give columns that are dropped.
    flat_query, flat_key, flat_value = (
        x if x.shape[-1] == kernel_size else functional.pad(x, (0, kernel_size - x.shape[-1]))
        for x in (flat_query, flat_key, flat_value)
    )
    output = varlen_kernel(flat_query, flat_key, flat_value, starts, longest, window - 1, scale)
    if value_size != kernel_size:
        output = output[..., :value_size]
    return output.unflatten(0, (rows, tokens))


def _has_kernel(query: torch.Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)


@torch.library.custom_op("meshwright::reference_attention", mutates_args=())
def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Computes what the kernel does, in any dtype on any device, a document at a time.

    Args:
        query: (T, H, E).
        key: (T, K, E).
        value: (T, K, E').
        starts: (n + 1,) int32.
        window: number of tokens that a query sees; 0 for all.
        scale: factor on the scores.

    Returns:
        (T, H, E').
    """
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    for run in _runs(starts):
        weights = _weights(query[run], key[run], window, scale)
        # (K, G, L, L) x (K, 1, L, E') to (L, K G, E').
        heads = weights @ value[run].transpose(0, 1).unsqueeze(1)
        output[run] = heads.flatten(0, 1).transpose(0, 1)
    return output


@torch.library.custom_op("meshwright::reference_attention_backward", mutates_args=())
def _reference_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value; shapes as in `reference_attention`."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    groups = key.shape[1], query.shape[1] // key.shape[1]
    for run in _runs(starts):
        weights = _weights(query[run], key[run], window, scale)
        # (L, H, .) to (K, G, L, .): query heads beside their key head.
        grad_heads, query_heads = (x[run].transpose(0, 1).unflatten(0, groups) for x in (upstream, query))
        key_heads, value_heads = (x[run].transpose(0, 1).unsqueeze(1) for x in (key, value))
        grad_weights = grad_heads @ value_heads.mT
        # Softmax: dS = P (dP - sum(dP P)).
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
        grads[0][run] = (grad_scores @ key_heads).flatten(0, 1).transpose(0, 1)
        # A key head's gradient is the sum over its query heads.
        grads[1][run] = (grad_scores.mT @ query_heads).sum(1).transpose(0, 1)
        grads[2][run] = (weights.mT @ grad_heads).sum(1).transpose(0, 1)
    return grads


def _runs(starts: torch.Tensor) -> list[slice]:
    bounds = starts.tolist()
    return [slice(first, stop) for first, stop in pairwise(bounds)]


def _weights(query: torch.Tensor, key: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """Returns the softmax of a document's masked scores, (K, G, L, L), from (L, K G, E) and (L, K, E)."""
    length, heads = query.shape[:2]
    query_heads = query.transpose(0, 1).unflatten(0, (key.shape[1], heads // key.shape[1]))
    scores = query_heads @ key.transpose(0, 1).unsqueeze(1).mT * scale
    token = torch.arange(length, device=query.device)
    distance = token[:, None] - token
    return scores.masked_fill((distance < 0) | (distance >= (window or length)), -math.inf).softmax(-1)


@reference_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@_reference_backward.register_fake
def _(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: FunctionCtx, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    *tensors, ctx.window, ctx.scale = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]


def _differentiate(ctx: FunctionCtx, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = _reference_backward(upstream, *ctx.saved_tensors, ctx.window, ctx.scale)  # type: ignore[attr-defined]
    return *grads, None, None, None


reference_attention.register_autograd(_differentiate, setup_context=_save)

REFERENCE_OPERATOR: TorchFunction = torch.ops.meshwright.reference_attention
"""Operator behind `reference_attention`."""
