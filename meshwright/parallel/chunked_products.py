"""Products next to ``tp``'s collectives, in chunks of tokens: while one chunk travels, the next is computed.

A collective starts on the backend's own stream or thread and is waited for once the products that may hide it are
launched. Forward: chunks of a row linear's output are summed while the next are computed; with sequence parallelism the
tokens that column linears read are gathered a chunk ahead of their products. Backward: chunks of the columns' input
gradient are summed under the next ones and under all weight gradients, which are computed whole; the row's gradient is
gathered a chunk ahead. Each movement has the bytes of the plain one. Nothing here has a gradient of its own: that is
`parallel.overlapped_products`.

Source: Megatron-LM, LinearWithGradAccumulationAndAsyncCommunication, for sums under weight gradients; Wang et al.,
Overlap Communication with Dependent Computation (ASPLOS 2023), for chunks.

Shapes: B rows, S tokens, n = S / size where tokens are split, K features that a product reads, N that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.collectives import all_gather_dim
from meshwright.parallel.token_chunks import LocalChunks, chunk_bounds, put_chunk, take_chunk
from meshwright.spec.placement import Span
from meshwright.torch_compat.tensors import dispatch_mode


@dataclass(frozen=True, slots=True)
class Overlap:
    """How the products of a layer meet the collectives of ``tp``."""

    axis_group: AxisGroup
    """Ranks of ``tp``."""
    chunks: int
    """Chunks of tokens, 1 or more."""
    sequence: bool
    """Whether tokens are split over the ranks between the products."""
    gathers_again: bool = False
    """Whether backward gathers a compiled layer's tokens a second time, and forward keeps this rank's alone."""


def row_forward(x: torch.Tensor, matrix: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    """Returns the sum of x W, (B, S or n, N), of ``x: (B, S, K)`` and ``matrix: (K, N)``; without a gradient."""
    group, (rows, tokens, _), width = overlap.axis_group, x.shape, matrix.shape[1]
    if not overlap.sequence:
        out, flat = x.new_empty(rows, tokens, width), x.reshape(rows * tokens, -1)
        sums = []
        for start, stop in chunk_bounds(rows * tokens, overlap.chunks):
            chunk = out.view(rows * tokens, width)[start:stop]
            _multiply_into(chunk, flat[start:stop], matrix)
            sums.append(group.all_reduce(chunk))
        for pending in sums:
            pending.wait()
        return out
    local = LocalChunks(x, rows, tokens // group.size, width)
    # What is sent lives until it is waited for.
    scatters: list[tuple[PendingCollective, torch.Tensor, torch.Tensor, Span]] = []
    for span in chunk_bounds(tokens // group.size, overlap.chunks):
        product, part = take_chunk(x, group.size, span) @ matrix, local.part(span)
        scatters.append((group.reduce_scatter(part.view(-1), product.view(-1)), product, part, span))
    for scatter, _, part, span in scatters:
        scatter.wait()
        local.put(part, span)
    return local.out


def row_backward(grad: torch.Tensor, matrix: torch.Tensor, overlap: Overlap) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a row linear's input gradient, (B, S, K), and ``grad: (B, n, N)`` gathered, (B, S, N)."""
    gathered, (x_grad,) = _gather_products(grad, [matrix.t()], overlap)
    return x_grad, gathered


def column_forward(x: torch.Tensor, matrices: Sequence[torch.Tensor], overlap: Overlap) -> list[torch.Tensor]:
    """Returns the tokens of all ranks, (B, S, K), of ``x: (B, n, K)``, and their products with ``matrices: (K, N)``."""
    gathered, products = _gather_products(x, matrices, overlap)
    return [gathered, *products]


