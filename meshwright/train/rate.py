"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from meshwright.train.config import ScheduleConfig


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
