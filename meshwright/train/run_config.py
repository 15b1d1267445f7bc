"""The run config: a tree of frozen dataclasses, from TOML, from Python or from flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.config import Config, IdleSetting
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

    def supervised_settings(self) -> tuple[str, ...]:
        """Returns the settings that differ from their default and that only a process beside the ranks reads."""
        paths = ("launch.grace_s", "launch.stop_s", *(f"recovery.{name}" for name in _SUPERVISED))
        return tuple(path for path in paths if self.value(path) != _DEFAULTS.value(path))

    def joining(self, planned: Mapping[str, int | str]) -> Self:
        """Returns the config with a plan's settings for islands (`Plan.outer`) where the user gave none."""
        return dataclasses.replace(self, outer=self.outer.filled(planned))

    def idle_settings(self) -> tuple[IdleSetting, ...]:
        """Returns the settings that differ from their default and can't have an effect."""
        return tuple(
            IdleSetting(
                need.setting,
                f"{need.setting} = {self.value(need.setting)} has no effect unless {need.condition}; leave it out, or "
                f"write {need.cure}",
            )
            for need in _NEEDS
            if self.value(need.setting) != _DEFAULTS.value(need.setting) and not need.is_met(self)
        )

    def without_idle_settings(self) -> Self:
        """Returns the config with the defaults of all settings that can't have an effect."""
        config = self
        for setting in self.idle_settings():
            config = config.with_value(setting.path, _DEFAULTS.value(setting.path))
        return config

    def check(self) -> None:
        """Refuses combinations without effect."""
        for setting in self.idle_settings():
            raise ConfigError(setting.message)
        # Epochs are checked as the steps that they come to.
        decays = self.schedule.shape != "constant"
        warmup = self.schedule.warmup_steps(self.train.steps)
        if not self.train.epochs and warmup >= self.train.steps and decays:
            raise ConfigError(
                f"schedule.warmup = {warmup} leaves none of train.steps = {self.train.steps} for the "
                f"{self.schedule.shape} decay; take fewer warm-up steps"
            )
        if self.model.context is not None and self.data.sequence > self.model.context:
            raise ConfigError(
                f"data.sequence = {self.data.sequence} tokens a row are more than model.context = "
                f"{self.model.context}, the longest that the model is made for; shorten the rows, or leave "
                "model.context out, which is then as long as they are"
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
        if train.epochs:
            raise ConfigError(
                f"{named} ends a run by the gain of its steps, not by the rows that they read; give train.steps, in "
                f"steps of optimizer.lr_batch rows, in place of train.epochs = {train.epochs:g}"
            )
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


class _Need(NamedTuple):
    """What a setting needs of others to have an effect."""

    setting: str
    """Its dotted path."""
    is_met: Callable[[RunConfig], bool]
    """Whether the others let it."""
    condition: str
    """The same in words."""
    cure: str
    """Flag with which it has an effect."""


def _is_decaying(config: RunConfig) -> bool:
    """Returns whether the learning rate leaves its peak."""
    schedule = config.schedule
    return schedule.shape in ("cosine", "linear") or (schedule.shape == "wsd" and schedule.decay_share > 0)


def _prints_every(config: RunConfig) -> bool:
    """Returns whether anything is shown or written every ``monitor.every`` steps."""
    monitor = config.monitor
    return monitor.display in ("auto", "plain") or monitor.tensorboard or bool(monitor.trackers)


_SUPERVISED = ("attempts", "on_death", "layouts", "minimum", "back_s", "hang_s", "idle_s", "copies", "snapshot_every")
"""Settings of `RecoveryConfig` that only a supervisor reads."""
# Not train.prove_s: who adds --train.no-prove to a command whose proof failed needn't take its limit out.
_NEEDS = (
    _Need("fits", lambda config: config.layout == "auto", "the planner chooses", "--layout auto"),
    _Need(
        "schedule.decay_share",
        lambda config: config.schedule.shape == "wsd",
        "schedule.shape is wsd, whose last steps decay",
        "--schedule.shape wsd",
    ),
    _Need("schedule.floor", _is_decaying, "the learning rate decays", "--schedule.shape cosine"),
    _Need(
        "optimizer.decay",
        lambda config: config.optimizer.weight_decay > 0,
        "optimizer.weight_decay is above 0",
        "--optimizer.weight-decay 0.1",
    ),
    _Need(
        "train.steps",
        lambda config: not config.train.epochs,
        "train.epochs is 0, which counts them else",
        "--train.epochs 0",
    ),
    _Need(
        "train.sample",
        lambda config: config.train.sample_tokens > 0,
        "train.sample_tokens is above 0",
        "--train.sample-tokens 200",
    ),
    _Need(
        "evaluation.rows",
        lambda config: config.evaluation.every > 0,
        "evaluation.every is above 0, since the last evaluation takes all rows",
        "--evaluation.every 250",
    ),
    _Need(
        "monitor.host",
        lambda config: config.monitor.port is not None,
        "monitor.port opens a page",
        "--monitor.port 8787",
    ),
    _Need(
        "monitor.project",
        lambda config: bool(config.monitor.trackers),
        "monitor.trackers names a tracker",
        "--monitor.trackers trackio",
    ),
    _Need(
        "monitor.wait_s",
        lambda config: config.monitor.display != "none",
        "something is displayed",
        "--monitor.display plain",
    ),
    _Need("monitor.every", _prints_every, "lines or points are written", "--monitor.display plain"),
    *(
        _Need(
            f"recovery.{name}",
            lambda config: config.recovery.enabled,
            "recovery.enabled has a supervisor start ranks again",
            "--recovery.enabled",
        )
        for name in _SUPERVISED
    ),
    _Need(
        "recovery.copies",
        lambda config: config.recovery.snapshot_every != 0,
        "recovery.snapshot_every has a state to copy",
        "--recovery.snapshot-every 10",
    ),
    _Need(
        "recovery.compare_every",
        lambda config: config.recovery.compare,
        "recovery.compare is true",
        "--recovery.compare",
    ),
    _Need(
        "outer.nesterov",
        lambda config: config.outer.decay > 0,
        "outer.momentum is above 0",
        "--outer.momentum 0.6",
    ),
    _Need("outer.quorum", lambda config: config.outer.mode == "sync", "outer.mode is sync", "--outer.mode sync"),
    _Need(
        "outer.staleness",
        lambda config: config.outer.mode == "bounded",
        "outer.mode is bounded",
        "--outer.mode bounded",
    ),
    _Need(
        "outer.momentum_every",
        lambda config: config.outer.mode != "sync",
        "outer.mode is async or bounded",
        "--outer.mode async",
    ),
)
_DEFAULTS = RunConfig()
