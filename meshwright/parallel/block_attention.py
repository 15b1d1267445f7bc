"""Attention of some queries with a block of keys, with the log-sum-exp by which such blocks are merged.

Queries and keys lie in segments, one after the other, as for `torch.nn.attention.varlen`; a segment's queries see its
keys alone. On a GPU torch's FlashAttention computes all segments at once, or cuDNN's kernel where they are of one size
and no window cuts them; elsewhere the CPU's kernel computes a segment at a time. On a GPU other types than the 16 bits
of these kernels, as a proof in float64 has, are computed by plain products.
Source: Dao, FlashAttention-2 (2023); Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from meshwright.parallel.document_attention import KERNEL_MULTIPLE
from meshwright.torch_compat.block_kernels import (
    Window,
    cpu_backward,
    cpu_forward,
    cudnn_backward,
    cudnn_forward,
    flash_backward,
    flash_forward,
    takes_cudnn,
)

MASKED_QUERIES = 512
"""Queries of which the CPU's kernel gets a mask at once: a window's mask then grows with the window, not with S."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of queries and keys, and what a query sees of its segment's keys."""

    query_lengths: tuple[int, ...]
    """Tokens of each segment's queries."""
    key_lengths: tuple[int, ...]
    """Tokens of each segment's keys."""
    window: Window
    """Tokens to the left and right of its own that a query sees, its last query aligned with its last key."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which partial outputs and gradients add up: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention within segments; every query must see a key.

    Args:
        query: (T, H, E).
        key: (U, K, E), K dividing H.
        value: (U, K, E').
        segments: of both.
        scale: factor on the scores.

    Returns:
        Output (T, H, E') and log-sum-exp (T, H) in the type of accumulation.
    """
    size = value.shape[-1]
    query, key, value = _pad_heads(query, key, value)
    if (whole := _cudnn_piece(query, key, value, segments)) is not None:
        output, log_sums = cudnn_forward(whole.queries(query), whole.keys(key), whole.keys(value), whole.causal, scale)
        return _flatten(output)[..., :size], _flatten(log_sums)
    if _has_kernel(query):
        starts, longest = _bounds(segments, query.device)
        output, log_sums = flash_forward(query, key, value, starts, longest, segments.window, scale)
        return output[..., :size], log_sums.transpose(0, 1)
    output = query.new_empty(query.shape)
    log_sums = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
    forward = _plain_forward if query.is_cuda else cpu_forward
    for piece in _pieces(segments, query):
        local, local_sums = forward(
            piece.queries(query), piece.keys(key), piece.keys(value), piece.causal, piece.mask, scale
        )
        piece.queries(output).copy_(local)
        piece.queries(log_sums.unsqueeze(-1)).copy_(local_sums.unsqueeze(-1))
    return output[..., :size], log_sums


