"""Sums gradients over copies approximately: what a sum leaves out of a copy's gradients is added to its next ones.

What travels is a method's own (`low_rank`, `top_k`). Which weights it is for, the first steps that sum exactly, what
is owed, and the proof's view of a sum are the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import LossyTransfer, Observer, PhasedCollective, RoundingKey
from meshwright.parallel.error_feedback import ErrorFeedback, WeightError
from meshwright.spec.compression import Compression


@dataclass(slots=True)
class OwedGradient:
    """A gradient in a message, with what this copy owed of it."""

    item: WeightError
    """Its state."""
    grad: torch.Tensor
    """(n,), contiguous; the sum comes here."""
    left: torch.Tensor
    """Shaped like the weight's local part: gradient and error, then the new error."""


class FeedbackCompressor(ABC):
    """Sums gradients over copies with error feedback, those of vectors and small weights exactly.

    Args:
        compression: the layout's choice.
        copies: the copies.
        key: of the step.
    """

    def __init__(self, compression: Compression, copies: AxisGroup, key: RoundingKey) -> None:
        self._compression, self._copies, self._key = compression, copies, key
        self.observer: Observer | None = None
        """Checks every sum, where a proof set it."""
        self.error_feedback: ErrorFeedback | None = None
        """What copies owe, once the weights have memory; exact sums without."""

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

    @abstractmethod
    def _sum(self, owed: Sequence[OwedGradient], exact: Sequence[torch.Tensor], of: str) -> Iterator[PendingCollective]:
        """Yields the exchanges of a sum, in place.

        Args:
            owed: gradients that are summed approximately.
            exact: gradients that are summed exactly.
            of: names them in messages.
        """

    def _phases(self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str) -> Iterator[PendingCollective]:
        feedback = self.error_feedback
        items = feedback.errors if feedback is not None and not self.is_exact else {}
        before = [tensor.clone() for tensor in tensors] if self.observer is not None else []
        owed, exact = [], []
        for name, grad in zip(weights.names, tensors):
            if feedback is None or name not in items:
                exact.append(grad)
                continue
            # FSDP2 fills up the last ranks' shards to the length of the first's: those zeros aren't summed.
            own = grad.view(-1)[: items[name].error.numel()]
            owed.append(OwedGradient(items[name], own, items[name].add_to(own, feedback.loss_scale)))
        yield from self._sum(owed, exact, of)
        if self.observer is not None:
            self.observer(LossyTransfer(weights=weights, before=before, after=tensors, axis_group=self._copies))

    def _exact_bytes(self, grads: Sequence[torch.Tensor]) -> int:
        """Returns what this rank would send of an exact sum of some gradients."""
        return 2 * sum(grad.nbytes for grad in grads) * (self._copies.size - 1) // self._copies.size

    def _book_error(self, op: str, left: torch.Tensor, squared_sum: torch.Tensor) -> None:
        """Books the share of a gradient and its debt that isn't sent.

        Args:
            op: under which it is booked.
            left: what isn't sent, any shape.
            squared_sum: () of gradient and debt.
        """
        self._copies.log.add_rounding(self._copies.axis, op, left.square().sum(), squared_sum)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of tensors of any shapes, (n,), in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of the first elements of ``flat: (n,)``, shaped as some tensors."""
    shaped, offset = [], 0
    for tensor in like:
        shaped.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return shaped
