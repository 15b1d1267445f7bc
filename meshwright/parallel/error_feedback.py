"""What this rank's copy owes: the part of its gradients that sums in low rank left out, added to the next step's.

Of each matrix, this rank's part of it, a copy holds an error of its own and a basis Q that all copies share. A step
reads both and makes new ones, which take their place once it is known that the step updates the weights (`commit`):
a step that is skipped, or computed again, leaves what was owed before.

Errors are in units of unscaled gradients, so that the loss scale of fp16 may change between steps.
Source: Vogels et al., PowerSGD (NeurIPS 2019), algorithm 2, of error feedback; section 3, of the warm start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.weights import Weight
from meshwright.spec.low_rank import local_rank, matrix_size, sums_in_low_rank

COPY = "copy"
ERRORS = "errors"
"""Prefix of errors in a checkpoint, behind that of the copy: ``copy2/errors/<weight>``."""
BASES = "bases"
"""Prefix of bases in a checkpoint, all copies': ``bases/r4/<weight>``, with a prefix more for each part of a weight."""


def copy_of_name(name: str) -> int | None:
    """Returns the copy that a tensor of a checkpoint belongs to; None for one that all share."""
    head, slash, _ = name.partition("/")
    number = head.removeprefix(COPY)
    return int(number) if slash and head.startswith(COPY) and number.isdigit() else None


def is_error_feedback(name: str) -> bool:
    """Returns whether a tensor of a checkpoint belongs to error feedback, which another layout may not have."""
    return copy_of_name(name) is not None or name.startswith(f"{BASES}/")


class LowRankMatrix:
    """The state of one weight on this rank.

    Args:
        weight: of at least two dims.
        rank: of the layout.
        basis_name: of the basis in a checkpoint.
        buffers: count the bytes.
    """

    def __init__(self, weight: Weight, rank: int, basis_name: str, buffers: LiveBytes) -> None:
        local = weight.local
        self.weight, self.basis_name, self._buffers = weight, basis_name, buffers
        self.shape = tuple(local.shape)
        self.rows, self.columns = matrix_size(self.shape)
        self.rank = local_rank(self.shape, rank)
        self.error = buffers.track(ERRORS, torch.zeros_like(local))
        """What this copy owes, shaped like the weight's local part, unscaled."""
        # A column of zeros is drawn at its next use: so a run begins, and so a direction ends that nothing lies in.
        self.basis = buffers.track(ERRORS, local.new_zeros((self.columns, self.rank)))
        """Q, (columns, rank), equal on all copies: columns of length 1, or zeros."""
        self._start: tuple[int, torch.Tensor] | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        """Error, (rows, columns) and scaled, and basis of the step that runs; None where it sums exactly."""

    def used_basis(self, seed: int) -> torch.Tensor:
        """Returns Q, (columns, rank), with random columns in place of those that are zero."""
        if self._start is None or self._start[0] != seed:
            blocks = WeightBlocks([self.weight.name], [self.columns * self.rank])
            fractions = blocks.fractions(f"{seed},basis", 0, blocks.count, self.basis.device).view(-1)
            start = fractions[: self.basis.numel()].view(self.basis.shape).to(self.basis.dtype)
            self._start = seed, start - 0.5
        return torch.where(self.basis.any(dim=0), self.basis, self._start[1])

    def set_pending(self, error: torch.Tensor, basis: torch.Tensor) -> None:
        """Takes what a step makes: ``error: (rows, columns)``, scaled; ``basis: (columns, rank)`` of any lengths."""
        lengths = basis.norm(dim=0)
        # Columns that are rounding noise beside the longest: the matrices had a lower rank.
        is_used = lengths > lengths.max() * torch.finfo(basis.dtype).eps ** 0.5
        unit = torch.where(is_used, basis / torch.where(is_used, lengths, 1.0), 0.0)
        self.pending = self._buffers.track(ERRORS, error), self._buffers.track(ERRORS, unit)

    def commit(self, is_valid: torch.Tensor, scale: float) -> None:
        """Takes over what the step made, where ``is_valid: () bool``."""
        if self.pending is None:
            return
        error, basis = self.pending
        self.pending = None
        # A scale is a power of two: no bit of the error is lost.
        error = error.view(self.shape).mul_(1.0 / scale)
        self.error.copy_(torch.where(is_valid, error, self.error))
        self.basis.copy_(torch.where(is_valid, basis, self.basis))


