"""Attention over split tokens while keys and values go round the ranks of ``cp``: no rank ever has a whole row's.

Each rank has an early and a late run of every row. It computes with its own keys first; in step t with those of the
rank t places before it, which travel while it computes with the ones before. Partial outputs are merged by their
log-sum-exp. Backward sends keys and values round once more, and what a rank adds to their gradients goes back to their
owner, who adds up in at least float32. `spec.key_ring` says which keys a rank needs: others aren't sent, and each block
comes from its owner, so that a rank between two others carries nothing for them. Documents and windows cut what is
computed; what is sent depends on the window alone, which the planner knows.
Source: Liu et al., Ring Attention (2023), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_attention import accumulation_dtype, attend, attend_backward, merge
from meshwright.parallel.document_attention import PackedMask, document_attention, unpack_mask
from meshwright.parallel.ring_tiles import (
    Tiles,
    find_tiles,
    key_views,
    query_views,
    split_keys,
    split_queries,
    take_keys,
    take_queries,
)
from meshwright.spec.key_ring import KeyRing
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class RingRefusal(ValueError):
    """Raised for attention that can't go round a ring; the text says why, and what works instead."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The keys and values of a rank's two runs, or what a reader needs of them."""

    owner: int
    firsts: tuple[int, int]
    """First token that is here of the early and the late run."""
    keys: tuple[torch.Tensor, torch.Tensor]
    """Of each run (B, L, K, E)."""
    values: tuple[torch.Tensor, torch.Tensor]
    """Of each run (B, L, K, E')."""


@dataclass(slots=True)
class _Arrival:
    """A block that travels."""

    pending: PendingCollective
    owner: int
    buffer: torch.Tensor | None
    """What comes in, flat; None where nothing does."""


class RingCall:
    """One attention's ring.

    Args:
        axis_group: ranks of the ring.
        ring: which keys go where.
        scale: factor on the scores.
        starts: first token of each document, the rows one after the other, then B S; None for one document a row.
    """

    def __init__(self, axis_group: AxisGroup, ring: KeyRing, scale: float, starts: tuple[int, ...] | None) -> None:
        self._axis_group, self._ring, self._scale, self._starts = axis_group, ring, scale, starts

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of this rank's queries with all keys that they see.

        Args:
            query: (B, S / c, H, E), the early run and then the late one.
            key: (B, S / c, K, E), K dividing H.
            value: (B, S / c, K, E').

        Returns:
            Output (B, S / c, H, E') and log-sum-exp (B, S / c, H) in the type of accumulation.
        """
        rows, tokens, heads = query.shape[:3]
        wide = accumulation_dtype(query.dtype)
        output = query.new_zeros(rows, tokens, heads, value.shape[-1], dtype=wide)
        log_sums = query.new_full((rows, tokens, heads), -math.inf, dtype=wide)
        for block in self._blocks(key, value):
            for query_half, key_half, tiles in self._pairs(block.owner, rows):
                queries = self._run(query, query_half)
                keys, values, first = block.keys[key_half], block.values[key_half], block.firsts[key_half]
                local, local_sums = attend(
                    take_queries(queries, tiles),
                    take_keys(keys, tiles, first),
                    take_keys(values, tiles, first),
                    tiles.segments,
                    self._scale,
                )
                targets = (
                    query_views(self._run(output, query_half), tiles),
                    query_views(self._run(log_sums, query_half), tiles),
                )
                sources = split_queries(local, tiles, rows), split_queries(local_sums, tiles, rows)
                for target, target_sums, source, source_sums in zip(*targets, *sources):
                    merge(target, target_sums, source, source_sums)
        return output.to(query.dtype), log_sums

    def backward(
        self,
        upstream: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradients of query, key and value; key's and value's from all ranks that saw them.

        Args:
            upstream: gradient of the output, (B, S, H, E) of this rank's tokens.
            query: as in `forward`.
            key: as in `forward`.
            value: as in `forward`.
            output: of `forward`.
            log_sums: of `forward`.
        """
        wide, rows = accumulation_dtype(query.dtype), query.shape[0]
        query_grad, key_grad, value_grad = (torch.zeros_like(x, dtype=wide) for x in (query, key, value))
        returning: _Arrival | None = None
        for block in self._blocks(key, value):
            is_own = block.owner == self._axis_group.index
            key_grads = [self._run(key_grad, half) if is_own else _zeros(block.keys[half], wide) for half in (0, 1)]
            value_grads = [
                self._run(value_grad, half) if is_own else _zeros(block.values[half], wide) for half in (0, 1)
            ]
            for query_half, key_half, tiles in self._pairs(block.owner, rows):
                first = block.firsts[key_half]
                local_upstream, local_query, local_output, local_sums = (
                    take_queries(self._run(x, query_half), tiles) for x in (upstream, query, output, log_sums)
                )
                local_key, local_value = (take_keys(x[key_half], tiles, first) for x in (block.keys, block.values))
                grads = attend_backward(
                    local_upstream, local_query, local_key, local_value, local_output, local_sums,
                    tiles.segments, self._scale,
                )  # fmt: skip
                _add(query_views(self._run(query_grad, query_half), tiles), split_queries(grads[0], tiles, rows))
                for target, grad in ((key_grads, grads[1]), (value_grads, grads[2])):
                    _add(key_views(target[key_half], tiles, first), split_keys(grad, tiles, rows))
            if not is_own:
                self._add_returned(returning, key_grad, value_grad)
                returning = self._send_back(block.owner, [*key_grads, *value_grads], key, value)
        self._add_returned(returning, key_grad, value_grad)
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)

    # -------------------------------------------------------- what travels

    def _blocks(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[_Block]:
        """Yields this rank's block, then those of the ranks before it; the next one travels meanwhile."""
        index, size = self._axis_group.index, self._axis_group.size
        steps = [step for step in range(1, size) if self._ring.has_traffic(step)]
        arrival = self._start(steps[0], key, value) if steps else None
        own_keys, own_values = ((self._run(x, 0), self._run(x, 1)) for x in (key, value))
        yield _Block(index, (0, 0), own_keys, own_values)
        for next_step in [*steps[1:], 0] if steps else ():
            assert arrival is not None
            arrival.pending.wait()
            owner, buffer = arrival.owner, arrival.buffer
            arrival = self._start(next_step, key, value) if next_step else None
            firsts = self._ring.first_sent(owner, index)
            keys, values = self._unpack(buffer, firsts, key, value)
            yield _Block(owner, firsts, keys, values)

    def _start(self, step: int, key: torch.Tensor, value: torch.Tensor) -> _Arrival:
        """Starts sending this rank's keys to the rank ``step`` after it, and receiving from the one before it."""
        index, size = self._axis_group.index, self._axis_group.size
        owner, reader = (index - step) % size, (index + step) % size
        firsts = self._ring.first_sent(index, reader)
        parts = [self._run(x, half)[:, firsts[half] :] for x in (key, value) for half in (0, 1)]
        chunks = {reader: torch.cat([part.reshape(-1) for part in parts])} if any(x.numel() for x in parts) else {}
        buffer = self._empty(self._ring.tokens_sent(owner, index), key, value)
        outputs = {} if buffer is None else {owner: buffer}
        return _Arrival(self._axis_group.exchange(outputs, chunks), owner, buffer)

    def _send_back(self, owner: int, grads: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> _Arrival:
        """Starts sending the gradients of another rank's block to it, and receiving those of this rank's block."""
        index, size = self._axis_group.index, self._axis_group.size
        reader = (2 * index - owner) % size
        sent = torch.cat([grad.reshape(-1) for grad in grads]).to(key.dtype)
        buffer = self._empty(self._ring.tokens_sent(index, reader), key, value)
        pending = self._axis_group.exchange(
            {} if buffer is None else {reader: buffer}, {owner: sent} if sent.numel() else {}
        )
        return _Arrival(pending, reader, buffer)

    def _add_returned(self, returning: _Arrival | None, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Waits for a reader's gradients of this rank's block and adds them; (B, S / c, K, E or E'), in place."""
        if returning is None:
            return
        returning.pending.wait()
        firsts = self._ring.first_sent(self._axis_group.index, returning.owner)
        arrived = self._unpack(returning.buffer, firsts, key_grad, value_grad)
        for grad, halves in zip((key_grad, value_grad), arrived):
            for half in (0, 1):
                self._run(grad, half)[:, firsts[half] :].add_(halves[half])

    def _empty(self, tokens: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """Returns a flat buffer for keys and values of so many tokens of each row; None for none."""
        rows, _, heads, size = key.shape
        return key.new_empty(rows * tokens * heads * (size + value.shape[-1])) if tokens else None

    def _unpack(
        self, buffer: torch.Tensor | None, firsts: tuple[int, int], key: torch.Tensor, value: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Returns keys (B, L, K, E) and values (B, L, K, E') of both runs, views of a flat buffer."""
        flat = key.new_empty(0) if buffer is None else buffer
        views, offset = [], 0
        for like in (key, value):
            for first in firsts:
                shape = (like.shape[0], self._ring.run_tokens - first, *like.shape[2:])
                views.append(flat[offset : offset + math.prod(shape)].view(shape))
                offset += math.prod(shape)
        return (views[0], views[1]), (views[2], views[3])

    # -------------------------------------------------------- what sees what

    def _pairs(self, owner: int, rows: int) -> Iterator[tuple[int, int, Tiles]]:
        """Yields (half of the queries, half of the owner's keys, tiles) of all that this rank's queries see."""
        for query_half, query_run in enumerate(self._ring.runs(self._axis_group.index)):
            for key_half, key_run in enumerate(self._ring.runs(owner)):
                if key_run <= query_run:
                    for tiles in find_tiles(self._ring, query_run, key_run, rows, self._starts):
                        yield query_half, key_half, tiles

    def _run(self, x: torch.Tensor, half: int) -> torch.Tensor:
        """Returns the early (0) or the late (1) run of ``x: (B, S / c, ...)``, a view."""
        size = self._ring.run_tokens
        return x[:, half * size : (half + 1) * size]


def _add(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    for target, term in zip(targets, terms):
        target.add_(term)


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


# ------------------------------------------------------------ where models meet it

_CALL: ContextVar[RingCall] = ContextVar("ring call")


@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs `RingCall.forward` of the ring that `attend_in_ring` has made; one operator, which recompute can keep.

    Args:
        query: (B, S / c, H, E).
        key: (B, S / c, K, E).
        value: (B, S / c, K, E').

    Returns:
        Output (B, S / c, H, E') and log-sum-exp (B, S / c, H).
    """
    return _CALL.get().forward(query, key, value)


@ring_operator.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_sums = query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    return query.new_empty(*query.shape[:3], value.shape[-1]), log_sums


def _save(ctx: FunctionCtx, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.call = _CALL.get()  # type: ignore[attr-defined]


def _differentiate(
    ctx: FunctionCtx, upstream: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call: RingCall = ctx.call  # type: ignore[attr-defined]
    return call.backward(upstream, *ctx.saved_tensors)  # type: ignore[attr-defined]


ring_operator.register_autograd(_differentiate, setup_context=_save)

RING_OPERATOR: TorchFunction = torch.ops.meshwright.ring_attention
"""Operator behind `ring_operator`."""


def attend_in_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis_group: AxisGroup,
    mask: PackedMask | None = None,
    scale: float | None = None,
    document_starts: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Computes causal attention of this rank's tokens with those of all ranks.

    Args:
        query: (B, H, S / c, E).
        key: (B, K, S / c, E), K dividing H.
        value: (B, K, S / c, E').
        axis_group: ranks of the ring.
        mask: documents and window; None for whole rows.
        scale: factor on the scores; 1 / sqrt(E) by default.
        document_starts: ``mask.starts`` on the host; read off the mask where not given.

    Returns:
        (B, S / c, H, E').

    Raises:
        RingRefusal: the tensors aren't of self-attention.
    """
    rows, heads, tokens, size = query.shape
    if key.shape[2] != tokens or heads % key.shape[1]:
        raise RingRefusal(f"queries {tuple(query.shape)} and keys {tuple(key.shape)} are of other tokens")
    ring = KeyRing(axis_group.size, tokens // 2, mask.window if mask is not None else 0)
    starts = document_starts
    if mask is not None and starts is None:
        starts = tuple(mask.starts.tolist())
    if starts is not None and len(starts) == rows + 1:
        starts = None  # a document a row
    scale = 1.0 / math.sqrt(size) if scale is None else float(scale)
    token = _CALL.set(RingCall(axis_group, ring, scale, starts))
    try:
        output: torch.Tensor = RING_OPERATOR(*(x.transpose(1, 2) for x in (query, key, value)))[0]
    finally:
        _CALL.reset(token)
    return output


class RingAttention(TorchFunctionMode):
    """Makes attention inside of it go round the ring."""

    def __init__(self, axis_group: AxisGroup) -> None:
        super().__init__()
        self._axis_group = axis_group

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Replaces attention and calls any other function as it is; torch calls this for each function."""
        named = dict(kwargs or {})
        if func is document_attention:
            query, key, value, mask, scale = args
            starts = getattr(mask, "document_starts", None)
            return attend_in_ring(query, key, value, self._axis_group, unpack_mask(mask), scale, starts)
        if func is not _ATTENTION:
            return func(*args, **named)
        named |= dict(zip(_NAMES, args))
        if named.get("attn_mask") is not None:
            raise RingRefusal("a ring reads no mask that a model's own code makes")
        if not named.get("is_causal", False):
            raise RingRefusal("a ring is causal, and some of the model's attention isn't")
        if dropout := named.get("dropout_p", 0.0):
            raise RingRefusal(f"a ring drops no attention weights, here with p = {dropout:g}")
        query, key, value = (named[name] for name in _NAMES[:3])
        return attend_in_ring(query, key, value, self._axis_group, scale=named.get("scale")).transpose(1, 2)
