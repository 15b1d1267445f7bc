"""The learning rate: the schedule as a pure function of the step, and AdaScale's of what gradients were measured to be.

AdaScale takes a recipe of B1 rows (`optimizer.lr_batch`) to a batch of B = S B1. With |G|^2 the square of the mean
gradient and V the variance of one row's, a step of B rows is worth

    r = (V / B1 + |G|^2) / (V / B + |G|^2)         gain, from 1 (no noise) to S (nothing but noise)

steps of B1. Those are what `train.steps` and the schedule then count: after tau of them the rate is r lr(floor(tau)),
and the run ends when tau has come to `train.steps`. Means are those of `train.noise_scale`, and r is of the last
measurement before a step.
Source: Johnson, Agrawal, Gu, Guestrin: AdaScale SGD (ICML 2020), algorithm 1 and equation 4, for SGD; Qiao et al.,
Pollux (OSDI 2021), take the root of the gain for Adam.
"""

from __future__ import annotations

import math

from meshwright.json_types import JsonObject
from meshwright.train.config import ScheduleConfig
from meshwright.train.run_config import RunConfig


def learning_rate(step: int, steps: int, peak: float, config: ScheduleConfig) -> float:
    """Returns the learning rate of a step.

    Args:
        step: steps done before this one, from 0.
        steps: steps of the whole run.
        peak: learning rate at the end of warm-up.
        config: shape.

    Source: cosine: Loshchilov & Hutter, SGDR (ICLR 2017), equation 5; warmup-stable-decay: Hu et al., MiniCPM (2024).
    """
    warmup = config.warmup_steps(steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.shape == "constant":
        return peak
    # At least one step after warm-up, so that the divisions below are defined.
    last_step = max(warmup + 1, steps - 1)
    if config.shape == "wsd":
        start = round(steps * (1 - config.decay_share))
        if config.decay_share:
            # Rounding must neither start the decay within warm-up nor after the last step.
            start = max(warmup, min(start, last_step - 1))
        progress = max(0.0, (step - start) / max(1, last_step - start))
    else:
        progress = (step - warmup) / (last_step - warmup)
    progress = min(1.0, progress)
    multiplier = 0.5 * (1 + math.cos(math.pi * progress)) if config.shape == "cosine" else 1 - progress
    return peak * (config.floor + (1 - config.floor) * multiplier)


def scale_gain(signal: float, variance: float, rows: int, scaled_rows: int) -> float:
    """Returns how many steps of ``rows`` rows a step of ``scaled_rows`` rows is worth.

    Args:
        signal: |G|^2, square of the mean gradient's norm; an estimate under 0 counts as 0.
        variance: V, of one row's gradient; likewise.
        rows: B1.
        scaled_rows: B, at least as many.
    """
    signal, variance = max(0.0, signal), max(0.0, variance)
    if not variance:
        return 1.0
    return (variance / rows + signal) / (variance / scaled_rows + signal)


def nothing_left(step: int, steps: int, scaled_steps: float | None = None) -> str:
    """Returns a sentence about a run that has no step left to train, and what trains on.

    Args:
        step: steps done.
        steps: `TrainConfig.steps`.
        scaled_steps: that the steps done were worth, where they count by their gain.
    """
    worth = "" if scaled_steps is None else f", worth {scaled_steps:.1f}"
    above = step if scaled_steps is None else math.floor(scaled_steps)
    return (
        f"{step} steps are done{worth}, and train.steps = {steps} asks for no more, so that none was left to train; to "
        f"train on, set train.steps above {above}"
    )


class RateSchedule:
    """The learning rate of each step of a run, and its last step.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        optimizer, train = config.optimizer, config.train
        self._steps, self._schedule, self._rows = train.steps, config.schedule, train.batch
        self._peak, self._base_rows = optimizer.peak(train.batch), optimizer.lr_batch
        self._power = 0.5 if optimizer.lr_rule == "adascale_sqrt" else 1.0
        self.follows_noise = optimizer.follows_noise
        """Whether steps count by their gain."""
        # Up to a step, of which the progress is known; from there on each step is worth as much.
        self._gain, self._gain_step, self._gain_progress = 1.0, 0, 0.0

    def progress(self, step: int) -> float:
        """Returns the steps of the schedule that ``step`` steps are worth: as many, unless they count by their gain."""
        return self._gain_progress + (step - self._gain_step) * self._gain

    def rate(self, step: int) -> float:
        """Returns the learning rate of the step after ``step`` steps."""
        done = math.floor(self.progress(step))
        return self._gain**self._power * learning_rate(done, self._steps, self._peak, self._schedule)

    @property
    def warmup(self) -> int:
        """Steps of the schedule in which rates grow (`progress`)."""
        return self._schedule.warmup_steps(self._steps)

    def last_step(self, step: int) -> int:
        """Returns the steps after which the run ends, as it looks after ``step`` of them."""
        return step + max(0, math.ceil((self._steps - self.progress(step)) / self._gain))

    def is_over(self, step: int) -> bool:
        """Returns whether the run ends after ``step`` steps."""
        return self.progress(step) >= self._steps

    def nothing_left(self, step: int) -> str:
        """Returns why no step is left to train after ``step`` steps; empty where some are."""
        if not self.is_over(step):
            return ""
        return nothing_left(step, self._steps, self.progress(step) if self.follows_noise else None)

    def take_measurement(self, step: int, means: tuple[float, float] | None) -> dict[str, float]:
        """Has the steps from the next one on count by the gain of a measurement; returns the scalars to record.

        Args:
            step: steps done.
            means: signal and variance as they are known after it; None before any measurement.
        """
        if not self.follows_noise or means is None:
            return {}
        self._gain_progress, self._gain_step = self.progress(step), step
        self._gain = scale_gain(*means, self._base_rows, self._rows)
        return {"adascale/gain": self._gain, "adascale/progress": self._gain_progress}

    def outcome(self, step: int) -> dict[str, float]:
        """Returns what the end of a run reports of ``step`` steps: what they were worth, where steps have a gain."""
        return {"scaled_steps": self.progress(step)} if self.follows_noise else {}

    def state(self) -> JsonObject:
        """Returns what a checkpoint holds of it; nothing where the step alone determines the rate."""
        if not self.follows_noise:
            return {}
        return {"rate": {"gain": self._gain, "step": self._gain_step, "progress": self._gain_progress}}

    def restore(self, values: JsonObject) -> None:
        """Restores what `state` returned, from among a checkpoint's plain values."""
        if (saved := values.get("rate")) is not None:
            self._gain, self._gain_step = float(saved["gain"]), int(saved["step"])
            self._gain_progress = float(saved["progress"])
