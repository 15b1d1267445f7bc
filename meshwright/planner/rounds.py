"""How islands join, as far as it costs time and memory, and when it would pay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.compression import BLOCK_VALUES, FORMATS

JOIN = "join"
"""Part of a step's time: joins, a round's share of them."""
OUTER = "outer"
"""Part of a rank's memory: weights of the last join, and the outer momentum."""
NOTED_SHARE = 0.2
"""Share of a step that the exposed sums of gradients take from which a plan names islands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """How islands join."""

    steps: int = 30
    """Steps of a round."""
    compress: str = "none"
    """Number format of movements on the wire, one of `FORMATS`; ``none`` where they travel in the weights' own type."""
    direct_peers: int = 0
    """Islands to which each sends all of its weights, at most (gossip); 0 where all islands get the mean of all."""
    fragments: int = 1
    """Fragments of the weights, each of which joins once a round."""
    delay: int = 0
    """Steps of compute between the start of an exchange and the outer step that takes it."""
    free: frozenset[str] = frozenset()
    """Names in `settings` that nobody gave, which a plan may choose where islands are allowed."""
    most_steps: int | None = None
    """Longest round that leaves enough of them in the run, where its steps are known."""
    joint_share: float = 0.0
    """Share of the run's steps that all islands take as one, before the first round; 0 where its steps aren't known."""

    @property
    def rounded_bytes(self) -> float:
        """Bytes of a rounded element on the wire; 0 where movements travel in the weights' own type."""
        return FORMATS[self.compress].block_bytes / BLOCK_VALUES if self.compress != "none" else 0.0

    @property
    def settings(self) -> dict[str, int | str]:
        """How islands join, by the names of a run's settings ``outer.*``."""
        return {"every": self.steps, "fragments": self.fragments, "delay": self.delay, "compress": self.compress}

    @property
    def age(self) -> int:
        """Steps after which all islands have what one of them trained, at most."""
        return self.steps + self.delay

    @property
    def outer_tensors(self) -> int:
        """Tensors of the outer optimizer that a weight takes between joins: start, momentum, what arrived early."""
        return 3 if self.delay else 2

    @property
    def travelling_tensors(self) -> float:
        """Tensors that exchanges under way take at most for each weight: what is sent, and the movement itself."""
        return 2 * math.ceil(self.delay * self.fragments / self.steps) / self.fragments

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
