"""Settings of the loop: optimizer, learning rate, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config import Config
from meshwright.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """AdamW and what surrounds it. Source: Loshchilov & Hutter, Decoupled Weight Decay (ICLR 2019)."""

    lr: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay per unit of learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: weights of two and more dims, or all."""
    clip: float = 1.0
    """Largest global 2-norm of the gradient; 0 for no clipping."""
    implementation: Literal["fused", "foreach", "single"] = "fused"
    """Which of torch's AdamW kernels runs the update."""

    def check(self) -> None:
        """Refuses values for which AdamW isn't defined."""
        for name in ("lr", "eps", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it can't be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it must be at least 0 and under 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Config):
    """The learning rate over steps: linear warm-up, then a shape down to ``floor`` x the peak."""

    shape: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``cosine``; ``linear``; ``wsd``: stable, then linear decay in the last ``decay_share``; ``constant``."""
    warmup: int = 100
    """Steps of linear warm-up from 0."""
    floor: float = 0.1
    """Last learning rate as a share of the peak."""
    decay_share: float = 0.2
    """Share of the steps that decay, for ``wsd``."""

    def check(self) -> None:
        """Refuses shares outside 0..1."""
        for name in ("floor", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name} = {getattr(self, name)}: it is a share, from 0 to 1")
        if self.warmup < 0:
            raise ConfigError(f"schedule.warmup = {self.warmup}: it can't be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Config):
    """The loop."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch: int = 16
    """Rows of the global batch; every layout trains on the same rows in the same steps."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    sample: str = ""
    """Prompt of the text generated at the end; empty for the beginning of the held-out text."""
    sample_tokens: int = 200
    """Length of that text in tokens; 0 for none."""

    def check(self) -> None:
        """Refuses counts under one."""
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: it must be at least 1")
        if self.sample_tokens < 0:
            raise ConfigError(f"train.sample_tokens = {self.sample_tokens}: it can't be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(Config):
    """Validation loss over the held-out text."""

    every: int = 250
    """Steps between evaluations; 0 for one at the end alone."""
    rows: int = 512
    """Rows of held-out text used along the way; the last evaluation takes all of them."""

    def check(self) -> None:
        """Refuses negative counts."""
        if self.every < 0 or self.rows < 1:
            raise ConfigError(f"evaluation: every = {self.every} must be at least 0, rows = {self.rows} at least 1")
