"""Ties an exchange into a graph that computed nothing of it, so that all ranks run its backward."""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx

from meshwright.torch_compat.tensors import tree_flatten, tree_unflatten


class _Tie(torch.autograd.Function):
    """Returns a tensor as it is; its backward runs that of another one too, whose gradient is zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, result: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(returned)
        return result.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (returned,) = ctx.saved_tensors
        return upstream[0], torch.zeros_like(returned)


def tied(result: object, returned: torch.Tensor) -> object:
    """Returns a nested result whose backward reaches ``returned: (N, D)``, though nothing was computed of it."""
    leaves, structure = tree_flatten(result)
    for index, leaf in enumerate(leaves):
        # all of them: the loss may read some alone
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[index] = _Tie.apply(leaf, returned)
    return tree_unflatten(leaves, structure)
