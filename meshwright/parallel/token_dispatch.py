"""Tokens go to the ranks that hold their experts, and the experts' outputs come back.

Each (token, expert) pair that the router chose is a slot. Slots are sorted by expert, so those for one rank lie
together and the counts per expert say all that the receiver must know. The sender weighs and sums what comes back, so
weights never travel. Source: Lepikhin et al., GShard (2021), section 3.2; Gale et al., MegaBlocks (2023), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.collectives import all_gather_tokens, reduce_scatter_tokens
from meshwright.parallel.forward_stack import Forward
from meshwright.parallel.row_copies import RowCopies
from meshwright.spec.experts import ExpertRows
from meshwright.torch_compat.tensors import is_view


def exchange(tensor: torch.Tensor, axis_group: AxisGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Sends each rank its rows and returns the rows that came, both in rank order; without a gradient.

    Args:
        tensor: (n_sent, ...) rows, those for rank 0 first; n_sent is the sum of ``sent``.
        axis_group: the ranks.
        sent: rows for each rank.
        received: rows from each rank.
    """
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    axis_group.all_to_all_rows(out, tensor, received, sent).wait()
    return out


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.axis_group, ctx.sent, ctx.received = axis_group, sent, received
        return exchange(x, axis_group, sent, received)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange(upstream[0], ctx.axis_group, ctx.received, ctx.sent), None, None, None


def exchange_with_grad(
    tensor: torch.Tensor, axis_group: AxisGroup, sent: list[int], received: list[int]
) -> torch.Tensor:
    """Returns `exchange` of ``tensor: (n_sent, ...)``; the gradients of its rows travel back."""
    out: torch.Tensor = _ExchangeRows.apply(tensor, axis_group, sent, received)
    return out


class _ZeroGradWeights(torch.autograd.Function):
    """Ties weights that nothing went through into the graph: their gradient is zero, not absent."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0], *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def _as_fresh_tensor(output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns ``output`` in a shape, never as a view: what models add to it in place would lose FSDP2's hook."""
    output = output if output.shape == shape else output.view(shape)
    return output.clone() if is_view(output) else output


class Dispatch:
    """Replaces an experts module's forward: sends tokens to their experts' ranks and brings the outputs back.

    Args:
        module: holds this rank's experts alone; its own forward computes them.
        rows: the module as the whole model has it.
        axis_group: the ranks that hold the layer's experts together, in the order of the experts.
        replicas: ranks whose tokens are equal; each sends its share of them. None where all tokens differ.
        compute: the module's own forward.
    """

    def __init__(
        self, module: nn.Module, rows: ExpertRows, axis_group: AxisGroup, replicas: AxisGroup | None, compute: Forward
    ) -> None:
        self._module, self._rows, self._axis_group, self._replicas = module, rows, axis_group, replicas
        self._compute = compute
        spans = [rows.span(index, axis_group.size) for index in range(axis_group.size)]
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
        """Sends slots out, computes those that come in, and sums what comes back.

        Args:
            tokens: (T, D).
            index: (T, k) experts of each token; X or more where a slot is to be skipped.
            weights: (T, k).
        """
        chosen, k = index.reshape(-1), index.shape[1]
        # Stable, so that the order of an expert's slots, and with it every sum over them, is the same in each run.
        experts, order = torch.sort(chosen, stable=True)
        # The inverse permutation: where in the sorted order slot (token, j) lies.
        slot_position = torch.empty_like(order)
        slot_position[order] = torch.arange(len(order), device=order.device)
        # Unlike bincount this doesn't wait for the device.
        counts = torch.searchsorted(experts, torch.arange(self._rows.experts + 1, device=order.device)).diff()
        sent, received, local = self._exchange_counts(counts)
        # Skipped slots have index X or more, so they lie at the end of the order and aren't sent.
        slot_position = slot_position if sum(sent) == len(order) else slot_position.clamp(max=sum(sent))
        slots = RowCopies(order[: sum(sent)] // k, slot_position.view(-1, k))
        expert_outputs = self._compute_experts(
            exchange_with_grad(slots.copy(tokens), self._axis_group, sent, received), local
        )
        returned = exchange_with_grad(expert_outputs, self._axis_group, received, sent)
        return (slots.by_row(returned) * weights.unsqueeze(-1)).sum(dim=1).to(tokens.dtype)

    def _exchange_counts(self, counts: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """Tells every rank how many slots come for each of its experts.

        Returns:
            Slots for each rank, slots from each rank, and the local expert of each slot that comes.
        """
        local_experts, size = self._experts_of_rank[self._axis_group.index], self._axis_group.size
        incoming_counts = exchange(counts, self._axis_group, self._experts_of_rank, [local_experts] * size).view(
            size, local_experts
        )
        counts_on_host = torch.cat([counts, incoming_counts.sum(dim=1)]).tolist()  # one wait for the device, not two
        sent, offset = [], 0
        for experts_of_rank in self._experts_of_rank:
            sent.append(sum(counts_on_host[offset : offset + experts_of_rank]))
            offset += experts_of_rank
        received = counts_on_host[offset:]
        experts = torch.arange(local_experts, device=counts.device).repeat(size)
        return sent, received, torch.repeat_interleave(experts, incoming_counts.reshape(-1), output_size=sum(received))

    def _compute_experts(self, tokens: torch.Tensor, expert_of_token: torch.Tensor) -> torch.Tensor:
        """Runs this rank's experts: ``tokens: (N, D)``, ``expert_of_token: (N,)`` counted on this rank, unweighted."""
        if not len(tokens):
            return _ZeroGradWeights.apply(tokens, *(getattr(self._module, name) for name in self._rows.parameters))
        # By position: the kernel that takes the module's place may call its arguments otherwise.
        outputs: torch.Tensor = self._compute(tokens, expert_of_token.unsqueeze(1), tokens.new_ones(len(tokens), 1))
        return outputs
