"""Tokens travel once to each node, or rank, that holds some of their experts, however many these are.

A token goes to the rank at the sender's place in each node that holds experts of it, and from there to the ranks of the
node that do; with it go its experts and their weights. A rank weighs and sums what its experts make of a token, a node
what its ranks do, and the sender what the nodes do, so that as little comes back as went out; each such sum is rounded
to the tokens' dtype. Source: DeepSeek-AI, DeepSeek-V3 (2024), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.parallel.forward_stack import Forward
from meshwright.parallel.kept_exchange import is_kept, kept, kept_values
from meshwright.parallel.row_copies import RowCopies
from meshwright.parallel.row_exchange import Journey, Leg, RowExchange, exchange
from meshwright.parallel.token_dispatch import Dispatch, ExpertGroups, Routed
from meshwright.spec.experts import LayerExperts


@dataclass(frozen=True, slots=True)
class _Route:
    """The ways of some tokens to their nodes, and of those that come to this rank's node to its ranks."""

    wanted_nodes: torch.Tensor
    """bool (T, N)."""
    across: Leg
    inside: Leg | None
    """None where each rank is a node."""
    slots: int
    """That this rank's experts compute."""


class _DepartRouted(torch.autograd.Function):
    """Begins to send tokens, and in one message their weights and experts; in backward it waits for both gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tokens: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.leg = leg.of_gradients()
        # In integers as wide as a weight's numbers.
        wide = weights if weights.element_size() >= 4 else weights.float()
        integers = torch.int64 if wide.element_size() == 8 else torch.int32
        leg.begin(tokens)
        leg.begin(torch.cat([wide.contiguous().view(integers), index.to(integers)], dim=1))
        return tokens.view_as(tokens), weights.view_as(weights)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leg.give_way_in_backward()
        ctx.leg.end()
        return upstream[0], upstream[1], None, None


class _ArriveRouted(torch.autograd.Function):
    """Waits for them; in backward it begins to send the gradients of tokens and weights back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, _: torch.Tensor, weights: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.leg = leg.of_gradients()
        tokens, choices = leg.end()
        numbers, experts = choices.tensor_split(2, dim=1)
        wide = torch.float64 if choices.element_size() == 8 else torch.float32
        index = experts.to(torch.int64)
        ctx.mark_non_differentiable(index)
        return tokens, numbers.contiguous().view(wide).to(weights.dtype), index

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens_grad, weights_grad = (ctx.leg.begin(grad) for grad in upstream[:2])
        return tokens_grad, weights_grad, None


