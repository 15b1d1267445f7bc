"""Differentiable products of a sharding group's linear modules, computed in chunks beside ``tp``'s collectives.

One autograd node holds the products that read a tensor, its gather, and in backward their input gradients' sum and all
their weight gradients, so that backward can send the one under the other. In compiled layers each way is one operator,
opaque to the compiler as those of `parallel.group_operators` are, and kept in order with them.

Shapes: B rows, S tokens, n = S / size where tokens are split, K features that a product reads, N that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel import selective
from meshwright.parallel.chunked_products import (
    Overlap,
    column_backward,
    column_forward,
    multiply,
    row_backward,
    row_forward,
    weight_grad,
)
from meshwright.parallel.collectives import all_gather_dim
from meshwright.parallel.group_operators import define, find_group


def row_product(x: torch.Tensor, weight: torch.Tensor, is_transposed: bool, overlap: Overlap) -> torch.Tensor:
    """Returns the sum over the ranks of x W, chunk by chunk.

    Args:
        x: (B, S, K), this rank's features.
        weight: W, (K, N); (N, K) where transposed.
        is_transposed: whether ``weight`` is W^T, as of `nn.Linear`.
        overlap: the ranks; with ``sequence`` a rank gets its tokens of the sum.

    Returns:
        (B, S, N) or, with ``sequence``, (B, n, N).
    """
    settings = (overlap, is_transposed, weight.requires_grad)
    if overlap.axis_group.is_traced:
        return overlap.axis_group.apply(_RowProduct, x, weight, settings, None)
    # What backward reads is saved by a node of its own ahead of the product, as a linear module's is: a recompute stops
    # there, and neither computes nor sends what nothing reads.
    operands: list[FunctionCtx] = []
    x = overlap.axis_group.apply(_KeepOperands, x, weight, operands)
    return overlap.axis_group.apply(_RowProduct, x, weight, settings, operands)


def column_products(
    x: torch.Tensor, weights: Sequence[torch.Tensor], are_transposed: Sequence[bool], overlap: Overlap
) -> tuple[torch.Tensor, ...]:
    """Returns the input of a group's column linears on all ranks, and its products with some of their weights.

    Args:
        x: (B, S, K), equal on all ranks; with ``sequence`` (B, n, K), this rank's tokens.
        weights: W of each product, (K, N_i); (N_i, K) where transposed.
        are_transposed: whether each is W^T.
        overlap: the ranks.

    Returns:
        (B, S, K), whose gradient is a summand on each rank; and (B, S, N_i) of each weight.
    """
    are_trained = tuple(weight.requires_grad for weight in weights)
    arguments = (x, overlap, tuple(are_transposed), are_trained, *weights)
    return cast("tuple[torch.Tensor, ...]", overlap.axis_group.apply(_ColumnProducts, *arguments))


class _KeepOperands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, operands: list[FunctionCtx]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        operands.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0], None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        settings: tuple[Overlap, bool, bool],
        operands: list[FunctionCtx] | None,
    ) -> torch.Tensor:
        overlap, is_transposed, ctx.is_trained = settings
        ctx.is_transposed, ctx.overlap, ctx.operands = is_transposed, overlap, operands
        if operands is None:
            ctx.save_for_backward(x, weight)
        matrix, group = weight.t() if is_transposed else weight, overlap.axis_group
        if group.is_traced:
            return row_operator(x, matrix, group.operator_name, overlap.chunks, overlap.sequence)
        return selective.kept_collective(lambda: row_forward(x, matrix, overlap))

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        overlap, group = ctx.overlap, ctx.overlap.axis_group
        if ctx.operands is None:
            x, weight = ctx.saved_tensors
        else:
            x, weight = ctx.operands[0].saved_tensors
        matrix, grad = weight.t() if ctx.is_transposed else weight, upstream[0]
        if not overlap.sequence:
            # Nothing travels: each rank has the gradient of the sum.
            x_grad = torch.matmul(grad, matrix.t())
        elif group.is_traced:
            x_grad, grad = row_backward_operator(grad, matrix, group.operator_name, overlap.chunks, group.size)
        else:
            x_grad, grad = row_backward(grad, matrix, overlap)
        matrix_grad = weight_grad(x, grad, ctx.is_transposed) if ctx.is_trained else None
        return x_grad, matrix_grad, None, None


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> tuple[torch.Tensor, ...]:
        # Without names: where nothing needs a gradient, Dynamo takes a forward with as many arguments as it has names
        # for one without a context.
        x, overlap, are_transposed, are_trained, *weights = args
        group = overlap.axis_group
        ctx.overlap, ctx.are_transposed, ctx.are_trained = overlap, are_transposed, are_trained
        matrices = [weight.t() if turned else weight for weight, turned in zip(weights, are_transposed)]
        if not group.is_traced:
            # An output that nobody reads has no gradient.
            ctx.set_materialize_grads(False)
        if not overlap.sequence:
            outputs = [x.view_as(x), *(multiply(x, matrix) for matrix in matrices)]
        elif group.is_traced:
            outputs = column_operator(x, matrices, group.operator_name, overlap.chunks, group.size)
        else:
            outputs = column_forward(x, matrices, overlap)
        # Without a trained weight nothing reads the input again.
        ctx.is_shard = group.is_traced and overlap.sequence and overlap.gathers_again
        ctx.save_for_backward(*weights, *([x if ctx.is_shard else outputs[0]] if any(are_trained) else []))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        overlap, group, count = ctx.overlap, ctx.overlap.axis_group, len(ctx.are_transposed)
        # Once: each reading of them asks a recomputed layer for its tensors.
        saved = ctx.saved_tensors
        weights, x = saved[:count], saved[count:]
        used = [number for number in range(count) if upstream[1 + number] is not None]
        grads = [upstream[1 + number] for number in used]
        matrices = [weights[number].t() if ctx.are_transposed[number] else weights[number] for number in used]
        trained = [number for number in used if ctx.are_trained[number]]
        read = x[0] if trained else None
        if read is not None and ctx.is_shard:
            read = all_gather_dim(read, group, 1)
        call = (upstream[0], grads, matrices, read)
        turned = [ctx.are_transposed[number] for number in used]
        are_trained = [ctx.are_trained[number] for number in used]
        if group.is_traced:
            settings = (group.operator_name, overlap.chunks, group.size if overlap.sequence else 0)
            x_grad, *weight_grads = column_backward_operator(*call, turned, are_trained, *settings)
        else:
            x_grad, *weight_grads = column_backward(*call, turned, are_trained, overlap)
        grad_of = dict(zip(trained, weight_grads))
        return (x_grad, None, None, None, *(grad_of.get(number) for number in range(count)))


def _row_shape(x: torch.Tensor, matrix: torch.Tensor, group: str, chunks: int, sequence: bool) -> torch.Tensor:
    size = find_group(group).size if sequence else 1
    return x.new_empty(x.shape[0], x.shape[1] // size, matrix.shape[1])


@define("row_product", _row_shape, is_kept=True)
def row_operator(x: torch.Tensor, matrix: torch.Tensor, group: str, chunks: int, sequence: bool) -> torch.Tensor:
    """Returns the sum over a group of x W: (B, S, N), with ``sequence`` this rank's tokens of it."""
    return row_forward(x, matrix, Overlap(find_group(group), chunks, sequence))


