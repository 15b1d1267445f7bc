"""Sums gradients over copies in low rank: two thin matrices of each travel, and what they leave out is owed.

With M_i = gradient + error of copy i, (n, m), and a basis Q, (m, r), that all copies share:

    P   = orthonormal columns of sum_i M_i Q          (n, r), an all-reduce
    Q_i = M_i^T P;  Q = sum_i Q_i                     (m, r), an all-reduce
    sum = P Q^T on every copy;  error of copy i = M_i - P Q_i^T

So the errors add up to what the sum leaves out of that of the M_i, and every copy decodes the same numbers. The new Q
is the next step's basis: one step of power iteration a step of training.
Source: Vogels et al., PowerSGD (NeurIPS 2019), algorithms 1 and 2, for sums in place of means; P by Householder's QR
in place of Gram-Schmidt, since its columns are orthonormal where those of M Q depend on each other, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.parallel.axis_group import PendingCollective
from meshwright.parallel.error_feedback import LowRankMatrix
from meshwright.parallel.feedback_compressor import FeedbackCompressor, OwedGradient, pack, views


class LowRankCompressor(FeedbackCompressor):
    """Sums gradients over copies in low rank, those of vectors and small weights exactly."""

    def _sum(self, owed: Sequence[OwedGradient], exact: Sequence[torch.Tensor], of: str) -> Iterator[PendingCollective]:
        """Yields the all-reduces of M Q, beside exact gradients, and of M^T P."""
        matrices = [_as_matrix(term) for term in owed]
        factors = [left @ matrix.used_basis(self._key.seed) for matrix, left in matrices]
        flat = pack([*factors, *exact])
        transfer = self._copies.all_reduce(flat, of)
        transfer.raw_bytes = self._exact_bytes([*(term.grad for term in owed), *exact])
        yield transfer
        factors = views(flat, factors)
        for grad, total in zip(exact, views(flat[sum(factor.numel() for factor in factors) :], exact)):
            grad.copy_(total)
        if not owed:
            return
        columns = [torch.linalg.qr(factor).Q for factor in factors]
        bases = [self._split(left, factor) for (_, left), factor in zip(matrices, columns)]
        flat = pack(bases)
        transfer = self._copies.all_reduce(flat, of)
        transfer.raw_bytes = 0
        yield transfer
        for (matrix, left), term, factor, basis in zip(matrices, owed, columns, views(flat, bases)):
            torch.mm(factor, basis.t(), out=term.grad.view(left.shape))
            matrix.set_pending_error(term.left)
            matrix.set_pending_basis(basis)

    def _split(self, left: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Takes orthonormal columns out of a matrix; returns this copy's term of their sums, (m, r).

        Args:
            left: (n, m).
            factor: (n, r).
        """
        squared_sum = left.square().sum()
        basis = left.t() @ factor
        left.addmm_(factor, basis.t(), alpha=-1.0)
        self._book_error("all_reduce", left, squared_sum)
        return basis


def _as_matrix(term: OwedGradient) -> tuple[LowRankMatrix, torch.Tensor]:
    """Returns the state of a gradient, and gradient and error as one matrix, (n, m)."""
    matrix = term.item
    assert isinstance(matrix, LowRankMatrix)
    return matrix, term.left.view(matrix.rows, matrix.columns)