def attend_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    segments: Segments,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what these keys add to the gradients of query, key and value, in the types of these or wider.

    With the output and the log-sum-exp over all keys of a query, the gradients of its blocks of keys add up to those
    of its whole attention: dS = P (dP - sum(dO O)), P = exp(S - log-sum-exp). Source: FlashAttention-2, algorithm 2.

    Args:
        upstream: gradient of the output, (T, H, E').
        query: (T, H, E).
        key: (U, K, E).
        value: (U, K, E').
        output: (T, H, E'), over all keys.
        log_sums: (T, H), over all keys.
        segments: of both.
        scale: factor on the scores.
    """
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    query, key, value, upstream, output = _pad_heads(query, key, value, upstream, output)
    if (whole := _cudnn_piece(query, key, value, segments)) is not None:
        block_grads = cudnn_backward(
            whole.queries(upstream.contiguous()), whole.queries(query), whole.keys(key), whole.keys(value),
            whole.queries(output.contiguous()), whole.queries(log_sums.unsqueeze(-1)).squeeze(-1), whole.causal, scale,
        )  # fmt: skip
        grads = tuple(_flatten(grad) for grad in block_grads)
    elif _has_kernel(query):
        starts, longest = _bounds(segments, query.device)
        flat_sums = log_sums.transpose(0, 1).contiguous()
        grads = flash_backward(upstream, query, key, value, output, flat_sums, starts, longest, segments.window, scale)
    else:
        wide = accumulation_dtype(query.dtype)
        grads = tuple(x.new_zeros(x.shape, dtype=wide) for x in (query, key, value))  # type: ignore[assignment]
        backward = _plain_backward if query.is_cuda else cpu_backward
        for piece in _pieces(segments, query):
            local_grads = backward(
                piece.queries(upstream), piece.queries(query), piece.keys(key), piece.keys(value),
                piece.queries(output), piece.queries(log_sums.unsqueeze(-1)).squeeze(-1), piece.causal, piece.mask,
                scale,
            )  # fmt: skip
            for take, grad, local in zip((piece.queries, piece.keys, piece.keys), grads, local_grads):
                take(grad).add_(local)
    grad_query, grad_key, grad_value = (grad[..., :size] for grad, size in zip(grads, sizes))
    return grad_query, grad_key, grad_value


def merge(
    output: torch.Tensor, log_sums: torch.Tensor, block_output: torch.Tensor, block_log_sums: torch.Tensor
) -> None:
    """Adds the attention over a block of keys to that over others, in place.

    Each output is a mean of values weighted by exp(scores); their log-sum-exps are the logarithms of the weights' sums.

    Args:
        output: (..., H, E') in the type of accumulation.
        log_sums: (..., H) in the same; -inf where no key was seen.
        block_output: (..., H, E').
        block_log_sums: (..., H).
    """
    total = torch.logaddexp(log_sums, block_log_sums)
    output.mul_((log_sums - total).exp_().unsqueeze(-1))
    output.addcmul_(block_output.to(output.dtype), (block_log_sums - total).exp_().unsqueeze(-1))
    log_sums.copy_(total)


def _pad_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns heads (..., E) of one size that the kernel takes; zeros add nothing to scores or to values."""
    size = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        size = -(-size // KERNEL_MULTIPLE) * KERNEL_MULTIPLE
    return tuple(x if x.shape[-1] == size else functional.pad(x, (0, size - x.shape[-1])) for x in tensors)


def _has_kernel(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _plain_scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Returns the masked scores of query heads beside their key head, (B, K, G, L, M)."""
    scores = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -math.inf)
    return scores if mask is None else scores + mask


def _plain_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `cpu_forward` does, on any device."""
    scores = _plain_scores(query, key, causal, mask, scale)
    log_sums = scores.logsumexp(-1)
    output = (scores - log_sums.unsqueeze(-1)).exp() @ value.unsqueeze(2)
    return output.flatten(1, 2), log_sums.flatten(1, 2)


def _plain_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes what `cpu_backward` does, on any device."""
    groups = key.shape[1], query.shape[1] // key.shape[1]
    query_heads, upstream, output = (x.unflatten(1, groups) for x in (query, upstream, output))
    scores = _plain_scores(query, key, causal, mask, scale)
    weights = (scores - log_sums.unflatten(1, groups).unsqueeze(-1)).exp()
    grad_weights = upstream @ value.unsqueeze(2).mT
    grad_scores = weights * (grad_weights - (upstream * output).sum(-1, keepdim=True)) * scale
    # A key head's gradient is the sum over its query heads.
    grad_key = (grad_scores.mT @ query_heads).sum(2)
    grad_value = (weights.mT @ upstream).sum(2)
    return (grad_scores @ key.unsqueeze(2)).flatten(1, 2), grad_key, grad_value


def _flatten(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` (B, H, L, ...) as (B L, H, ...)."""
    return x.transpose(1, 2).flatten(0, 1)


def _cudnn_piece(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments) -> _Piece | None:
    """Returns all segments as the one piece that cuDNN's kernel takes; None where it doesn't take them."""
    left, right = segments.window
    sizes = set(zip(segments.query_lengths, segments.key_lengths))
    if not _has_kernel(query) or left >= 0 or right > 0 or len(sizes) > 1:
        return None
    ((queries, keys),) = sizes
    if right == 0 and queries != keys:
        return None
    (piece,) = _pieces(segments, query)
    is_taken = takes_cudnn(piece.queries(query), piece.keys(key), piece.keys(value), piece.causal)
    return piece if is_taken else None


def _bounds(segments: Segments, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Returns the first tokens of the segments, (n + 1,) int32 of queries and of keys, and the longest of each."""
    lengths = segments.query_lengths, segments.key_lengths
    query_starts, key_starts = (_starts(item, device) for item in lengths)
    return (query_starts, key_starts), (max(lengths[0]), max(lengths[1]))


def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns (n + 1,) int32: where segments of the given lengths begin, and where the last ends."""
    if len(set(lengths)) == 1:
        return torch.arange(0, sum(lengths) + 1, lengths[0], dtype=torch.int32, device=device)
    # Pinned, so that the host doesn't wait for the copy.
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory()
    return starts.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some queries of segments of one size, and the keys that they see."""

    count: int
    """Segments, one after the other."""
    query_offset: int
    key_offset: int
    query_length: int
    """Of a whole segment."""
    key_length: int
    query_span: tuple[int, int]
    """Of each segment."""
    key_span: tuple[int, int]
    causal: bool
    mask: torch.Tensor | None
    """(queries, keys) added to the scores."""

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (count, H, queries, E), a view of the piece's queries in ``x: (T, H, E)``."""
        return _view(x, self.count, self.query_offset, self.query_length, self.query_span)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (count, K, keys, E), a view of the piece's keys in ``x: (U, K, E)``."""
        return _view(x, self.count, self.key_offset, self.key_length, self.key_span)


def _view(x: torch.Tensor, count: int, offset: int, length: int, span: tuple[int, int]) -> torch.Tensor:
    segments = x[offset : offset + count * length].unflatten(0, (count, length))
    return segments[:, span[0] : span[1]].transpose(1, 2)


def _pieces(segments: Segments, like: torch.Tensor) -> Iterator[_Piece]:
    """Yields what the CPU's kernel computes at once: all segments where they are equal, else each by itself."""
    query_lengths, key_lengths = segments.query_lengths, segments.key_lengths
    if len(set(zip(query_lengths, key_lengths))) == 1:
        yield from _masked_pieces(len(query_lengths), 0, 0, query_lengths[0], key_lengths[0], segments.window, like)
        return
    query_offset = key_offset = 0
    for queries, keys in zip(query_lengths, key_lengths):
        yield from _masked_pieces(1, query_offset, key_offset, queries, keys, segments.window, like)
        query_offset, key_offset = query_offset + queries, key_offset + keys


def _masked_pieces(
    count: int, query_offset: int, key_offset: int, queries: int, keys: int, window: Window, like: torch.Tensor
) -> Iterator[_Piece]:
    """Yields the pieces of equal segments: one without a window, else runs of queries with the keys around them."""
    left, right = window
    offsets = count, query_offset, key_offset, queries, keys
    if left < 0 and (right < 0 or queries == keys):
        yield _Piece(*offsets, (0, queries), (0, keys), causal=right == 0, mask=None)
        return
    shift = keys - queries
    for start in range(0, queries, MASKED_QUERIES):
        stop = min(queries, start + MASKED_QUERIES)
        first_key = max(0, start + shift - left) if left >= 0 else 0
        last_key = min(keys, stop + shift + right) if right >= 0 else keys
        key_places = torch.arange(first_key, last_key, device=like.device)
        distance = torch.arange(start, stop, device=like.device)[:, None] + shift - key_places
        hidden = distance < -right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (distance > left)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)
        yield _Piece(*offsets, (start, stop), (first_key, last_key), causal=False, mask=mask)
