"""PowerSGD written down plainly in numpy, with every copy's state in one place, sharing no code with the runtime.

The runtime's sum is P P^T of the copies' gradients and errors together, with P an orthonormal basis of their product
with the last basis. Here all copies are at hand: they are added up first, P is made by Gram-Schmidt, and a column that
depends on those before it is left out, since nothing of the matrix lies along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.proof.plain_rounding import BLOCK, Floats, random_fractions, sum_in_order

Matrix = NDArray[np.float64]


@dataclass
class _Owed:
    """A weight's errors, (copies, n, m), and its basis, (m, r)."""

    errors: Matrix
    basis: Matrix


@dataclass
class PlainPowerSgd:
    """The sums of all steps, in float64, with their state.

    Args:
        rank: as the layout asks for.
        exact_steps: first steps that are summed exactly.
        seed: of the run.
        precision: relative distance of two numbers of the runtime's type.
    """

    rank: int
    exact_steps: int
    seed: int
    precision: float
    _owed: dict[str, _Owed] = field(default_factory=dict)
    _next: dict[str, _Owed] = field(default_factory=dict)

    def finish_step(self, updates_weights: bool) -> None:
        """Ends a step, which changes what is owed where it updates the weights."""
        if updates_weights:
            self._owed |= self._next
        self._next.clear()

    def sum(
        self, name: str, terms: Sequence[Floats], step: int, shape: Sequence[int], local_shape: Sequence[int]
    ) -> Floats:
        """Returns the sum of a weight's gradients, (n,).

        Args:
            name: of the weight.
            terms: (n,) of each copy, in order.
            step: number of the step, from 0 on.
            shape: of the whole weight.
            local_shape: of this rank's part.
        """
        rows = shape[0] if shape else 1
        columns = int(np.prod(shape)) // max(1, rows)
        if step < self.exact_steps or len(shape) < 2 or 2 * self.rank * (rows + columns) >= rows * columns:
            return sum_in_order(terms)
        matrices = np.stack([term.astype(np.float64).reshape(local_shape[0], -1) for term in terms])
        height, width = matrices.shape[1:]
        if min(self.rank, height, width) * (height + width) >= height * width:
            return sum_in_order(terms)
        owed = self._owed.get(name)
        if owed is None:
            owed = _Owed(np.zeros_like(matrices), np.zeros((width, min(self.rank, height, width))))
        matrices += owed.errors
        total = matrices.sum(axis=0)
        across = orthonormal(total @ self._drawn(name, owed.basis))
        # Of each copy, what lies along the columns of `across` is sent; the rest is owed.
        errors = np.stack([matrix - across @ (across.T @ matrix) for matrix in matrices])
        self._next[name] = _Owed(errors, self._scaled(total.T @ across))
        return (across @ across.T @ total).astype(terms[0].dtype).reshape(-1)

    def _drawn(self, name: str, basis: Matrix) -> Matrix:
        """Returns a basis whose zero columns are drawn."""
        width, rank = basis.shape
        blocks = [random_fractions(f"{self.seed},basis", name, block) for block in range(-(-width * rank // BLOCK))]
        drawn = np.concatenate(blocks)[: width * rank].reshape(width, rank) - 0.5
        return np.stack([column if column.any() else drawn[:, index] for index, column in enumerate(basis.T)], axis=1)

    def _scaled(self, basis: Matrix) -> Matrix:
        """Returns a basis of columns of length 1; those far shorter than the longest are zeros."""
        lengths = np.sqrt((basis**2).sum(axis=0))
        scaled = np.zeros_like(basis)
        for index, length in enumerate(lengths):
            if length > lengths.max() * np.sqrt(self.precision):
                scaled[:, index] = basis[:, index] / length
        return scaled


def orthonormal(columns: Matrix) -> Matrix:
    """Returns columns, (n, r), orthonormal in their order, by Gram-Schmidt; zeros for those that depend on others."""
    made: list[Matrix] = []
    for column in columns.T:
        rest = column.copy()
        for _ in range(2):  # once more against what rounding left
            for other in made:
                rest = rest - other * (other @ rest)
        length = float(np.sqrt(rest @ rest))
        whole = float(np.sqrt(column @ column))
        made.append(rest / length if length > 1e-13 * whole else np.zeros_like(rest))
    return np.stack(made, axis=1)