class ErrorFeedback:
    """The errors and bases of all matrices of this rank.

    Args:
        weights: of this rank.
        rank: of the layout.
        copies: number of copies.
        copy: index of this rank's.
        exact_names: weights whose gradient isn't complete when copies are summed, and is summed exactly.
        position: name of this rank's parts of the weights that an axis splits, as ``tp1of2``.
        buffers: count the bytes.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        rank: int,
        copies: int,
        copy: int,
        exact_names: Collection[str],
        position: str,
        buffers: LiveBytes,
    ) -> None:
        self.copies, self.copy, self.loss_scale = copies, copy, 1.0
        self.matrices: dict[str, LowRankMatrix] = {}
        """By name of the weight."""
        for weight in weights:
            if weight.name in exact_names or not sums_in_low_rank(weight.shape, rank) or not weight.local.numel():
                continue
            part = "" if weight.shard.is_unsharded else f"{position}/"
            self.matrices[weight.name] = LowRankMatrix(weight, rank, f"{BASES}/r{rank}/{part}{weight.name}", buffers)
        self._restored: dict[str, list[torch.Tensor]] = {}

    def begin_step(self, loss_scale: float) -> None:
        """Announces a step, or that it is computed again, with its loss scale: a power of two."""
        self.loss_scale = loss_scale
        for matrix in self.matrices.values():
            matrix.pending = None

    @torch.no_grad()
    def commit(self, is_valid: torch.Tensor) -> None:
        """Takes over what the step made, where ``is_valid: () bool``: the weights are updated."""
        for matrix in self.matrices.values():
            matrix.commit(is_valid, self.loss_scale)

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name, tensor) of what checkpoints hold of this copy."""
        for name, matrix in self.matrices.items():
            yield f"{COPY}{self.copy}/{ERRORS}/{name}", matrix.weight.checkpoint_boxes(matrix.error)
            yield matrix.basis_name, matrix.basis

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""
        return [tensor.data_ptr() for item in self.matrices.values() for tensor in (item.error, item.basis)]

    @torch.no_grad()
    def restore_targets(self, names: Collection[str]) -> dict[str, StateTensor]:
        """Returns the tensors that a saved state fills, by name; what it lacks begins anew.

        Of another number of copies the errors of all are read (`restored` shares them out).

        Args:
            names: of the saved tensors.
        """
        saved = {copy for name in names if (copy := copy_of_name(name)) is not None}
        self._restored = {}
        targets: dict[str, StateTensor] = {}
        for name, matrix in self.matrices.items():
            matrix.error.zero_()
            matrix.basis.zero_()
            if matrix.basis_name in names:
                targets[matrix.basis_name] = matrix.basis
            own_name = f"{COPY}{self.copy}/{ERRORS}/{name}"
            if len(saved) == self.copies and own_name in names:
                targets[own_name] = matrix.weight.checkpoint_boxes(matrix.error)
                continue
            for copy in sorted(saved):
                copy_name = f"{COPY}{copy}/{ERRORS}/{name}"
                if copy_name in names:
                    self._restored.setdefault(name, []).append(torch.zeros_like(matrix.error))
                    targets[copy_name] = matrix.weight.checkpoint_boxes(self._restored[name][-1])
        return targets

    @torch.no_grad()
    def restored(self) -> None:
        """Shares out what other copies owed, after `restore_targets` were filled: as much to each, so the sum stays."""
        for name, errors in self._restored.items():
            total = self.matrices[name].error
            for error in errors:
                total.add_(error)
            total.div_(self.copies)
        self._restored = {}
