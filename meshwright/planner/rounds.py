"""How islands join, as far as it costs time and memory, and when it would pay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JOIN = "join"
"""Part of a step's time: joins, a round's share of them."""
OUTER = "outer"
"""Part of a rank's memory: weights of the last join, and the outer momentum."""
OUTER_TENSORS = 2
"""Tensors of an outer optimizer that a weight takes between joins."""
NOTED_SHARE = 0.2
"""Share of a step that the exposed sums of gradients take from which a plan names islands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """How islands join."""

    steps: int = 30
    """Steps of a round."""
    rounded_bytes: float = 0.0
    """Bytes of a rounded element on the wire; 0 where movements travel in the weights' own type."""

    def advice(self, parts: Mapping[str, float]) -> list[str]:
        """Returns what islands would win over a plan, in a sentence; none where little of a step is exposed.

        Args:
            parts: seconds of the plan's step by part.
        """
        step_s, exposed_s = sum(parts.values()), parts.get("reduce", 0.0) + parts.get("gather", 0.0)
        if JOIN in parts or exposed_s < NOTED_SHARE * step_s:
            return []
        return [
            f"{exposed_s / step_s:.0%} of the step waits for gradients and weights: islands would pay for it once in "
            f"{self.steps} steps, which changes the training (docs/islands.md; --fix islands=2 prices them)"
        ]
