"""Differentiable collectives on activations: each pairs a movement forward with its transpose backward.

``entered`` is where a tensor that all ranks hold equal goes into work that is split: nothing forward, a sum backward.
``summed`` is where split work comes together: a sum forward, nothing backward. ``gathered`` and ``scattered`` do the
same where tokens are split between the two. Source: Shoeybi et al., Megatron-LM (2019), section 3 (f and g);
Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2 (g and its transpose over the sequence).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from meshwright.axes.comm.wire import Wire


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        grad = upstream[0].contiguous()
        if grad is upstream[0]:
            grad = grad.clone()  # autograd may hand this very tensor to another branch
        ctx.wire.all_reduce(grad).wait()
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        # In its own memory: what makes it, a product of matrices, doesn't keep it for backward; selective recompute,
        # which looks on as a dispatch mode, does.
        x = x.contiguous() if _get_current_dispatch_mode() is None else x.clone(memory_format=torch.contiguous_format)
        wire.all_reduce(x).wait()
        return x.detach()  # not a view: code may write into it

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, dim: int, partial: bool) -> torch.Tensor:
        ctx.wire, ctx.dim, ctx.partial = wire, dim, partial
        return gather(x, wire, dim)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        grad = upstream[0]
        if ctx.partial:
            return scatter_sum(grad, ctx.wire, ctx.dim), None, None, None
        return own_part(grad, ctx.wire, ctx.dim), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, dim: int, partial: bool) -> torch.Tensor:
        ctx.wire, ctx.dim = wire, dim
        return scatter_sum(x, wire, dim) if partial else own_part(x, wire, dim).clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return gather(upstream[0], ctx.wire, ctx.dim), None, None, None


def entered(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Returns ``x``, equal on all ranks, for work that is split; its gradient is summed over the ranks."""
    return wire.apply(_Entered, x, wire)


def summed(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Returns the sum of all ranks' ``x``, in its memory where that can be; the gradient, equal on all, passes."""
    return wire.apply(_Summed, x, wire)


def gathered(x: torch.Tensor, wire: Wire, dim: int, partial: bool) -> torch.Tensor:
    """Returns the ranks' parts of ``dim`` put together.

    Args:
        x: this rank's part, as large as every other's.
        wire: the ranks, in the order of the parts.
        dim: which dim is split.
        partial: whether each rank's gradient is a part of a sum (then it is summed), or equal on all.
    """
    return wire.apply(_Gathered, x, wire, dim, partial)


def scattered(x: torch.Tensor, wire: Wire, dim: int, partial: bool) -> torch.Tensor:
    """Returns this rank's part of ``dim``: of the sum over the ranks where ``x`` is ``partial``, else of ``x``."""
    return wire.apply(_Scattered, x, wire, dim, partial)


def gather(x: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Returns the ranks' parts of ``dim`` put together, without a gradient."""
    part = x.contiguous()
    out = part.new_empty(wire.size * part.numel())
    wire.all_gather(out, part.view(-1)).wait()
    parts = out.view(wire.size, *part.shape)
    return torch.cat(parts.unbind(), dim=dim) if dim else parts.flatten(0, 1)


def scatter_sum(x: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Returns this rank's part of ``dim`` of the sum over the ranks, without a gradient."""
    parts = torch.stack(x.chunk(wire.size, dim=dim)) if dim else x.contiguous()
    shape = list(x.shape)
    shape[dim] //= wire.size
    out = x.new_empty(shape)
    wire.reduce_scatter(out.view(-1), parts.view(-1)).wait()
    return out


def own_part(x: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Returns this rank's part of ``dim``, a view."""
    return x.chunk(wire.size, dim=dim)[wire.index]
