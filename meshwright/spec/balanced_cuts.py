"""Contiguous runs of layers for stages, the dearest stage as cheap as can be: one algorithm for runtime and planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Cuts:
    """Dynamic programming over (stage, layers dealt), for N sets of costs at once; exact.

    Of equal cuts the last stage takes as many layers as it may; those before it are cut likewise, as well as can be.

    Args:
        layers: cost of each layer for each kind of stage, (N, kinds, L); what comes after the last layer, such as a
            head, counts with it.
        places: kind of each stage; None for stages that are all of one kind, as many as there are layers.
        limits: most layers of each stage, (N, stages); None for no limit.
        blocked: layers in front of which no cut can be.
    """

    def __init__(
        self,
        layers: Any,
        places: Sequence[int] | None = None,
        limits: Any = None,
        blocked: Iterable[int] = (),
    ) -> None:
        layers = np.asarray(layers, dtype=float)
        self.sets, _, self.layers = layers.shape
        sums = np.concatenate([np.zeros((*layers.shape[:2], 1)), np.cumsum(layers, axis=2)], axis=2)
        starts = np.arange(self.layers + 1)
        self._sizes = starts[:, None] - starts[None, :]
        # Seconds, or whatever is counted, of the layers from one place (last index) to another (the one before it).
        spans = np.where(self._sizes > 0, sums[:, :, :, None] - sums[:, :, None, :], np.inf)
        spans[:, :, [place for place in blocked if place < self.layers], :] = np.inf
        self._spans, self._places, self._limits = spans, places, limits
        self._dearest = [np.where(starts == 0, 0.0, np.full((self.sets, 1), np.inf))]
        self._starts: list[np.ndarray] = []

    def bounds(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first layer of each stage, and at last the number of layers, (N, stages + 1); and which can be.

        Args:
            stages: how many; where kinds are given, as many as these.
        """
        while len(self._starts) < stages:
            self._add(len(self._starts))
        found = np.full((self.sets, stages + 1), self.layers)
        each = np.arange(self.sets)
        for stage in range(stages, 0, -1):
            found[:, stage - 1] = self._starts[stage - 1][each, found[:, stage]]
        return found, np.isfinite(self._dearest[stages][:, self.layers])

    def _add(self, stage: int) -> None:
        spans = self._spans[:, 0 if self._places is None else self._places[stage]]
        dearest = np.maximum(self._dearest[stage][:, None, :], spans)
        if self._limits is not None:
            dearest[self._sizes[None] > np.asarray(self._limits)[:, stage, None, None]] = np.inf
        self._starts.append(dearest.argmin(axis=2))
        self._dearest.append(dearest.min(axis=2))
