"""Tokens go to the ranks that hold their experts, and the experts' outputs come back.

Each (token, expert) pair that the router chose is a slot. Slots are sorted by expert, so those for one rank lie
together and the counts per expert say all that the receiver must know. The sender weighs and sums what comes back, so
weights never travel. Source: Lepikhin et al., GShard (2021), section 3.2; Gale et al., MegaBlocks (2023), section 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.collectives import all_gather_tokens, reduce_scatter_tokens
from meshwright.parallel.forward_stack import Forward
from meshwright.parallel.kept_exchange import is_kept, kept
from meshwright.parallel.row_codec import RowCodec
from meshwright.parallel.row_exchange import Journey, Leg, RowExchange, exchange, travel_in_turns
from meshwright.spec.experts import LayerExperts
from meshwright.torch_compat.tensors import is_view

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""T tokens on their way to experts: (T, D), their experts (T, k) and these experts' weights (T, k)."""


class _CopyToSlots(torch.autograd.Function):
    """Copies each token to its slots; a token's gradient is the sum over its slots, always in the same order."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tokens: torch.Tensor, order: torch.Tensor, slot_position: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(slot_position)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_position,) = ctx.saved_tensors
        return _by_token(upstream[0], slot_position, ctx.k).sum(dim=1), None, None, None


class _ZeroGradWeights(torch.autograd.Function):
    """Ties weights that nothing went through into the graph: their gradient is zero, not absent."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0], *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def _by_token(slots: torch.Tensor, slot_position: torch.Tensor, k: int) -> torch.Tensor:
    """Returns (T, k, D) from slots sorted by expert; those that were skipped, at the end of the order, are zero."""
    skipped = len(slot_position) - len(slots)
    if skipped:
        slots = torch.cat([slots, slots.new_zeros(skipped, slots.shape[1])])
    return slots.index_select(0, slot_position).view(-1, k, slots.shape[1])


