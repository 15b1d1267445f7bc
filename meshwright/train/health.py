"""Judges a step's loss and gradient norm, by the user's limits and by limits learned from the run's past."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from meshwright.json_types import JsonObject
from meshwright.train.config import RecoveryConfig

REMEMBERED = 64
"""Number of last steps whose losses and gradient norms are the run's past."""
LEAST = 16
"""Least number of steps from which limits are learned."""
LOSS_FACTOR, LOSS_DEVIATIONS = 3.0, 20.0
"""A loss is out of range above the median by twice its size, and by so many robust standard deviations. The spikes that
large runs report and recover from stay below. Source: Chowdhery et al., PaLM (2022), 5.1; Zhang et al., OPT (2022)."""
NORM_FACTOR, NORM_DEVIATIONS = 50.0, 12.0
"""A gradient norm is out of range above so many times the median, and by so many robust deviations of its logarithm:
norms are spread over decades, and clipping makes most of their spikes harmless."""
FIRST_SHARE = 0.1
"""A loss is in range up to so large a part of the run's first losses above the median, and a norm up to the first
norms: a text learned by heart has losses near 0, of which many times as much is still nothing."""
WARMUP_FACTOR = 2.0
"""While the learning rate warms up, when losses and norms still move as a whole, limits are so much wider."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class Limits(NamedTuple):
    """The largest numbers with which a step updates the weights."""

    loss: float
    """In nats per target token, or in the unit of the model's own loss."""
    norm: float
    """2-norm of the whole gradient, before clipping."""


NO_LIMITS = Limits(math.inf, math.inf)


class Health:
    """Judges losses and gradient norms; an island's ranks come to the same verdict, since they see the same numbers.

    The user's limits (`spike`, `largest_norm`) select the steps to which ``recovery.on_sick`` applies. The learned
    limits only select steps to recompute, in case the machine erred; they never change the training of a correct one.

    Args:
        config: which numbers are out of range.
        warmup: steps of the learning rate's warm-up.
        progress: returns the steps of the schedule that a number of steps are worth, as `RateSchedule.progress`.
    """

    def __init__(self, config: RecoveryConfig, warmup: int = 0, progress: Callable[[int], float] = float) -> None:
        self.config, self._warmup, self._progress = config, warmup, progress
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._first: Limits | None = None
        self._quiet = 0

    @property
    def limits(self) -> Limits | None:
        """The user's own limits; None for any numbers that are finite."""
        if not self.config.spike and not self.config.largest_norm:
            return None
        # A median of a few losses is no reference.
        has_history = self.config.spike and len(self._losses) >= LEAST
        return Limits(
            self.config.spike * median(self._losses) if has_history else math.inf,
            self.config.largest_norm or math.inf,
        )

    def learned(self, step: int) -> Limits:
        """Returns the limits learned from the last steps; `NO_LIMITS` before `LEAST` steps.

        Args:
            step: steps done before it.
        """
        if not self.config.learned_limits or self._quiet or len(self._losses) < LEAST:
            return NO_LIMITS
        width = WARMUP_FACTOR if self._progress(step) < self._warmup else 1.0
        loss, spread = _centre(self._losses)
        first = self._first or Limits(0.0, 0.0)
        rise = max(LOSS_DEVIATIONS * spread, (LOSS_FACTOR - 1.0) * abs(loss), FIRST_SHARE * abs(first.loss))
        loss += width * rise
        # Gradient norms are spread over decades: their logarithms are roughly normal.
        logarithm, spread = _centre([math.log(max(norm, 1e-300)) for norm in self._norms])
        norm = _exp(logarithm + width * max(NORM_DEVIATIONS * spread, math.log(NORM_FACTOR)))
        return Limits(loss, max(norm, first.norm))

    def suspect(self, step: int, loss: float, norm: float) -> str | None:
        """Returns why a step's numbers may be the machine's error, or None.

        Args:
            step: steps done before it.
            loss: of the step.
            norm: of its gradient.
        """
        if not self.config.learned_limits or self._quiet:
            return None
        limits = self.learned(step)
        if not math.isfinite(norm) or not math.isfinite(loss):
            return "the loss or the gradient isn't finite"
        if loss > limits.loss:
            return f"the loss {loss:.4g} is over {limits.loss:.4g}, which the last {len(self._losses)} steps give"
        if norm > limits.norm:
            return f"the gradient norm {norm:.4g} is over {limits.norm:.4g}, which the last steps give"
        return None

    def judge(self, loss: float, norm: float) -> str | None:
        """Returns why a step violates the user's limits, or None; then its numbers join the run's past."""
        limits = self.limits or NO_LIMITS
        self._quiet = max(0, self._quiet - 1)
        if not math.isfinite(norm):
            return "the gradient isn't finite"
        # Negated, so that a NaN loss violates it.
        if not loss <= limits.loss:
            return f"the loss is over {self.config.spike:g} times the median of the last {len(self._losses)}"
        if norm > limits.norm:
            return f"the gradient norm is over recovery.largest_norm = {self.config.largest_norm:g}"
        if self.config.spike or self.config.learned_limits:
            # Only accepted steps enter the past, so that anomalies don't widen the limits.
            self._losses = [*self._losses[1 - REMEMBERED :], loss]
            self._norms = [*self._norms[1 - REMEMBERED :], norm]
            if self._first is None and len(self._losses) == LEAST:
                self._first = Limits(median(self._losses), median(self._norms))
        return None

    def accept(self) -> None:
        """Forgets the run's past, after suspect numbers recurred and so were the training's own.

        No step is suspect until a new past has been collected.
        """
        self._losses, self._norms, self._quiet = [], [], REMEMBERED

    def state(self) -> dict[str, object]:
        """Returns plain values for a checkpoint."""
        return {"losses": self._losses, "norms": self._norms, "first": list(self._first or ()), "quiet": self._quiet}

    def restore(self, values: JsonObject) -> None:
        """Restores `state`'s values; a checkpoint without norms restores no past."""
        losses, norms = ([float(value) for value in values.get(name, [])] for name in ("losses", "norms"))
        self._losses, self._norms = (losses, norms) if len(losses) == len(norms) else ([], [])
        first = [float(value) for value in values.get("first", [])]
        self._first = Limits(*first) if len(first) == len(Limits._fields) else None
        self._quiet = int(values.get("quiet", 0))


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """Returns (median, standard deviation of a normal distribution with this median absolute deviation)."""
    middle = median(values)
    return middle, _NORMAL * median(abs(value - middle) for value in values)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
