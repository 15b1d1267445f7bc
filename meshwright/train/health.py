"""Whether a step's numbers are sane, judged from what all ranks share, and what to do when they aren't."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from meshwright.train.config import RecoveryConfig

REMEMBERED = 64
"""Losses whose median a loss is compared with."""
LEAST = 16
"""Losses before which none counts as a spike."""


class Health:
    """Judges losses and gradient norms; the same on every rank, since all see the same numbers.

    Args:
        config: which numbers are out of range.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._losses: list[float] = []

    @property
    def limits(self) -> tuple[float, float] | None:
        """The largest (loss, gradient norm) with which a step updates the weights; None for any that are finite."""
        if not self._config.spike and not self._config.largest_norm:
            return None
        known = self._config.spike and len(self._losses) >= LEAST
        return (
            self._config.spike * median(self._losses) if known else math.inf,
            self._config.largest_norm or math.inf,
        )

    def judge(self, loss: float, norm: float) -> str | None:
        """Returns what is wrong with a step, or None; takes note of its loss when nothing is."""
        limits = self.limits or (math.inf, math.inf)
        if not math.isfinite(norm):
            return "the gradient isn't finite"
        if not loss <= limits[0]:
            return f"the loss is over {self._config.spike:g} times the median of the last {len(self._losses)}"
        if norm > limits[1]:
            return f"the gradient norm is over recovery.largest_norm = {self._config.largest_norm:g}"
        self._losses = [*self._losses[1 - REMEMBERED :], loss] if self._config.spike else []
        return None

    def state(self) -> list[float]:
        """Returns what a checkpoint keeps."""
        return self._losses

    def restore(self, values: Mapping[str, Any]) -> None:
        """Takes back `state`, under ``losses``."""
        self._losses = [float(loss) for loss in values.get("losses", [])]
