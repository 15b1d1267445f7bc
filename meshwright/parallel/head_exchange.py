"""Exchanges tokens for heads by all-to-all: from all features of a rank's tokens to all tokens of a rank's heads.

Source: Jacobs et al., DeepSpeed Ulysses (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel import selective
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.group_operators import define, find_group
from meshwright.spec.placement import Span

Spans = tuple[Span, ...]


def _select_runs(x: torch.Tensor, spans: Spans) -> torch.Tensor:
    """Returns (..., F'), the runs of the last dim of ``x: (..., F)``, contiguous."""
    runs = [x[..., start:stop] for start, stop in spans]
    return (runs[0] if len(runs) == 1 else torch.cat(runs, dim=-1)).contiguous()


def _width(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _covers_in_order(spans: Sequence[Spans], features: int) -> bool:
    """Returns whether the ranks' runs, one after the other, cover all features once."""
    offset = 0
    for start, stop in (run for rank_spans in spans for run in rank_spans):
        if start != offset:
            return False
        offset = stop
    return offset == features


def _exchanged_shapes(chunks: Sequence[torch.Tensor], group: str, features: Sequence[int]) -> list[torch.Tensor]:
    return [chunks[0].new_empty(*chunks[0].shape[:2], width) for width in features]


def _all_to_all_by_name(chunks: Sequence[torch.Tensor], group: str, features: Sequence[int]) -> list[torch.Tensor]:
    # The compiler lays out as it likes what it hands to an operator.
    return _all_to_all([chunk.contiguous() for chunk in chunks], features, find_group(group))


@define("tokens_for_heads", _exchanged_shapes, is_kept=True)
def tokens_for_heads(chunks: Sequence[torch.Tensor], group: str, features: Sequence[int]) -> list[torch.Tensor]:
    """Returns (B, S/c, ``features[p]``) of each rank p, as `_all_to_all` does; selective recompute keeps it.

    Args:
        chunks: for each rank, (B, S/c, F_p).
        group: the name of the ranks.
        features: of each rank.
    """
    return _all_to_all_by_name(chunks, group, features)


@define("heads_for_tokens", _exchanged_shapes)
def heads_for_tokens(chunks: Sequence[torch.Tensor], group: str, features: Sequence[int]) -> list[torch.Tensor]:
    """Returns (B, S/c, F_p) as `tokens_for_heads` does.

    Selective recompute exchanges it again, since attention keeps what it was before.
    """
    return _all_to_all_by_name(chunks, group, features)


def _to_units(x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans]) -> torch.Tensor:
    """Exchanges (B, S/c, F) for (B, S, F'), the F' features of this rank's units."""
    local_features = _width(spans[axis_group.index])
    # Chunk p: this rank's tokens of rank p's features.
    chunks = [_select_runs(x, rank_spans) for rank_spans in spans]
    return torch.cat(_exchange(chunks, [local_features] * axis_group.size, axis_group, tokens_for_heads), dim=1)


def _exchange(
    chunks: list[torch.Tensor], features: list[int], axis_group: AxisGroup, operator: Any
) -> list[torch.Tensor]:
    """Returns what `_all_to_all` does, by ``operator`` in a compiled layer's graph."""
    if axis_group.is_traced:
        return operator(chunks, axis_group.operator_name, features)  # type: ignore[no-any-return]
    return _all_to_all(chunks, features, axis_group)


def _all_to_all(chunks: Sequence[torch.Tensor], features: Sequence[int], axis_group: AxisGroup) -> list[torch.Tensor]:
    """Sends ``chunks[p]: (B, S/c, F_p)`` to rank p; returns (B, S/c, ``features[p]``) of each."""
    outputs = [chunks[0].new_empty(*chunks[0].shape[:2], width) for width in features]
    axis_group.all_to_all(outputs, chunks).wait()
    return outputs


def _to_tokens(x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans], features: int) -> torch.Tensor:
    """Exchanges (B, S, F') for (B, S/c, F); features that several ranks hold are summed."""
    # Chunk p: rank p's tokens of this rank's features.
    chunks = [features_of_rank.contiguous() for features_of_rank in x.chunk(axis_group.size, dim=1)]
    outputs = _exchange(chunks, [_width(rank_spans) for rank_spans in spans], axis_group, heads_for_tokens)
    if _covers_in_order(spans, features):
        return torch.cat(outputs, dim=-1)
    # A feature that several ranks needed (a shared key head) gets one gradient from each: they add up.
    out = x.new_zeros(*chunks[0].shape[:2], features)
    for rank_spans, features_of_rank in zip(spans, outputs):
        offset = 0
        for start, stop in rank_spans:
            out[..., start:stop] += features_of_rank[..., offset : offset + stop - start]
            offset += stop - start
    return out


class _ToUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans]) -> torch.Tensor:
        ctx.axis_group, ctx.spans, ctx.features = axis_group, spans, x.shape[-1]
        # As many bytes as the product that it was, and none that travel again.
        return selective.kept_collective(lambda: _to_units(x, axis_group, spans))

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _to_tokens(upstream[0], ctx.axis_group, ctx.spans, ctx.features), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans], features: int
    ) -> torch.Tensor:
        ctx.axis_group, ctx.spans = axis_group, spans
        return _to_tokens(x, axis_group, spans, features)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _to_units(upstream[0], ctx.axis_group, ctx.spans), None, None, None


def to_units(x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans]) -> torch.Tensor:
    """Turns (B, S/c, F), all features of some tokens, into (B, S, F'), the features of this rank's units of all tokens.

    Args:
        x: this rank's tokens.
        axis_group: the axis.
        spans: for each rank, the runs of F that its units need; what several need goes to each.
    """
    return axis_group.apply(_ToUnits, x, axis_group, spans)


def to_tokens(x: torch.Tensor, axis_group: AxisGroup, spans: Sequence[Spans], features: int) -> torch.Tensor:
    """Undoes `to_units`, where no feature belongs to several ranks: (B, S, F') to (B, S/c, F).

    Args:
        x: this rank's units of all tokens.
        axis_group: the axis.
        spans: for each rank, the runs of F that it has.
        features: F.
    """
    return axis_group.apply(_ToTokens, x, axis_group, spans, features)