class NodeDispatch(Dispatch):
    """`Dispatch` that sends a token once to each node, or rank, that holds experts of it.

    Args:
        module: as for `Dispatch`.
        rows: the module as the whole model has it.
        groups: as for `Dispatch`, with nodes.
        compute: the module's own forward.
    """

    def __init__(self, module: nn.Module, rows: LayerExperts, groups: ExpertGroups, compute: Forward) -> None:
        super().__init__(module, rows, groups, compute)
        assert groups.node is not None
        self._node = groups.node
        ranks = [rank for rank, count in enumerate(self._experts_of_rank) for _ in range(count)]
        # One entry more, for slots that are skipped: a rank behind the last.
        self._rank_of_expert = torch.tensor([*ranks, groups.axis_group.size])

    def _journeys(self, parts: Sequence[Routed]) -> list[Journey]:
        """Returns the journeys of chunks of tokens to their experts and back; it waits for the device once."""
        routes = kept(lambda: self._exchange_rows([index for _, index, _ in parts]))
        return [self._visit_nodes(part, route) for part, route in zip(parts, routes)]

    def _route(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return kept_values(super()._route(tokens, index, weights))

    def _visit_nodes(self, part: Routed, route: _Route) -> Journey:
        """Sends tokens to their nodes, and from there to their ranks; (T, D) of ``part``."""

        def visit_ranks(arrived: Routed) -> Journey:
            if route.inside is None:
                return self._compute_rows(arrived, route.slots)
            first = self._axis_group.index // self._node.size * self._node.size
            local = self._ranks(arrived[1]) - first
            # What other nodes compute is none of this one's ranks.
            local = torch.where((local >= 0) & (local < self._node.size), local, self._node.size)
            wanted = _wanted(local, self._node.size)
            return _travel(arrived, route.inside, wanted, lambda here: self._compute_rows(here, route.slots))

        return _travel(part, route.across, route.wanted_nodes, visit_ranks)

    def _ranks(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the rank in ``ep`` that holds each expert of ``index: (M, k)``; R for those that are skipped."""
        if self._rank_of_expert.device != index.device:
            self._rank_of_expert = self._rank_of_expert.to(index.device)
        return self._rank_of_expert[index.clamp(max=self._rows.experts).long()]

    def _exchange_rows(self, indices: Sequence[torch.Tensor]) -> list[_Route]:
        """Tells nodes and ranks how many rows and slots come, and waits for the device once.

        Args:
            indices: (T, k) experts of the tokens of each chunk.

        Returns:
            The ways of each chunk.
        """
        size, nodes, run = self._axis_group.size, self._node.across.size, self._node.size
        chunks, edges = len(indices), torch.arange(size + 1, device=indices[0].device)
        wanted_by_chunk, rows_of_node, forwarded = [], [], []
        for ranks in map(self._ranks, indices):
            wanted_ranks = _wanted(ranks, size)
            wanted_nodes = wanted_ranks.view(len(ranks), nodes, run).any(dim=2)
            slots_of_rank = torch.searchsorted(ranks.reshape(-1).sort().values, edges).diff()
            wanted_by_chunk.append(wanted_nodes)
            rows_of_node.append(wanted_nodes.sum(dim=0))
            forwarded.append(torch.stack([wanted_ranks.sum(dim=0), slots_of_rank], dim=1).view(nodes, run, 2))
        # To each node how many rows come, then for each of its ranks how many of them, and how many slots.
        to_nodes = torch.stack(rows_of_node, dim=1)
        message = torch.cat([to_nodes, torch.stack(forwarded, dim=1).view(nodes, -1)], dim=1)
        arrived = exchange(message, self._node.across, [1] * nodes, [1] * nodes)
        from_nodes, at_ranks = arrived[:, :chunks], arrived[:, chunks:].sum(dim=0).view(chunks, run, 2)
        on_host = [to_nodes.t(), from_nodes.t()]
        if self._node.inside is not None:
            coming = exchange(at_ranks.transpose(0, 1), self._node.inside, [1] * run, [1] * run).transpose(0, 1)
            on_host += [at_ranks[..., 0], coming[..., 0]]
            at_ranks = coming
        on_host.append(at_ranks[..., 1].sum(dim=1, keepdim=True))
        widths = [part.shape[1] for part in on_host]
        # Of what passes through, the second run of a layer needs the choices alone.
        last = (True, True) if is_kept() else ()
        first = (run == 1, True) if is_kept() else ()
        routes = []
        for wanted, counts in zip(wanted_by_chunk, torch.cat(on_host, dim=1).tolist()):
            parts = _split(counts, widths)
            across, inside = Leg(self._node.across, parts[0], parts[1], keeps=first, codec=self._codec), None
            if self._node.inside is not None:
                way = self._node.inside, parts[2], parts[3], True, last
                inside = Leg(*way, codec=self._codec)
            routes.append(_Route(wanted, across, inside, parts[-1][0]))
        return routes

    def _compute_rows(self, arrived: Routed, slots: int) -> Journey:
        """Returns the weighted sum of this rank's experts for each row, (M, D), in the rows' dtype."""
        yield from ()  # a journey without a further exchange
        tokens, index, weights = arrived
        local_experts = self._experts_of_rank[self._axis_group.index]
        start = sum(self._experts_of_rank[: self._axis_group.index])
        is_local = (index >= start) & (index < start + local_experts)
        copies = RowCopies.at(is_local, slots)
        outputs = self._compute_experts(copies.copy(tokens), copies.choose(index) - start)
        return copies.total(outputs * copies.choose(weights).unsqueeze(1)).to(tokens.dtype)


def _travel(part: Routed, leg: Leg, wanted: torch.Tensor, then: Callable[[Routed], Journey]) -> Journey:
    """Sends rows where they are wanted, goes on with those that come, and sums what comes back, (M, D).

    Args:
        part: M rows, their experts and weights.
        leg: the exchange.
        wanted: bool (M, P), by rank of the leg.
        then: the journey from there, which returns what goes back for each row that came.
    """
    tokens, index, weights = part
    copies = RowCopies.at(wanted, sum(leg.sent))
    chosen = index.index_select(0, copies.source)
    departed = _DepartRouted.apply(copies.copy(tokens), copies.copy(weights), chosen, leg)
    yield
    leg.give_way()
    arrived_tokens, arrived_weights, arrived_index = _ArriveRouted.apply(*departed, leg)
    del departed
    outputs = yield from then((arrived_tokens, arrived_index, arrived_weights))
    del arrived_tokens, arrived_weights, arrived_index
    # Their sum is linear in them, so that backward doesn't need what comes back.
    homeward = RowExchange(outputs, leg.reversed(keeps=(False,)))
    yield
    return copies.total(homeward.wait())


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
