"""The run config: a tree of frozen dataclasses, from TOML, from Python or from flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.config import Config
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.launch.config import LaunchConfig
from meshwright.models.config import ModelConfig
from meshwright.monitor.config import MonitorConfig
from meshwright.train.config import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Config):
    """Everything that a run is made of."""

    layout: str = "auto"
    """Text form of the layout, or ``auto`` for the planner's choice."""
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
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over steps."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is shown and written."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How ranks start and how long they may wait."""

    def check(self) -> None:
        """Refuses combinations without effect."""
        if self.schedule.warmup >= self.train.steps and self.schedule.shape != "constant":
            raise ConfigError(
                f"schedule.warmup = {self.schedule.warmup} leaves none of train.steps = {self.train.steps} for the "
                f"{self.schedule.shape} decay; take fewer warm-up steps"
            )
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"devices = {self.devices}: at least one rank is needed")
