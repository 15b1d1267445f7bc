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
from dataclasses import dataclass

import torch

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import LossyTransfer, Observer, PhasedCollective, RoundingKey
from meshwright.parallel.error_feedback import ErrorFeedback, LowRankMatrix
from meshwright.spec.compression import Compression


@dataclass(slots=True)
class _Term:
    """A matrix in a message: this copy's gradient, what is left of it, and the columns that travel."""

    matrix: LowRankMatrix
    grad: torch.Tensor
    """Any shape, contiguous; the sum comes here."""
    left: torch.Tensor
    """(n, m): gradient and error, then the new error."""
    factor: torch.Tensor
    """(n, r): M Q, then P."""


class LowRankCompressor:
    """Sums gradients over copies in low rank, those of vectors and small weights exactly.

    Args:
        compression: the layout's choice.
        copies: the copies.
        key: of the step; its seed draws the first bases.
    """

    def __init__(self, compression: Compression, copies: AxisGroup, key: RoundingKey) -> None:
        self._compression, self._copies, self._key = compression, copies, key
        self.observer: Observer | None = None
        """Checks every sum, where a proof set it."""
        self.error_feedback: ErrorFeedback | None = None
        """State of the matrices, once the weights have memory; exact sums without."""

    @property
    def copies(self) -> AxisGroup:
        """The copies."""
        return self._copies

    @property
    def is_exact(self) -> bool:
        """Whether this step is one of the first, which sum exactly."""
        return int(self._key.step) < self._compression.exact_steps

    def all_reduce(self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str = "") -> PhasedCollective:
        """Starts the sum of some gradients, contiguous and of any shapes, in place.

        Args:
            weights: whose gradients they are.
            tensors: the gradients; nobody may read them until the sum has ended.
            of: names them in messages.
        """
        return PhasedCollective(self._phases(weights, tensors, of))

    def _phases(self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str) -> Iterator[PendingCollective]:
        matrices = self.error_feedback.matrices if self.error_feedback is not None and not self.is_exact else {}
        before = [tensor.clone() for tensor in tensors] if self.observer is not None else []
        terms = [self._begin(matrices[name], grad) for name, grad in zip(weights.names, tensors) if name in matrices]
        exact = [grad for name, grad in zip(weights.names, tensors) if name not in matrices]
        flat = _pack([*(term.factor for term in terms), *exact])
        transfer = self._copies.all_reduce(flat, of)
        saved_bytes = sum(term.grad.nbytes for term in terms) - sum(term.factor.nbytes for term in terms)
        transfer.raw_bytes = 2 * (flat.nbytes + saved_bytes) * (self._copies.size - 1) // self._copies.size
        yield transfer
        factors = _views(flat, [term.factor for term in terms])
        for grad, total in zip(exact, _views(flat[sum(factor.numel() for factor in factors) :], exact)):
            grad.copy_(total)
        if terms:
            bases = [self._split(term, factor) for term, factor in zip(terms, factors)]
            flat = _pack(bases)
            transfer = self._copies.all_reduce(flat, of)
            transfer.raw_bytes = 0
            yield transfer
            for term, basis in zip(terms, _views(flat, bases)):
                torch.mm(term.factor, basis.t(), out=term.grad.view(term.left.shape))
                term.matrix.set_pending(term.left, basis)
        if self.observer is not None:
            self.observer(LossyTransfer(weights=weights, before=before, after=tensors, axis_group=self._copies))

    def _begin(self, matrix: LowRankMatrix, grad: torch.Tensor) -> _Term:
        """Returns a matrix with what was owed, and its product with the basis."""
        assert self.error_feedback is not None
        shape = matrix.rows, matrix.columns
        left = torch.add(grad.view(shape), matrix.error.view(shape), alpha=self.error_feedback.loss_scale)
        return _Term(matrix, grad, left, left @ matrix.used_basis(self._key.seed))

    def _split(self, term: _Term, factor: torch.Tensor) -> torch.Tensor:
        """Takes the columns of ``factor: (n, r)`` out of a matrix; returns this copy's term of their sums, (m, r)."""
        term.factor = torch.linalg.qr(factor).Q
        squared_sum = term.left.square().sum()
        basis = term.left.t() @ term.factor
        term.left.addmm_(term.factor, basis.t(), alpha=-1.0)
        self._copies.log.add_rounding(self._copies.axis, "all_reduce", term.left.square().sum(), squared_sum)
        return basis


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of tensors of any shapes, (n,), in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of the first elements of ``flat: (n,)``, shaped as some tensors."""
    views, offset = [], 0
    for tensor in like:
        views.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return views
