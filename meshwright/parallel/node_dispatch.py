"""Tokens travel once to each node, or rank, that holds some of their experts, however many these are.

A token goes to the rank at the sender's place in each node that holds experts of it, and from there to the ranks of the
node that do; with it go its experts and their weights. A rank weighs and sums what its experts make of a token, a node
what its ranks do, and the sender what the nodes do, so that as little comes back as went out. Source: DeepSeek-AI,
DeepSeek-V3 (2024), section 3.2.2; the paper rounds to float8 on the way out, and here nothing is rounded that one
device wouldn't round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import Forward
from meshwright.parallel.row_copies import PlacedCopies
from meshwright.parallel.token_dispatch import Dispatch, exchange, exchange_with_grad
from meshwright.spec.experts import ExpertRows


@dataclass(frozen=True, slots=True)
class ExpertNode:
    """The ranks of one ``ep`` group as nodes."""

    inside: AxisGroup | None
    """The ranks of this rank's node; None where each rank is one."""
    across: AxisGroup
    """The ranks at this rank's place in all nodes, in the nodes' order."""

    @property
    def size(self) -> int:
        """Ranks of a node."""
        return self.inside.size if self.inside else 1


@dataclass(frozen=True, slots=True)
class _Leg:
    """One exchange of rows within a group, and how many rows go to and come from each of its ranks."""

    axis_group: AxisGroup
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True)
class _Routed:
    """Rows on their way to experts."""

    tokens: torch.Tensor
    """(M, D)."""
    index: torch.Tensor
    """(M, k) experts of each row; X or more where a slot is to be skipped."""
    weights: torch.Tensor
    """(M, k)."""


