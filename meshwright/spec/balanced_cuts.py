"""Cuts layers into contiguous stages so that the costliest stage is as cheap as possible, for runtime and planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ROUNDING = 1e-9
"""Relative difference up to which two costs are equal."""


class Cuts:
    """Dynamic programming over (stage, layers dealt), for N sets of costs at once; exact.

    Of equal cuts the last stage gets the most layers, or the fewest; the stages before it are cut by the same rule.
    Every stage has a layer but the last one, which may have the head alone where that is better.

    Args:
        layers: cost of each layer for each kind of stage, (N, kinds, L).
        head: cost of what comes after the last layer, on the last stage, (N, kinds).
        stage_kinds: kind of each stage; None for stages that are all of one kind, as many as there are layers.
        limits: most layers of each stage, (N, stages); None for no limit.
        blocked: layers in front of which no cut can be; L stands for the head.
        fills_first: of equal cuts the last stage gets the fewest layers.
    """

    def __init__(
        self,
        layers: Any,
        head: Any,
        stage_kinds: Sequence[int] | None = None,
        limits: Any = None,
        blocked: Iterable[int] = (),
        fills_first: bool = False,
    ) -> None:
        layers = np.asarray(layers, dtype=float)
        self.sets, _, self.layers = layers.shape
        # The head is cut as if it were one layer more.
        pieces = np.concatenate([layers, np.asarray(head, dtype=float)[:, :, None]], axis=2)
        sums = np.concatenate([np.zeros((*layers.shape[:2], 1)), np.cumsum(pieces, axis=2)], axis=2)
        starts = np.arange(self.layers + 2)
        # (N, kinds, stop, start): cost of the pieces [start, stop), from prefix sums; infinite for an empty stage.
        spans = np.where(starts[:, None] > starts, sums[:, :, :, None] - sums[:, :, None, :], np.inf)
        # A cut in front of a blocked piece would end some stage there.
        spans[:, :, [piece for piece in blocked if piece <= self.layers], :] = np.inf
        starts = np.minimum(starts, self.layers)
        self._sizes = starts[:, None] - starts[None, :]
        self._spans, self._stage_kinds, self._limits, self._fills_first = spans, stage_kinds, limits, fills_first
        self._cost = [np.where(np.arange(self.layers + 2) == 0, 0.0, np.full((self.sets, 1), np.inf))]
        self._best_start: list[np.ndarray] = []

    def bounds(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first layer of each stage, and at last the number of layers, (N, stages + 1); and which can be.

        Args:
            stages: how many; where kinds are given, as many as these.
        """
        while len(self._best_start) < stages:
            self._add(len(self._best_start))
        # Walks back from the last stage's end: the best start of a stage is the end of the stage before it.
        bounds = np.full((self.sets, stages + 1), self.layers + 1)
        sets = np.arange(self.sets)
        for stage in range(stages, 0, -1):
            bounds[:, stage - 1] = self._best_start[stage - 1][sets, bounds[:, stage]]
        return np.minimum(bounds, self.layers), np.isfinite(self._cost[stages][:, self.layers + 1])

    def _add(self, stage: int) -> None:
        spans = self._spans[:, 0 if self._stage_kinds is None else self._stage_kinds[stage]]
        # cost[stage + 1][stop] = min over start of max(cost[stage][start], span[stop, start]).
        cost = np.maximum(self._cost[stage][:, None, :], spans)
        if self._limits is not None:
            cost[self._sizes[None] > np.asarray(self._limits)[:, stage, None, None]] = np.inf
        # The first minimum: of equal cuts the smallest start, so the last stage gets the most layers.
        best = cost.argmin(axis=2)
        if self._fills_first:
            # Sums of equal layers differ by their rounding.
            is_equal = cost <= (1.0 + ROUNDING) * cost.min(axis=2, keepdims=True)
            best = cost.shape[2] - 1 - is_equal[:, :, ::-1].argmax(axis=2)
        self._best_start.append(best)
        self._cost.append(cost.min(axis=2))
