"""The run config: a tree of frozen dataclasses, from TOML, from Python or from flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.config import Config
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.launch.config import LaunchConfig, RayConfig, SlurmConfig
from meshwright.launch.kubernetes_config import KubernetesConfig
from meshwright.models.config import ModelConfig
from meshwright.monitor.config import MonitorConfig
from meshwright.spec.plan import check_allowed, check_fits
from meshwright.train.config import (
    EvaluationConfig,
    OptimizerConfig,
    OuterConfig,
    RecoveryConfig,
    ScheduleConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Config):
    """Everything that a run is made of."""

    layout: str = "auto"
    """Text form of the layout, or ``auto`` for the planner's choice."""
    allow: tuple[str, ...] = ()
    """With ``layout = auto``: what the plan may do to the numbers of training. ``lossy``, send gradients and weights
    rounded; ``islands``, join copies once in ``outer.every`` steps. A plan for the ranks that are left after a fault
    begins neither."""
    fits: float = 0.99
    """With ``layout = auto``: chance with which the plan fits the memory of its devices."""
    trials: int = 0
    """With ``layout = auto``: run this many of the best layouts for ten steps each and keep the fastest."""
    devices: int | None = None
    """Number of ranks; None for all GPUs, else all cores."""
    run: str = ""
    """The run's directory; empty for a new one under ``runs/``."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """How islands join."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over steps."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """What happens when a rank fails."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is shown and written."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How ranks start and how long they may wait."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What ``--on slurm`` asks for."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    """What ``--on kubernetes`` asks for."""
    ray: RayConfig = field(default_factory=RayConfig)
    """What ``--on ray`` asks for."""

    @property
    def least_steps(self) -> int:
        """Fewest steps that the run can have: ``train.steps``, unless they count by their gain (`train.rate`)."""
        if not self.optimizer.follows_noise:
            return self.train.steps
        return -(-self.train.steps * self.optimizer.lr_batch // self.train.batch)

    def joining(self, planned: Mapping[str, int | str]) -> Self:
        """Returns the config with a plan's settings for islands (`Plan.outer`) where the user gave none."""
        return dataclasses.replace(self, outer=self.outer.filled(planned))

    def check(self) -> None:
        """Refuses combinations without effect."""
        if (self.schedule.warmup or 0) >= self.train.steps and self.schedule.shape != "constant":
            raise ConfigError(
                f"schedule.warmup = {self.schedule.warmup} leaves none of train.steps = {self.train.steps} for the "
                f"{self.schedule.shape} decay; take fewer warm-up steps"
            )
        self._check_noise()
        if self.recovery.on_device_error == "drain" and not (self.recovery.enabled and self.monitor.health_s):
            raise ConfigError(
                "recovery.on_device_error = drain needs monitor.health_s, as --monitor.health-s 10, which samples the "
                "devices, and recovery.enabled, which starts the ranks again without one"
            )
        check_allowed(self.allow)
        check_fits(self.fits)
        if self.allow and self.layout != "auto":
            raise ConfigError(
                f"allow = {','.join(self.allow)} lets the planner choose, with layout = auto; name compress=int8 or "
                "islands=2 in the layout instead"
            )
        if self.trials < 0 or (self.trials and self.layout != "auto"):
            raise ConfigError(f"trials = {self.trials}: it is 0 or more, and chooses among layouts with layout = auto")
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"devices = {self.devices}: at least one rank is needed")

    def _check_noise(self) -> None:
        """Refuses rates that follow the noise of gradients where it isn't measured, or a step has no gain."""
        optimizer, train = self.optimizer, self.train
        if not optimizer.follows_noise:
            return
        named = f"optimizer.lr_rule = {optimizer.lr_rule}"
        if not train.noise_scale:
            raise ConfigError(f"{named} needs train.noise_scale, as --train.noise-scale 10, which measures the noise")
        if train.batch < optimizer.lr_batch:
            raise ConfigError(
                f"{named} takes a rate from few rows to more, and train.batch = {train.batch} is less than "
                f"optimizer.lr_batch = {optimizer.lr_batch}; take lr_rule = sqrt or linear, which go both ways"
            )
        if self.outer.meet:
            raise ConfigError(
                f"{named} would have each site of {self.outer.meet} end after other steps than the others; take "
                "lr_rule = sqrt or linear"
            )