class _ExchangeRouted(torch.autograd.Function):
    """`exchange` of tokens, weights and experts; the gradients of tokens and weights travel back, in this order."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tokens: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, leg: _Leg
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.leg = leg
        # Experts and weights travel as one message, in integers as wide as a weight's numbers.
        wide = weights if weights.element_size() >= 4 else weights.float()
        integers = torch.int64 if wide.element_size() == 8 else torch.int32
        choices = torch.cat([wide.contiguous().view(integers), index.to(integers)], dim=1)
        arrived, choices = (exchange(part, leg.axis_group, leg.sent, leg.received) for part in (tokens, choices))
        arrived_weights, arrived_index = choices.tensor_split(2, dim=1)
        arrived_weights = arrived_weights.contiguous().view(wide.dtype).to(weights.dtype)
        arrived_index = arrived_index.to(index.dtype)
        ctx.mark_non_differentiable(arrived_index)
        return arrived, arrived_weights, arrived_index

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leg, needed = ctx.leg, ctx.needs_input_grad
        grads = [
            exchange(grad, leg.axis_group, leg.received, leg.sent) if is_needed else None
            for grad, is_needed in zip(upstream[:2], needed)
        ]
        return *grads, None, None


class NodeDispatch(Dispatch):
    """`Dispatch` that sends a token once to each node, or rank, that holds experts of it.

    Args:
        module: as for `Dispatch`, with the arguments up to ``compute``.
        rows: the module as the whole model has it.
        axis_group: all ranks that hold the layer's experts together.
        replicas: ranks whose tokens are equal.
        compute: the module's own forward.
        node: ``axis_group`` as nodes.
    """

    def __init__(
        self,
        module: nn.Module,
        rows: ExpertRows,
        axis_group: AxisGroup,
        replicas: AxisGroup | None,
        compute: Forward,
        node: ExpertNode,
    ) -> None:
        super().__init__(module, rows, axis_group, replicas, compute)
        self._node = node
        ranks = [rank for rank, count in enumerate(self._experts_of_rank) for _ in range(count)]
        # One entry more, for slots that are skipped: a rank behind the last.
        self._rank_of_expert = torch.tensor([*ranks, axis_group.size])

    def _route(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends tokens to their nodes, from there to their ranks, computes those that come, and sums what comes back.

        Args:
            tokens: (T, D).
            index: (T, k) experts of each token; X or more where a slot is to be skipped.
            weights: (T, k).
        """
        ranks = self._ranks(index)
        wanted_ranks = _wanted(ranks, self._axis_group.size)
        wanted_nodes = wanted_ranks.view(len(ranks), -1, self._node.size).any(dim=2)
        across, inside, slots = self._exchange_row_counts(ranks, wanted_ranks, wanted_nodes)

        def compute(routed: _Routed) -> torch.Tensor:
            return self._compute_rows(routed, slots)

        def forward_inside(routed: _Routed) -> torch.Tensor:
            if inside is None:
                return compute(routed)
            first = self._axis_group.index // self._node.size * self._node.size
            local = self._ranks(routed.index) - first
            # What other nodes compute is none of this one's ranks.
            local = torch.where((local >= 0) & (local < self._node.size), local, self._node.size)
            return _travel(routed, inside, _wanted(local, self._node.size), compute)

        return _travel(_Routed(tokens, index, weights), across, wanted_nodes, forward_inside)

    def _ranks(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the rank in ``ep`` that holds each expert of ``index: (M, k)``; R for those that are skipped."""
        if self._rank_of_expert.device != index.device:
            self._rank_of_expert = self._rank_of_expert.to(index.device)
        return self._rank_of_expert[index.clamp(max=self._rows.experts)]

    def _exchange_row_counts(
        self, ranks: torch.Tensor, wanted_ranks: torch.Tensor, wanted_nodes: torch.Tensor
    ) -> tuple[_Leg, _Leg | None, int]:
        """Tells nodes and ranks how many rows and slots come, and waits for the device once.

        Args:
            ranks: (T, k) rank of each slot.
            wanted_ranks: bool (T, R).
            wanted_nodes: bool (T, N).

        Returns:
            The exchange between nodes, that inside the node, and the slots that this rank's experts compute.
        """
        size, nodes = self._axis_group.size, self._node.across.size
        edges = torch.arange(size + 1, device=ranks.device)
        slots_of_rank = torch.searchsorted(ranks.reshape(-1).sort().values, edges).diff()
        rows_of_node, rows_of_rank = wanted_nodes.sum(dim=0), wanted_ranks.sum(dim=0)
        # To each node how many rows come, then for each of its ranks how many of them, and how many slots.
        message = torch.cat([part.view(nodes, -1) for part in (rows_of_node, rows_of_rank, slots_of_rank)], dim=1)
        arrived = exchange(message, self._node.across, [1] * nodes, [1] * nodes)
        on_host = [rows_of_node, arrived[:, 0]]
        if self._node.inside is None:
            on_host.append(arrived[:, 2].sum(dim=0, keepdim=True))
        else:
            run = self._node.size
            forwarded = arrived[:, 1:].sum(dim=0).view(2, run).t()
            coming = exchange(forwarded, self._node.inside, [1] * run, [1] * run)
            on_host += [forwarded[:, 0], coming[:, 0], coming[:, 1].sum(dim=0, keepdim=True)]
        parts = _split(torch.cat(on_host).tolist(), [len(part) for part in on_host])
        inside = None if self._node.inside is None else _Leg(self._node.inside, parts[2], parts[3])
        return _Leg(self._node.across, parts[0], parts[1]), inside, parts[-1][0]

    def _compute_rows(self, routed: _Routed, slots: int) -> torch.Tensor:
        """Returns the weighted sum of this rank's experts for each row, (M, D), in the rows' dtype."""
        local_experts = self._experts_of_rank[self._axis_group.index]
        start = sum(self._experts_of_rank[: self._axis_group.index])
        is_local = (routed.index >= start) & (routed.index < start + local_experts)
        copies = PlacedCopies.at(is_local, slots, min(routed.index.shape[1], local_experts))
        outputs = self._compute_experts(copies.copy(routed.tokens), copies.choose(routed.index) - start)
        weighted = outputs * copies.choose(routed.weights).unsqueeze(1)
        return copies.total(weighted).to(routed.tokens.dtype)


def _travel(routed: _Routed, leg: _Leg, wanted: torch.Tensor, then: Callable[[_Routed], torch.Tensor]) -> torch.Tensor:
    """Sends rows where they are wanted, does something with those that come, and sums what comes back, (M, D).

    Args:
        routed: M rows.
        leg: the exchange.
        wanted: bool (M, P), by rank of the leg.
        then: computes what goes back for each row that came.
    """
    copies = PlacedCopies.at(wanted, sum(leg.sent), min(routed.index.shape[1], leg.axis_group.size))
    index = routed.index.index_select(0, copies.source)
    arrived = _ExchangeRouted.apply(copies.copy(routed.tokens), copies.copy(routed.weights), index, leg)
    arrived_tokens, arrived_weights, arrived_index = arrived
    outputs = then(_Routed(arrived_tokens, arrived_index, arrived_weights))
    return copies.total(exchange_with_grad(outputs, leg.axis_group, leg.received, leg.sent))


def _wanted(places: torch.Tensor, count: int) -> torch.Tensor:
    """Returns bool (M, P): whether one of ``places: (M, k)`` is each of the P; place P counts nowhere."""
    wanted = torch.zeros(len(places), count + 1, dtype=torch.bool, device=places.device)
    return wanted.scatter_(1, places, True)[:, :count]


def _split(values: list[int], sizes: list[int]) -> list[list[int]]:
    """Returns ``values`` in parts of some sizes."""
    parts, offset = [], 0
    for size in sizes:
        parts.append(values[offset : offset + size])
        offset += size
    return parts
