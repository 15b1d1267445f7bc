"""What a model's own modules take and move, counted on them, beside what the closed form prices for the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBytes:
    """Bytes under each way of recompute, `layout_batch.RECOMPUTES` but ``block``, in all layers that may recompute.

    Their ratio holds for every layout, because rows, tokens and degrees divide both alike.
    """

    real: tuple[float, float, float]
    """Counted on the model's modules."""
    closed: tuple[float, float, float]
    """By the closed form."""

    def ratio(self, recompute: NDArray[Any], share: NDArray[Any], rest: NDArray[Any]) -> NDArray[Any]:
        """Returns `real` over `closed`, (N, P).

        Args:
            recompute: index into `RECOMPUTES`, (N, 1).
            share: of the layers of each rank that recompute so, (N, P).
            rest: index of what the other layers do, (N, 1).
        """
        last = len(self.real) - 1
        mode, others = (np.minimum(np.asarray(index, dtype=int), last) for index in (recompute, rest))
        real, closed = (
            (1 - share) * values[others] + share * values[mode]
            for values in (np.asarray(self.real), np.asarray(self.closed))
        )
        return np.asarray(real / closed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBytes:
    """What one row takes in the full model, on one device."""

    saved: MeasuredBytes
    """Kept for backward by all layers and what lies around them."""
    working: MeasuredBytes
    """Beside it while the backward of one layer runs, of the layer with most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MovedBytes:
    """Bytes that all layers' operators move beside products and attention: the modules' own over the closed form's.

    Each is (forward, backward). They hold for every layout, because rows, tokens and degrees divide both alike.
    """

    eager: tuple[float, float]
    """Every operator by itself."""
    compiled: tuple[float, float]
    """Those between two products as one kernel."""

    def ratio(self, is_compiled: bool, is_backward: bool) -> float:
        """Returns what the modules move over what is priced."""
        return (self.compiled if is_compiled else self.eager)[is_backward]
