"""Tokens go to the ranks that hold their experts, and the experts' outputs come back.

Each (token, expert) pair that the router chose is a slot. Slots are sorted by expert, so those for one rank lie
together and the counts per expert say all that the receiver must know. The sender weighs and sums what comes back, so
weights never travel. Source: Lepikhin et al., GShard (2021), section 3.2; Gale et al., MegaBlocks (2023), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.collectives import all_gather_tokens, reduce_scatter_tokens
from meshwright.spec.experts import ExpertRows


def exchange(tensor: torch.Tensor, axis_group: AxisGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Sends each rank its rows and returns the rows that came, both in rank order; without a gradient.

    Args:
        tensor: (sum(sent), ...) rows, those for rank 0 first.
        axis_group: the ranks.
        sent: rows for each rank.
        received: rows from each rank.
    """
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = dist.all_to_all_single(out, tensor, list(received), list(sent), group=axis_group.group, async_op=True)
    row_bytes = tensor[:1].nbytes
    PendingCollective(
        [work], lambda: None, axis_group, "all_to_all", row_bytes * (sum(sent) - sent[axis_group.index])
    ).wait()
    return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis_group: AxisGroup, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.axis_group, ctx.sent, ctx.received = axis_group, sent, received
        return exchange(x, axis_group, sent, received)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return exchange(upstream[0], ctx.axis_group, ctx.received, ctx.sent), None, None, None


class _Spread(torch.autograd.Function):
    """Copies each token to its slots; a token's gradient is the sum over its slots, always in the same order."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (place,) = ctx.saved_tensors
        return _by_token(upstream[0], place, ctx.k).sum(dim=1), None, None, None


class _Idle(torch.autograd.Function):
    """Ties weights that nothing went through into the graph: their gradient is zero, not absent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0], *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def _by_token(slots: torch.Tensor, place: torch.Tensor, k: int) -> torch.Tensor:
    """Returns (T, k, D) from slots sorted by expert; those that were skipped, at the end of the order, are zero."""
    missing = len(place) - len(slots)
    if missing:
        slots = torch.cat([slots, slots.new_zeros(missing, slots.shape[1])])
    return slots.index_select(0, place).view(-1, k, slots.shape[1])


def _owned(found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns ``found`` in a shape, never as a view: what models add to it in place would lose FSDP2's hook."""
    found = found if found.shape == shape else found.view(shape)
    return found.clone() if found._is_view() else found


class Dispatch:
    """What a rank's experts module does instead of its own forward.

    Args:
        module: holds this rank's experts alone; its own forward computes them.
        rows: the module as the whole model has it.
        axis_group: the ranks that hold the layer's experts together, in the order of the experts.
        same: ranks whose tokens are equal; each sends its share of them. None where all tokens differ.
    """

    def __init__(self, module: nn.Module, rows: ExpertRows, axis_group: AxisGroup, same: AxisGroup | None) -> None:
        self._module, self._rows, self._axis_group, self._same = module, rows, axis_group, same
        self._compute = module.forward
        spans = [rows.span(index, axis_group.size) for index in range(axis_group.size)]
        self._held = [stop - start for start, stop in spans]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the weighted sum over each token's experts, wherever these are."""
        named = dict(zip(self._rows.arguments, args)) | kwargs
        hidden, index, weights = (named[name] for name in self._rows.arguments)
        tokens, index = hidden.reshape(-1, hidden.shape[-1]), index.reshape(-1, index.shape[-1])
        weights = weights.reshape(index.shape)
        if self._same is None:
            return _owned(self._routed(tokens, index, weights), hidden.shape)
        short = -len(tokens) % self._same.size
        if short:
            tokens = torch.cat([tokens, tokens.new_zeros(short, tokens.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(short, weights.shape[1])])
            index = torch.cat([index, index.new_full((short, index.shape[1]), self._rows.experts)])
        own = [reduce_scatter_tokens(item, self._same, 0, False) for item in (tokens, index, weights)]
        whole = all_gather_tokens(self._routed(*own), self._same, 0, False)
        return _owned(whole[: len(whole) - short], hidden.shape)

    def _routed(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends slots out, computes those that come in, and sums what comes back.

        Args:
            tokens: (T, D).
            index: (T, k) experts of each token; X or more where a slot is to be skipped.
            weights: (T, k).
        """
        chosen, k = index.reshape(-1), index.shape[1]
        experts, order = torch.sort(chosen, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        # Unlike bincount this doesn't wait for the device.
        counts = torch.searchsorted(experts, torch.arange(self._rows.experts + 1, device=order.device)).diff()
        sent, received, local = self._announce(counts)
        rows = _Spread.apply(tokens, order[: sum(sent)], place, k)
        done = self._computed(_Exchanged.apply(rows, self._axis_group, sent, received), local)
        back = _Exchanged.apply(done, self._axis_group, received, sent)
        return (_by_token(back, place, k) * weights.unsqueeze(-1)).sum(dim=1).to(tokens.dtype)

    def _announce(self, counts: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """Tells every rank how many slots come for each of its experts.

        Returns:
            Slots for each rank, slots from each rank, and the local expert of each slot that comes.
        """
        held, size = self._held[self._axis_group.index], self._axis_group.size
        coming = exchange(counts, self._axis_group, self._held, [held] * size).view(size, held)
        known = torch.cat([counts, coming.sum(dim=1)]).tolist()  # one wait for the device, not two
        sent, at = [], 0
        for number in self._held:
            sent.append(sum(known[at : at + number]))
            at += number
        received = known[at:]
        experts = torch.arange(held, device=counts.device).repeat(size)
        return sent, received, torch.repeat_interleave(experts, coming.reshape(-1), output_size=sum(received))

    def _computed(self, tokens: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Runs this rank's experts: ``tokens: (N, D)``, ``local: (N,)`` the expert of each, unweighted."""
        if not len(tokens):
            return _Idle.apply(tokens, *(getattr(self._module, name) for name in self._rows.parameters))
        # By position: the kernel that takes the module's place may call its arguments otherwise.
        found: torch.Tensor = self._compute(tokens, local.unsqueeze(1), tokens.new_ones(len(tokens), 1))
        return found
