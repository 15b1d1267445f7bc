"""The gradient noise scale: the batch up to which twice the rows nearly halve the steps.

A step's gradient is the true one plus noise, whose variance falls with the rows: E |g_B|^2 = |G|^2 + S / B. Two
batches of unlike size give both, and B_noise = S / |G|^2. The small batch is every eighth row of the step's own: its
gradient is made by one more forward and backward in which all other rows have no targets, so that it is what the layout
computes, summed and normed as any gradient, under every axis.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018), equation 2.9 and appendix A.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import torch

from meshwright.errors import ConfigError, PlanError
from meshwright.json_types import JsonObject
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import IGNORED

SHARE = 8
"""One row in so many is of the small batch; of a batch of fewer rows it is one row."""
WINDOW = 50
"""Measurements whose means are divided: the ratio of two estimates is biased, that of their means hardly."""


def check_noise_scale(every: int, layout: Layout, has_own_loss: bool) -> None:
    """Refuses a noise scale of what isn't the mean over target tokens of one step's rows.

    Args:
        every: steps between measurements; 0 for none.
        layout: of the run.
        has_own_loss: whether the model's loss has terms beside the cross-entropy of its targets.

    Raises:
        PlanError: for a layout, with what to write instead.
        ConfigError: for a model.
    """
    if not every:
        return
    cure = "leave train.noise_scale out"
    if layout.compress.keeps_errors:
        raise PlanError(
            f"train.noise_scale = {every} needs gradients of a part of the rows, and compress={layout.compress} keeps "
            f"what it owes from sum to sum; take compress=int8 or none, or {cure}"
        )
    if layout.islands > 1:
        raise PlanError(
            f"train.noise_scale = {every} is of the rows that all ranks take a step with, and {layout.islands} islands "
            f"take steps of their own; take replicate in place of islands, or {cure}"
        )
    if has_own_loss:
        raise ConfigError(
            f"train.noise_scale = {every} leaves out targets, and this model's loss has terms that aren't of targets; "
            f"{cure}"
        )


def small_batch(batches: Sequence[MicroBatch], first_row: int, rows: int) -> list[MicroBatch]:
    """Returns micro-batches in which only the rows of the small batch have targets.

    Args:
        batches: of this rank, in order.
        first_row: number of their first row in the global batch.
        rows: of the global batch.
    """
    share = min(SHARE, rows)
    small: list[MicroBatch] = []
    for batch in batches:
        numbers = torch.arange(first_row, first_row + len(batch.tokens), device=batch.targets.device)
        is_kept = (numbers % share == 0).unsqueeze(1)
        small.append(dataclasses.replace(batch, targets=torch.where(is_kept, batch.targets, IGNORED)))
        first_row += len(batch.tokens)
    return small


class NoiseScale:
    """Means of the last measurements.

    Args:
        every: steps between measurements; 0 for none.
        rows: of the global batch.
    """

    def __init__(self, every: int, rows: int) -> None:
        self._every, self._rows = every, rows
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def means(self) -> tuple[float, float] | None:
        """Means of |G|^2 and S over the window; None before the first measurement."""
        if not self._pairs:
            return None
        signal, variance = (sum(values) / len(self._pairs) for values in zip(*self._pairs))
        return signal, variance

    def is_due(self, step: int) -> bool:
        """Returns whether the step after ``step`` steps is measured."""
        return self._every > 0 and (step + 1) % self._every == 0

    def observe(self, small: tuple[float, float], large: tuple[float, float]) -> dict[str, float]:
        """Takes in a measurement; returns the scalars to record, none where a norm isn't finite.

        Args:
            small: gradient norm and targets of the small batch.
            large: those of the whole batch.
        """
        (small_norm, small_targets), (norm, targets) = small, large
        if not math.isfinite(small_norm + norm) or not 0 < small_targets < targets:
            return {}
        # Rows that hold as many targets as the mean one, so that the scale is of rows.
        small_rows, rows = small_targets * self._rows / targets, float(self._rows)
        signal = (rows * norm**2 - small_rows * small_norm**2) / (rows - small_rows)  # |G|^2
        variance = (small_norm**2 - norm**2) / (1 / small_rows - 1 / rows)  # S
        self._pairs.append((signal, variance))
        assert self.means is not None
        mean_signal, mean_variance = self.means
        scalars = {"noise/signal": signal, "noise/variance": variance}
        # Few measurements may sum to a negative signal, which is no scale yet.
        return scalars | ({"noise/scale_rows": mean_variance / mean_signal} if mean_signal > 0 else {})

    def state(self) -> JsonObject:
        """Returns what a checkpoint holds of it; nothing where nothing is measured."""
        return {"noise": [list(pair) for pair in self._pairs]} if self._every else {}

    def restore(self, values: JsonObject) -> None:
        """Restores what `state` returned, from among a checkpoint's plain values."""
        self._pairs.clear()
        self._pairs.extend((float(signal), float(variance)) for signal, variance in values.get("noise", ()))