def _gather_products(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], overlap: Overlap
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers ``x: (B, n, K)``, a chunk ahead of the products of what has come in with ``matrices: (K, N)``."""
    group, (rows, tokens, width), spans = overlap.axis_group, x.shape, chunk_bounds(x.shape[1], overlap.chunks)
    if len(spans) == 1:
        gathered = all_gather_dim(x, group, 1)
        return gathered, [multiply(gathered, matrix) for matrix in matrices]
    gathered = x.new_empty(rows, group.size * tokens, width)
    products = [x.new_empty(rows, group.size * tokens, matrix.shape[1]) for matrix in matrices]

    def start(span: Span) -> tuple[PendingCollective, torch.Tensor, torch.Tensor]:
        shard = x[:, span[0] : span[1]].contiguous()
        chunk = x.new_empty(group.size, *shard.shape)
        return group.all_gather(chunk.view(-1), shard.view(-1)), shard, chunk.view(-1, width)

    arriving = start(spans[0])
    for number, span in enumerate(spans):
        pending, _sent, chunk = arriving
        if number + 1 < len(spans):
            arriving = start(spans[number + 1])
        pending.wait()
        put_chunk(gathered, chunk, group.size, span)
        for out, matrix in zip(products, matrices):
            put_chunk(out, chunk @ matrix, group.size, span)
    return gathered, products


def column_backward(
    input_grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor],
    matrices: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    are_transposed: Sequence[bool],
    are_trained: Sequence[bool],
    overlap: Overlap,
) -> list[torch.Tensor]:
    """Returns the gradient of what `column_forward` or its plain form read, summed over the ranks, and of weights.

    Args:
        input_grad: (B, S, K) of the tensor that other modules read; None where none did.
        grads: (B, S, N_i) of each product.
        matrices: (K, N_i) of each product.
        x: (B, S, K), what all of them read; None where no weight is trained.
        are_transposed: whether each weight is (N_i, K).
        are_trained: whether each weight gets a gradient.
        overlap: the ranks.

    Returns:
        (B, S, K), with ``sequence`` (B, n, K); and a gradient of each trained weight, in its orientation.
    """
    group, like = overlap.axis_group, (*grads, *([] if input_grad is None else [input_grad]))[0]
    rows, tokens = like.shape[:2]
    width = matrices[0].shape[0] if matrices else like.shape[2]
    sources = [source.contiguous() for source in (*([] if input_grad is None else [input_grad]), *grads)]
    transposed_matrices = [*([] if input_grad is None else [None]), *(matrix.t() for matrix in matrices)]
    pending: list[tuple[PendingCollective, torch.Tensor, torch.Tensor, Span]] = []
    local = LocalChunks(like, rows, tokens // group.size, width) if overlap.sequence else None
    summed = like.new_empty(0 if overlap.sequence else rows * tokens, width)
    for span in chunk_bounds(tokens // group.size if overlap.sequence else rows * tokens, overlap.chunks):
        if local is None:
            part = summed[span[0] : span[1]]
            terms = [source.view(rows * tokens, -1)[span[0] : span[1]] for source in sources]
            _add_products(part, terms, transposed_matrices)
            pending.append((group.all_reduce(part), part, part, span))
        else:
            terms = [take_chunk(source, group.size, span) for source in sources]
            chunk, part = like.new_empty(len(terms[0]), width), local.part(span)
            _add_products(chunk, terms, transposed_matrices)
            pending.append((group.reduce_scatter(part.view(-1), chunk.view(-1)), chunk, part, span))
    # The last chunk travels under the products of weight gradients, each of all tokens.
    weight_grads = [
        weight_grad(x, grad, turned)
        for grad, turned, is_trained in zip(grads, are_transposed, are_trained)
        if is_trained and x is not None
    ]
    for work, _, part, span in pending:
        work.wait()
        if local is not None:
            local.put(part, span)
    return [summed.view(rows, tokens, width) if local is None else local.out, *weight_grads]


def _add_products(out: torch.Tensor, terms: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor | None]) -> None:
    """Writes the sum of products, or of terms that have no matrix, to ``out: (T, K)``."""
    for number, (term, matrix) in enumerate(zip(terms, matrices)):
        if matrix is None:
            out.copy_(term)
        elif number == 0:
            torch.mm(term, matrix, out=out)
        else:
            out.addmm_(term, matrix)


def multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Returns the product of ``x: (B, S, K)`` and ``matrix: (K, N)``."""
    # Not a view of a result: of a function with several outputs these can't be written into, as an activation may.
    return torch.matmul(x, matrix)


def _multiply_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
    """Writes a product to ``out: (T, N)``; selective recompute, a dispatch mode, keeps one of its own memory."""
    if dispatch_mode() is None:
        torch.mm(x, matrix, out=out)
    else:
        out.copy_(x @ matrix)


def weight_grad(x: torch.Tensor, grad: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Returns a weight's gradient, (K, N) or (N, K), from ``x: (B, S, K)`` and ``grad: (B, S, N)``."""
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return grads.t() @ rows if is_transposed else rows.t() @ grads
