"""Chunks of tokens of activations, of which each holds as large a part of every rank's run of the tokens.

Where sequence parallelism splits the tokens, S = size * n, rank r has tokens [r n, (r + 1) n) of each row. Chunk
[start, stop) of n is those tokens of every run, so that a collective over a chunk gives each
rank tokens of its own run.
"""

from __future__ import annotations

import torch

from meshwright.spec.placement import Span


def chunk_bounds(tokens: int, chunks: int) -> list[Span]:
    """Returns the (start, stop) of up to ``chunks`` runs of tokens as equal as can be; of few tokens, a run each."""
    count = max(1, min(chunks, tokens))
    return [(tokens * number // count, tokens * (number + 1) // count) for number in range(count)]


def take_chunk(x: torch.Tensor, size: int, span: Span) -> torch.Tensor:
    """Returns a chunk's tokens as rows, rank by rank.

    Args:
        x: (B, S, K) with S = size * n; a view where the chunk is all of one row.
        size: number of runs of tokens.
        span: of n.

    Returns:
        (size * B * (stop - start), K).
    """
    start, stop = span
    return x.unflatten(1, (size, -1))[:, :, start:stop].transpose(0, 1).reshape(-1, x.shape[-1])


def put_chunk(out: torch.Tensor, rows: torch.Tensor, size: int, span: Span) -> None:
    """Writes a chunk's rows, in the order of `take_chunk`, to their tokens of ``out: (B, S, K)``."""
    start, stop = span
    target = out.unflatten(1, (size, -1))[:, :, start:stop].transpose(0, 1)
    target.copy_(rows.view(target.shape))


class LocalChunks:
    """This rank's run of the tokens of an activation, (B, n, K), which comes in by chunks.

    Args:
        like: gives type and device.
        rows: B.
        tokens: n.
        width: K.
    """

    def __init__(self, like: torch.Tensor, rows: int, tokens: int, width: int) -> None:
        self.out = like.new_empty(rows, tokens, width)
        """All of it, once the last chunk was put in."""

    def part(self, span: Span) -> torch.Tensor:
        """Returns contiguous memory for a chunk: that of `out` where its tokens lie side by side there."""
        part = self.out[:, span[0] : span[1]]
        return part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)

    def put(self, part: torch.Tensor, span: Span) -> None:
        """Puts in a chunk that was written to what `part` returned."""
        target = self.out[:, span[0] : span[1]]
        if part.data_ptr() != target.data_ptr():
            target.copy_(part)