def _as_fresh_tensor(output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns ``output`` in a shape, never as a view: what models add to it in place would lose FSDP2's hook."""
    output = output if output.shape == shape else output.view(shape)
    return output.clone() if is_view(output) else output


@dataclass(frozen=True, slots=True)
class _Slots:
    """The (token, expert) pairs of T tokens, sorted by expert."""

    order: torch.Tensor
    """(T k,) slot of each place in the order; those that are skipped are last."""
    position: torch.Tensor
    """(T k,) place of each slot."""
    counts: torch.Tensor
    """(X,) slots of each expert."""

    @classmethod
    def of(cls, index: torch.Tensor, experts: int) -> _Slots:
        """Sorts ``index: (T, k)`` of a layer's X experts."""
        # Stable, so that the order of an expert's slots, and with it every sum over them, is the same in each run.
        chosen, order = torch.sort(index.reshape(-1), stable=True)
        # The inverse permutation: where in the sorted order slot (token, j) lies.
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        # Unlike bincount this doesn't wait for the device.
        counts = torch.searchsorted(chosen, torch.arange(experts + 1, device=order.device)).diff()
        return cls(order, position, counts)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """The ranks of one rank's mixtures, and how tokens travel between them."""

    axis_group: AxisGroup
    """Those that hold a layer's experts together, in the order of the experts."""
    replicas: AxisGroup | None = None
    """Ranks whose tokens are equal; each sends its share of them. None where all tokens differ."""
    node: ExpertNode | None = None
    """``axis_group`` as nodes, to each of which a token travels once; None sends it once for each expert."""
    chunks: int = 1
    """Of tokens, one of which travels while the experts compute another."""
    codec: RowCodec | None = None
    """Rounds what goes to experts: tokens, and the gradients of what they return. None sends exact values."""


class Dispatch:
    """Replaces an experts module's forward: sends tokens to their experts' ranks and brings the outputs back.

    Args:
        module: holds this rank's experts alone; its own forward computes them.
        rows: the module as the whole model has it.
        groups: the ranks that hold the layer's experts together, and how tokens travel between them.
        compute: the module's own forward.
    """

    def __init__(self, module: nn.Module, rows: LayerExperts, groups: ExpertGroups, compute: Forward) -> None:
        self._module, self._rows, self._compute = module, rows, compute
        self._axis_group, self._replicas, self._chunks = groups.axis_group, groups.replicas, groups.chunks
        self._codec = groups.codec
        size = groups.axis_group.size
        spans = [rows.span(index, size) for index in range(size)]
        self._experts_of_rank = [stop - start for start, stop in spans]

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum over each token's experts, wherever these are."""
        arguments = dict(zip(self._rows.arguments, args)) | kwargs
        hidden, index, weights = (arguments[name] for name in self._rows.arguments)
        tokens, index = hidden.reshape(-1, hidden.shape[-1]), index.reshape(-1, index.shape[-1])
        weights = weights.reshape(index.shape)
        if self._replicas is None:
            return _as_fresh_tensor(self._route(tokens, index, weights), hidden.shape)
        # Each replica sends an equal share of the tokens; padded ones have expert X, which is skipped.
        padding = -len(tokens) % self._replicas.size
        if padding:
            tokens = torch.cat([tokens, tokens.new_zeros(padding, tokens.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(padding, weights.shape[1])])
            index = torch.cat([index, index.new_full((padding, index.shape[1]), self._rows.experts)])
        shard = [reduce_scatter_tokens(tensor, self._replicas, 0, False) for tensor in (tokens, index, weights)]
        # Replicas hold equal tokens (tp without sequence), so the outputs are gathered, not summed.
        gathered = all_gather_tokens(self._route(*shard), self._replicas, 0, False)
        return _as_fresh_tensor(gathered[: len(gathered) - padding], hidden.shape)

    def _route(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends tokens out, computes those that come in, and sums what comes back.

        Args:
            tokens: (T, D).
            index: (T, k) experts of each token; X or more where a slot is to be skipped.
            weights: (T, k).
        """
        if self._chunks == 1:
            return travel_in_turns(self._journeys([(tokens, index, weights)]))[0]
        # As many on every rank, however many tokens it has.
        bounds = [len(tokens) * number // self._chunks for number in range(self._chunks + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        parts = list(zip(*(tensor.split(sizes) for tensor in (tokens, index, weights))))
        return torch.cat(travel_in_turns(self._journeys(parts)))

    def _journeys(self, parts: Sequence[Routed]) -> list[Journey]:
        """Returns the journeys of chunks of tokens to their experts and back; it waits for the device once."""
        routes = kept(lambda: self._find_routes([index for _, index, _ in parts]))
        return [self._journey(part, *route) for part, route in zip(parts, routes)]

    def _find_routes(self, indices: Sequence[torch.Tensor]) -> list[tuple[_Slots, Leg, torch.Tensor]]:
        """Returns of each chunk of ``indices: (T, k)`` its slots, their way, and the local expert of what comes."""
        slots = [_Slots.of(index, self._rows.experts) for index in indices]
        legs = self._exchange_counts(torch.stack([chunk.counts for chunk in slots], dim=1))
        return [(chunk, *leg) for chunk, leg in zip(slots, legs)]

    def _journey(self, part: Routed, slots: _Slots, leg: Leg, local: torch.Tensor) -> Journey:
        """Sends tokens once for each of their experts, and weighs and sums what comes back.

        Args:
            part: T tokens (T, D), their experts (T, k) and weights (T, k).
            slots: of the experts.
            leg: the way to the experts.
            local: the expert of each slot that comes, counted on this rank.
        """
        tokens, index, weights = part
        k = index.shape[1]
        # Skipped slots have index X or more, so they lie at the end of the order and aren't sent.
        outward = RowExchange(_CopyToSlots.apply(tokens, slots.order[: sum(leg.sent)], slots.position, k), leg)
        yield
        homeward = RowExchange(self._compute_experts(outward.wait(), local), leg.reversed())
        yield
        returned = homeward.wait()
        return (_by_token(returned, slots.position, k) * weights.unsqueeze(-1)).sum(dim=1).to(tokens.dtype)

    def _exchange_counts(self, counts: torch.Tensor) -> list[tuple[Leg, torch.Tensor]]:
        """Tells every rank how many slots come for each of its experts, of ``counts: (X, chunks)``.

        Returns:
            For each chunk the slots for and from each rank, and the local expert of each slot that comes.
        """
        local_experts, size = self._experts_of_rank[self._axis_group.index], self._axis_group.size
        incoming = exchange(counts, self._axis_group, self._experts_of_rank, [local_experts] * size).view(
            size, local_experts, -1
        )
        on_host = torch.cat([counts, incoming.sum(dim=1)]).t().tolist()  # one wait for the device, not two
        experts, legs = torch.arange(local_experts, device=counts.device).repeat(size), []
        for chunk, counted in enumerate(on_host):
            sent, offset = [], 0
            for experts_of_rank in self._experts_of_rank:
                sent.append(sum(counted[offset : offset + experts_of_rank]))
                offset += experts_of_rank
            keeps = (True,) if is_kept() else ()
            leg = Leg(self._axis_group, sent, counted[offset:], keeps=keeps, codec=self._codec)
            slots_of_expert = incoming[:, :, chunk].reshape(-1)
            local = torch.repeat_interleave(experts, slots_of_expert, output_size=sum(leg.received))
            legs.append((leg, local))
        return legs

    def _compute_experts(self, tokens: torch.Tensor, expert_of_token: torch.Tensor) -> torch.Tensor:
        """Runs this rank's experts: ``tokens: (N, D)``, ``expert_of_token: (N,)`` counted on this rank, unweighted."""
        if not len(tokens):
            return _ZeroGradWeights.apply(tokens, *self._module.parameters())
        # By position: the kernel that takes the module's place may call its arguments otherwise.
        outputs: torch.Tensor = self._compute(tokens, expert_of_token.unsqueeze(1), tokens.new_ones(len(tokens), 1))
        return outputs
