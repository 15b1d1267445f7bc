"""Two halves of a micro-batch's rows, which go through the model in turns (`Layout.ep_halves`).

What one half has sent to its experts, or its experts have sent back, travels under all that the other half computes:
attention, routers and shared experts too, and in backward likewise. Nothing of it is written for any model.
Sources: DeepSeek-AI, DeepSeek-V3 (2024), section 3.2.1, which pairs a forward with a backward; Zheng et al., SGLang's
two-batch overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from meshwright.errors import PlanError
from meshwright.parallel.schedule_run import TensorKind
from meshwright.parallel.stage_module import Halve, RowBatch
from meshwright.parallel.turns import Turns

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
Kinds = tuple[Sequence[TensorKind], ...]
"""Of the tensors that a stage received, and of those that it handed on."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Runs the halves of micro-batches."""

    turns: Turns
    halve: Halve

    def run(
        self, batch: RowBatch, first_row: int, run: Callable[[RowBatch, int, Tensors], T], inputs: Sequence[Tensors]
    ) -> tuple[T, T]:
        """Returns what ``run`` gives of both halves.

        Args:
            batch: a micro-batch of two rows or more.
            first_row: number of its first row in the global batch.
            run: (half, number of its first row, its input) to anything.
            inputs: of each half.
        """
        first, second = self.halve(batch)
        row = first_row + len(first.tokens)
        return self.turns.run(lambda: run(first, first_row, inputs[0]), lambda: run(second, row, inputs[1]))


@dataclass(frozen=True, slots=True)
class _RowDim:
    """The rows of one tensor."""

    dim: int | None
    """That they are, or that begins with them; None where the tensor doesn't depend on them."""
    sizes: tuple[int, int]
    """Of the halves in this dim."""

    @classmethod
    def of(cls, whole: TensorKind, first: TensorKind, second: TensorKind) -> _RowDim:
        """Reads them off the shapes that all rows gave, and each half of them."""
        shapes = whole.shape, first.shape, second.shape
        if len(set(map(len, shapes))) == 1:
            dims = [dim for dim, sizes in enumerate(zip(*shapes)) if len(set(sizes)) > 1]
            if not dims:
                return cls(None, (0, 0))
            total, *sizes = (shape[dims[0]] for shape in shapes)
            if len(dims) == 1 and total == sum(sizes):
                return cls(dims[0], (sizes[0], sizes[1]))
        raise PlanError(
            f"ep_halves=true: a tensor of shape {whole.shape} between two stages of pp is {first.shape} and "
            f"{second.shape} for the halves of its rows, which don't make it up; drop ep_halves"
        )

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns a tensor's halves; one that doesn't depend on rows twice."""
        return (tensor, tensor) if self.dim is None else tensor.split(self.sizes, self.dim)

    def join(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of both halves."""
        return first if self.dim is None else torch.cat((first, second), self.dim)


class RowCut:
    """How one stage's tensors are halved, from forwards of all rows and of each half.

    Args:
        whole: of all rows.
        first: of the first half.
        second: of the second half.

    Raises:
        PlanError: a tensor's shapes don't tell its rows.
    """

    def __init__(self, whole: Kinds, first: Kinds, second: Kinds) -> None:
        self._received, self._sent = (
            [_RowDim.of(*kinds) for kinds in zip(*tensors, strict=True)]
            for tensors in zip(whole, first, second, strict=True)
        )
        self._is_compared = False

    def split(self, received: Tensors) -> tuple[Tensors, Tensors]:
        """Returns each half of what the stage received, of any shapes."""
        parts = [rows.split(tensor) for rows, tensor in zip(self._received, received, strict=True)]
        return tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def join(self, first: Tensors, second: Tensors) -> Tensors:
        """Returns what the stage hands on, from that of each half.

        Raises:
            PlanError: in the first call, a tensor depends on rows without having them.
        """
        if not self._is_compared:
            self._is_compared = True
            for rows, *parts in zip(self._sent, first, second, strict=True):
                if rows.dim is None and not torch.equal(*parts):
                    raise PlanError(
                        f"ep_halves=true: a tensor of shape {tuple(parts[0].shape)} between two stages of pp isn't the "
                        "same for the halves of its rows, and its shape doesn't tell what makes it up; drop ep_halves"
                    )
        return tuple(rows.join(*parts) for rows, *parts in zip(self._sent, first, second, strict=True))