def _row_backward_shapes(
    grad: torch.Tensor, matrix: torch.Tensor, group: str, chunks: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, tokens, width = grad.shape
    return grad.new_empty(rows, size * tokens, matrix.shape[0]), grad.new_empty(rows, size * tokens, width)


@define("row_product_backward", _row_backward_shapes)
def row_backward_operator(
    grad: torch.Tensor, matrix: torch.Tensor, group: str, chunks: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a row linear's input gradient and the gathered gradient of ``grad: (B, n, N)``."""
    return row_backward(grad, matrix, Overlap(find_group(group), chunks, True))


def _column_shapes(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], group: str, chunks: int, size: int
) -> list[torch.Tensor]:
    rows, tokens = x.shape[0], size * x.shape[1]
    return [x.new_empty(rows, tokens, width) for width in (x.shape[2], *(matrix.shape[1] for matrix in matrices))]


@define("column_products", _column_shapes, is_kept=True)
def column_operator(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], group: str, chunks: int, size: int
) -> list[torch.Tensor]:
    """Returns the gathered tokens of ``x: (B, n, K)`` and their products with ``matrices: (K, N)``."""
    return column_forward(x, matrices, Overlap(find_group(group), chunks, True))


def _column_backward_shapes(
    input_grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor],
    matrices: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    are_transposed: Sequence[bool],
    are_trained: Sequence[bool],
    group: str,
    chunks: int,
    size: int,
) -> list[torch.Tensor]:
    (rows, tokens, _), width = grads[0].shape, matrices[0].shape[0]
    shapes = [
        matrix.shape[::-1] if turned else matrix.shape
        for matrix, turned, is_trained in zip(matrices, are_transposed, are_trained)
        if is_trained
    ]
    return [grads[0].new_empty(rows, tokens // max(1, size), width), *(grads[0].new_empty(shape) for shape in shapes)]


@define("column_products_backward", _column_backward_shapes)
def column_backward_operator(
    input_grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor],
    matrices: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    are_transposed: Sequence[bool],
    are_trained: Sequence[bool],
    group: str,
    chunks: int,
    size: int,
) -> list[torch.Tensor]:
    """Returns the input gradient of column linears, (B, S or n, K), and that of each trained weight.

    ``size`` is 0 without ``sequence``; the other arguments are those of `column_backward`.
    """
    overlap = Overlap(find_group(group), chunks, size > 0)
    return column_backward(input_grad, grads, matrices, x, are_transposed, are_trained, overlap)
