"""Differentiable collectives on activations: each pairs a movement forward with its transpose backward.

``copy_to_group`` (Megatron's f) stands where a tensor that all ranks hold equal enters split work: identity forward,
all-reduce backward. ``reduce_from_group`` (Megatron's g) stands where split work ends: all-reduce forward, identity
backward. ``all_gather_tokens`` and ``reduce_scatter_tokens`` do the same where tokens are split between the two.
Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation (2022),
section 4.2.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel import group_operators, selective
from meshwright.parallel.axis_group import AxisGroup


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup) -> torch.Tensor:
        ctx.axis_group = axis_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.axis_group.is_traced:
            return group_operators.all_reduce(upstream[0], ctx.axis_group.operator_name), None
        grad = upstream[0].contiguous()
        if grad is upstream[0]:
            grad = grad.clone()  # autograd may hand this very tensor to another branch
        ctx.axis_group.all_reduce(grad).wait()
        return grad, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup) -> torch.Tensor:
        if axis_group.is_traced:
            return group_operators.all_reduce(x, axis_group.operator_name)

        def summed() -> torch.Tensor:
            # In its own memory: what makes it, a product of matrices, doesn't keep it for backward.
            out = selective.own_copy(x)
            axis_group.all_reduce(out).wait()
            return out.detach()  # not a view: code may write into it

        return selective.kept_collective(summed)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0], None


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup, dim: int, partial: bool) -> torch.Tensor:
        ctx.axis_group, ctx.dim, ctx.partial = axis_group, dim, partial
        return all_gather_dim(x, axis_group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = upstream[0]
        # g-bar's backward: each rank's gradient is a summand; where all hold the same one, a sum would multiply it.
        if ctx.partial:
            return reduce_scatter_dim(grad, ctx.axis_group, ctx.dim), None, None, None
        return local_chunk(grad, ctx.axis_group, ctx.dim), None, None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis_group: AxisGroup, dim: int, partial: bool) -> torch.Tensor:
        ctx.axis_group, ctx.dim = axis_group, dim
        if not partial:
            return local_chunk(x, axis_group, dim).clone()
        return selective.kept_collective(lambda: reduce_scatter_dim(x, axis_group, dim))

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather_dim(upstream[0], ctx.axis_group, ctx.dim), None, None, None


def copy_to_group(x: torch.Tensor, axis_group: AxisGroup) -> torch.Tensor:
    """Megatron's f: returns ``x`` (any shape, equal on all ranks) for split work; its gradient is all-reduced."""
    return axis_group.apply(_CopyToGroup, x, axis_group)


def reduce_from_group(x: torch.Tensor, axis_group: AxisGroup) -> torch.Tensor:
    """Megatron's g: all-reduces ``x`` (any shape, partial over the group), in place if it can; its gradient passes."""
    return axis_group.apply(_ReduceFromGroup, x, axis_group)


def all_gather_tokens(x: torch.Tensor, axis_group: AxisGroup, dim: int, partial: bool) -> torch.Tensor:
    """All-gathers a split ``dim``: (..., n, ...) on each rank becomes (..., size * n, ...) on all.

    Args:
        x: this rank's part, as large as every other's.
        axis_group: the ranks, in the order of the parts.
        dim: which dim is split.
        partial: whether each rank's gradient is a part of a sum (then it is summed), or equal on all.
    """
    return axis_group.apply(_AllGatherTokens, x, axis_group, dim, partial)


def reduce_scatter_tokens(x: torch.Tensor, axis_group: AxisGroup, dim: int, partial: bool) -> torch.Tensor:
    """Returns this rank's chunk of ``x``, of any shape, with 1/size of ``dim``; of the ranks' sum where ``partial``."""
    return axis_group.apply(_ReduceScatterTokens, x, axis_group, dim, partial)


def all_gather_dim(x: torch.Tensor, axis_group: AxisGroup, dim: int) -> torch.Tensor:
    """All-gathers ``dim``: (..., n, ...) becomes (..., size * n, ...), in rank order, without a gradient."""
    shard, dim, size = x.contiguous(), dim % x.dim(), axis_group.size
    gathered_shape = (*shard.shape[:dim], size * shard.shape[dim], *shard.shape[dim + 1 :])
    # Where no dimension before it has several parts, as of one row's tokens, shards in rank order are the result.
    is_outermost = math.prod(shard.shape[:dim]) == 1
    if axis_group.is_traced:
        shards = group_operators.all_gather(shard, axis_group.operator_name, size)
        return shards.reshape(gathered_shape) if is_outermost else torch.cat(shards.unbind(), dim=dim)
    out = shard.new_empty(gathered_shape if is_outermost else (size, *shard.shape))
    axis_group.all_gather(out.view(-1), shard.view(-1)).wait()
    return out if is_outermost else torch.cat(out.unbind(), dim=dim)


def reduce_scatter_dim(x: torch.Tensor, axis_group: AxisGroup, dim: int) -> torch.Tensor:
    """Reduce-scatters ``dim``: (..., size * n, ...), partial over the group, becomes (..., n, ...); no gradient."""
    dim, size = dim % x.dim(), axis_group.size
    shape = [*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]]
    # The collective takes (ranks, ...) in memory order, which the tokens of one row are already in.
    is_outermost = math.prod(x.shape[:dim]) == 1
    shards = x.contiguous().view(size, *shape) if is_outermost else torch.stack(x.chunk(size, dim=dim))
    if axis_group.is_traced:
        return group_operators.reduce_scatter(shards, axis_group.operator_name)
    out = x.new_empty(shape)
    axis_group.reduce_scatter(out.view(-1), shards.view(-1)).wait()
    return out


def local_chunk(x: torch.Tensor, axis_group: AxisGroup, dim: int) -> torch.Tensor:
    """Returns this rank's chunk of ``x``, of any shape: a view with 1/size of ``dim``."""
    return x.chunk(axis_group.size, dim=dim)[axis_group.index]
