"""Lets a sharding group's plain linear modules compute in chunks, beside the collectives at the group's two ends.

The model's code calls its modules one by one. Where a tensor enters a group, the products of all trained plain column
linears that may read it are computed at once, chunk by chunk; each module hands out its product when it is called with
that very tensor. Where it is called with another one, as wide, its product is of that, and the other was made in vain:
nothing is learned from it, since a recomputed layer must do again what it did. Whatever else reads the tensor (an
adapter, a gate, a module with a forward of its own) gets it whole, and the gradient that it sends back is summed with
those of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrize

from meshwright.parallel import tensor_hooks
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.overlapped_products import Overlap, column_products, row_product


def is_overlappable(module: nn.Module) -> bool:
    """Returns whether a module is a product with a weight of its own, which can be computed in chunks."""
    return tensor_hooks.is_plain_product(module) and not parametrize.is_parametrized(module)


class ColumnEntry(tensor_hooks.Once):
    """Where tensors enter a group: moves each once, and computes the products of its readers on the way.

    Args:
        move: the plain movement, for tensors that no linear module of the group reads.
        linears: the group's plain column linears; their forward is replaced.
        overlap: the ranks and the chunks.
    """

    def __init__(self, move: tensor_hooks.Move, linears: Sequence[nn.Module], overlap: Overlap) -> None:
        super().__init__(self._enter)
        self._plain_move, self._linears, self._overlap = move, tuple(linears), overlap
        self._asking: nn.Module | None = None
        self._products: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        """What was entered and its product, of those that haven't asked for it."""
        for linear in self._linears:
            wrap_forward(
                linear,
                ForwardLayer.TENSOR,
                f"its product is computed in {overlap.chunks} chunks beside tp's traffic",
                partial(self._hand_out, linear),
            )

    def __call__(self, x: torch.Tensor, reader: nn.Module | None = None) -> torch.Tensor:
        """Returns ``x`` moved, as `Once` does."""
        self._asking = reader
        return super().__call__(x, reader)

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor moved, with the products of its readers prepared."""
        readers = [linear for linear in self._linears if self._is_reader(linear, x)]
        if not readers:
            return self._plain_move(x)
        rows = x if x.dim() == 3 else x.unsqueeze(0)
        weights = [linear.weight for linear in readers]
        entered, *products = column_products(rows, weights, list(map(_is_transposed, readers)), self._overlap)
        if x.dim() == 2:
            entered, products = entered.squeeze(0), [product.squeeze(0) for product in products]
        self._products.update(zip(readers, ((entered, product) for product in products)))
        return entered

    def _is_reader(self, linear: nn.Module, x: torch.Tensor) -> bool:
        """Returns whether a linear module may read a tensor that the asking one reads.

        One whose weight is frozen doesn't save its input, so that the model's code may write into that before others
        read it: such a module's product is made for itself alone.
        """
        if not _can_chunk(linear, x) or linear.weight.shape[1 if _is_transposed(linear) else 0] != x.shape[-1]:
            return False
        is_shared = self._asking is None or self._asking.weight.requires_grad
        return linear is self._asking or (is_shared and linear.weight.requires_grad)

    def _hand_out(self, linear: nn.Module, plain: Forward) -> Forward:
        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            entered, product = self._products.pop(linear, (None, None))
            if product is None or not args or args[0] is not entered:
                return plain(*args, **kwargs)
            return product if linear.bias is None else product + linear.bias

        return forward


def sum_row_product(module: nn.Module, move: tensor_hooks.Move, overlap: Overlap) -> None:
    """Makes a plain linear module's output, of which each rank has a summand, the sum, chunk by chunk.

    Args:
        module: its forward is replaced; its bias is added after the sum.
        move: the sum of a whole output, for tensors that can't come in chunks.
        overlap: the ranks and the chunks.
    """

    def wrap(_plain: Forward) -> Forward:
        plain_sum = tensor_hooks.summed_product(module, move)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not _can_chunk(module, x):
                return plain_sum(x)
            rows = x if x.dim() == 3 else x.unsqueeze(0)
            y = row_product(rows, module.weight, _is_transposed(module), overlap)
            y = y if x.dim() == 3 else y.squeeze(0)
            return y if module.bias is None else y + module.bias

        return forward

    purpose = f"its product is summed over ranks in {overlap.chunks} chunks, then the bias added"
    wrap_forward(module, ForwardLayer.TENSOR, purpose, wrap)


def _can_chunk(linear: nn.Module, x: torch.Tensor) -> bool:
    """Returns whether ``x`` is (B, S, K) or (T, K) of the weight's own type, which no autocast changes on the way."""
    is_cast = x.dtype != linear.weight.dtype or torch.is_autocast_enabled(x.device.type)
    return x.dim() in (2, 3) and not is_cast


def _is_transposed(linear: nn.Module) -> bool:
    """Returns whether a plain product's weight is (N, K), as `nn.Linear` has it; transformers' Conv1D has (K, N)."""
    return isinstance(linear, nn.Linear)
