"""Sums the largest values of gradients over copies: values and indices travel, and what stays behind is owed.

With M_i = gradient + error of copy i, n values, of which the k of largest magnitude are at indices S_i:

    sum        = sum_i M_i[S_i], at these indices, in order of the copies; an all-gather of values and indices
    error of i = M_i, with zeros at S_i

Of equal magnitudes those of the lowest index travel, so that a step computed again is the same. Every copy adds up the
same numbers in the same order, whatever device it runs on.
Source: Aji and Heafield (EMNLP 2017), with their threshold for each tensor; Lin et al., Deep Gradient Compression
(ICLR 2018), without its momentum correction, which is for SGD.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.parallel.axis_group import PendingCollective
from meshwright.parallel.feedback_compressor import FeedbackCompressor, OwedGradient, pack, views
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.spec.top_k import count_largest_values, index_bytes

_INDEX_DTYPES = {4: torch.int32, 8: torch.int64}
SELECTION = "selection"
"""Kind of the buffers in which the largest values are selected, of one weight at a time."""


class TopKCompressor(FeedbackCompressor):
    """Sums the largest values of gradients over copies, those of vectors exactly."""

    def _sum(self, owed: Sequence[OwedGradient], exact: Sequence[torch.Tensor], of: str) -> Iterator[PendingCollective]:
        """Yields the all-gather of values and indices, and the all-reduce of exact gradients."""
        if owed:
            track = self._copies.log.buffers.track
            selected = [self._take_largest(term) for term in owed]
            values, indices = (torch.cat(parts) for parts in zip(*selected))
            counts = [len(part) for part, _ in selected]
            del selected
            message = track("gradients", torch.cat([values.view(torch.uint8), indices.view(torch.uint8)]))
            received = track("gradients", message.new_empty(self._copies.size, len(message)))
            transfer = self._copies.all_gather(received.view(-1), message, of)
            transfer.raw_bytes = self._exact_bytes([term.grad for term in owed])
            value_bytes, value_dtype, index_dtype = values.nbytes, values.dtype, indices.dtype
            del values, indices
            yield transfer
            del transfer, message
            totals = [term.grad.view(-1).zero_() for term in owed]
            # In rank order, so that the sum has the same bits on every copy.
            for row in received:
                copy_values = row[:value_bytes].clone().view(value_dtype).split(counts)
                copy_indices = row[value_bytes:].clone().view(index_dtype).split(counts)
                for total, index, value in zip(totals, copy_indices, copy_values):
                    total.index_add_(0, index, value)
            del received, row
            for term in owed:
                term.item.set_pending_error(term.left)
        if exact:
            flat = pack(exact)
            yield self._copies.all_reduce(flat, of)
            for grad, total in zip(exact, views(flat, exact)):
                grad.copy_(total)

    def _take_largest(self, term: OwedGradient) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the largest values out of a gradient and its error; returns them and their indices, (k,) each."""
        left = term.left.view(-1)
        count = count_largest_values(left.numel(), self._compression.inverse_density)
        index = largest_indices(left, count, self._copies.log.buffers)
        squared_sum = left.square().sum()
        values = left[index]
        # Not a difference: what is infinite leaves no NaN behind.
        left.index_fill_(0, index, 0.0)
        self._book_error("all_gather", left, squared_sum)
        return values, index.to(_INDEX_DTYPES[index_bytes(left.numel())])


def largest_indices(values: torch.Tensor, count: int, buffers: LiveBytes) -> torch.Tensor:
    """Returns the indices of the values of largest magnitude, (count,) int64, ascending; the lowest of equal ones.

    What isn't finite is larger than all else, so that it travels and the step is skipped on every rank.

    Args:
        values: (n,).
        count: 1 to n.
        buffers: count the bytes.
    """
    magnitude = buffers.track(SELECTION, values.abs()).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    threshold = torch.topk(magnitude, count, sorted=False).values.min()
    is_above, is_equal = magnitude > threshold, magnitude == threshold
    order = buffers.track(SELECTION, is_equal.cumsum(0, dtype=_INDEX_DTYPES[index_bytes(len(values))]))
    is_selected = is_above | (is_equal & (order <= count - is_above.sum()))
    return torch.nonzero_static(is_selected, size=count).view(-1)
