"""What this rank's copy owes: the part of its gradients that approximate sums left out, added to the next step's.

Of each weight, this rank's part of it, a copy holds an error of its own and, for sums in low rank, a basis Q that all
copies share. A step reads both and makes new ones, which take their place once it is known that the step updates the
weights (`commit`): a step that is skipped, or computed again, leaves what was owed before.

Errors are in units of unscaled gradients, so that the loss scale of fp16 may change between steps.
Source: Vogels et al., PowerSGD (NeurIPS 2019), algorithm 2, of error feedback; section 3, of the warm start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.weights import Weight
from meshwright.spec.compression import Compression
from meshwright.spec.low_rank import local_rank, matrix_size

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


class WeightError:
    """What a copy owes of one weight.

    Args:
        weight: with elements on this rank.
        buffers: count the bytes.
    """

    def __init__(self, weight: Weight, buffers: LiveBytes) -> None:
        self.weight, self._buffers = weight, buffers
        self.shape = tuple(weight.local.shape)
        self.error = buffers.track(ERRORS, torch.zeros_like(weight.local))
        """What this copy owes, shaped like the weight's local part, unscaled."""
        self._pending_error: torch.Tensor | None = None
        """Error, any shape and scaled, of the step that runs; None where it sums exactly."""

    def add_to(self, grad: torch.Tensor, loss_scale: float) -> torch.Tensor:
        """Returns gradient and error, shaped like the weight's local part, in new memory.

        Args:
            grad: contiguous and of any shape, scaled.
            loss_scale: of the gradient.
        """
        return torch.add(grad.view(self.shape), self.error, alpha=loss_scale)

    def set_pending_error(self, error: torch.Tensor) -> None:
        """Takes the error that a step makes, of any shape and scaled."""
        self._pending_error = self._buffers.track(ERRORS, error)

    def discard_pending(self) -> None:
        """Drops what a step made that is computed again."""
        self._pending_error = None

    def commit(self, is_valid: torch.Tensor, scale: float) -> None:
        """Takes over what the step made, where ``is_valid: () bool``."""
        if self._pending_error is None:
            return
        # A scale is a power of two: no bit of the error is lost.
        error = self._pending_error.view(self.shape).mul_(1.0 / scale)
        self._pending_error = None
        self.error.copy_(torch.where(is_valid, error, self.error))

    def shared_state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors, of any shapes, that all copies have alike, by name in a checkpoint."""
        return {}


class LowRankMatrix(WeightError):
    """The state of one weight that is summed in low rank.

    Args:
        weight: of at least two dims.
        rank: of the layout.
        basis_name: of the basis in a checkpoint.
        buffers: count the bytes.
    """

    def __init__(self, weight: Weight, rank: int, basis_name: str, buffers: LiveBytes) -> None:
        super().__init__(weight, buffers)
        self._basis_name = basis_name
        self.rows, self.columns = matrix_size(self.shape)
        self.rank = local_rank(self.shape, rank)
        # A column of zeros is drawn at its next use: so a run begins, and so a direction ends that nothing lies in.
        self.basis = buffers.track(ERRORS, self.error.new_zeros((self.columns, self.rank)))
        """Q, (columns, rank), equal on all copies: columns of length 1, or zeros."""
        self._start: tuple[int, torch.Tensor] | None = None
        self._pending_basis: torch.Tensor | None = None
        """Basis of the step that runs; None where it sums exactly."""

    def used_basis(self, seed: int) -> torch.Tensor:
        """Returns Q, (columns, rank), with random columns in place of those that are zero."""
        if self._start is None or self._start[0] != seed:
            blocks = WeightBlocks([self.weight.name], [self.columns * self.rank])
            fractions = blocks.fractions(f"{seed},basis", 0, blocks.count, self.basis.device).view(-1)
            start = fractions[: self.basis.numel()].view(self.basis.shape).to(self.basis.dtype)
            self._start = seed, start - 0.5
        return torch.where(self.basis.any(dim=0), self.basis, self._start[1])

    def set_pending_basis(self, basis: torch.Tensor) -> None:
        """Takes the basis that a step makes, (columns, rank), its columns of any lengths."""
        lengths = basis.norm(dim=0)
        # Columns that are rounding noise beside the longest: the matrices had a lower rank.
        is_used = lengths > lengths.max() * torch.finfo(basis.dtype).eps ** 0.5
        unit = torch.where(is_used, basis / torch.where(is_used, lengths, 1.0), 0.0)
        self._pending_basis = self._buffers.track(ERRORS, unit)

    def discard_pending(self) -> None:
        """Drops what a step made that is computed again."""
        super().discard_pending()
        self._pending_basis = None

    def commit(self, is_valid: torch.Tensor, scale: float) -> None:
        """Takes over what the step made, where ``is_valid: () bool``."""
        super().commit(is_valid, scale)
        if self._pending_basis is not None:
            self.basis.copy_(torch.where(is_valid, self._pending_basis, self.basis))
            self._pending_basis = None

    def shared_state(self) -> dict[str, torch.Tensor]:
        """Returns the basis, (columns, rank), by its name in a checkpoint."""
        return {self._basis_name: self.basis}


class ErrorFeedback:
    """The errors and bases of all weights of this rank whose gradients are summed approximately.

    Args:
        weights: of this rank.
        compression: of the layout.
        copies: number of copies.
        copy: index of this rank's.
        exact_names: weights whose gradient isn't complete when copies are summed, and is summed exactly.
        positions: of this rank along the axes that split weights, as ``tp1of2``, by axis.
        buffers: count the bytes.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        compression: Compression,
        copies: int,
        copy: int,
        exact_names: Collection[str],
        positions: Mapping[str, str],
        buffers: LiveBytes,
    ) -> None:
        self.copies, self.copy, self.loss_scale = copies, copy, 1.0
        self.errors: dict[str, WeightError] = {}
        """By name of the weight."""
        rank = compression.rank
        for weight in weights:
            if weight.name in exact_names or not compression.leaves_out(weight.shape, weight.local.shape):
                continue
            part = "".join(f"{positions[axis]}/" for axis in weight.sharded_on if axis in positions)
            self.errors[weight.name] = (
                LowRankMatrix(weight, rank, f"{BASES}/r{rank}/{part}{weight.name}", buffers)
                if compression.is_low_rank
                else WeightError(weight, buffers)
            )
        self._restored: dict[str, list[torch.Tensor]] = {}

    def begin_step(self, loss_scale: float) -> None:
        """Announces a step, or that it is computed again, with its loss scale: a power of two."""
        self.loss_scale = loss_scale
        for item in self.errors.values():
            item.discard_pending()

    @torch.no_grad()
    def commit(self, is_valid: torch.Tensor) -> None:
        """Takes over what the step made, where ``is_valid: () bool``: the weights are updated."""
        for item in self.errors.values():
            item.commit(is_valid, self.loss_scale)

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name, tensor) of what checkpoints hold of this copy."""
        for name, item in self.errors.items():
            yield f"{COPY}{self.copy}/{ERRORS}/{name}", item.weight.checkpoint_boxes(item.error)
            yield from item.shared_state().items()

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""
        return [
            tensor.data_ptr() for item in self.errors.values() for tensor in (item.error, *item.shared_state().values())
        ]

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
        for name, item in self.errors.items():
            item.error.zero_()
            for shared_name, tensor in item.shared_state().items():
                tensor.zero_()
                if shared_name in names:
                    targets[shared_name] = tensor
            own_name = f"{COPY}{self.copy}/{ERRORS}/{name}"
            if len(saved) == self.copies and own_name in names:
                targets[own_name] = item.weight.checkpoint_boxes(item.error)
                continue
            for copy in sorted(saved):
                copy_name = f"{COPY}{copy}/{ERRORS}/{name}"
                if copy_name in names:
                    self._restored.setdefault(name, []).append(torch.zeros_like(item.error))
                    targets[copy_name] = item.weight.checkpoint_boxes(self._restored[name][-1])
        return targets

    @torch.no_grad()
    def restored(self) -> None:
        """Shares out what other copies owed, after `restore_targets` were filled: as much to each, so the sum stays."""
        for name, errors in self._restored.items():
            total = self.errors[name].error
            for error in errors:
                total.add_(error)
            total.div_(self.copies)
        self._restored = {}
