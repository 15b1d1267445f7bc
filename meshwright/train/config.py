# long: settings of the loop, of which each class is short
"""Settings of the loop: optimizer, learning rate, evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.train.faults import parse_faults

USUAL_WARMUP = 100
"""Steps of warm-up where nothing else is asked for and the run has four times as many."""

SMALLEST_EPS = 2.0**-126
"""Least normal number of float32: with a smaller ``eps`` AdamW divides 0 by 0 for a weight without a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """AdamW and what surrounds it. Source: Loshchilov & Hutter, Decoupled Weight Decay (ICLR 2019)."""

    lr: float = 1e-3
    """Peak learning rate."""
    lr_batch: int = 0
    """Rows of the global batch that ``lr`` was found for: the peak is scaled from them to ``train.batch`` as
    ``lr_rule`` says; 0 takes ``lr`` as it is."""
    lr_rule: Literal["sqrt", "linear", "adascale", "adascale_sqrt"] = "sqrt"
    """How a rate grows with the batch: by the square root, for Adam (Malladi et al. 2022), or linearly, as for SGD
    (Goyal et al. 2017), either of which holds up to the noise scale; ``adascale``: by the gain that the measured
    ``train.noise_scale`` gives (Johnson et al. 2020), or its root, and ``train.steps`` are then steps of ``lr_batch``
    rows (docs/large-runs.md)."""
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

    def peak(self, batch: int) -> float:
        """Returns the peak learning rate of a run whose global batch has ``batch`` rows."""
        if not self.lr_batch or self.follows_noise:
            return self.lr
        ratio = batch / self.lr_batch
        return self.lr * (ratio if self.lr_rule == "linear" else ratio**0.5)

    @property
    def follows_noise(self) -> bool:
        """Whether rates follow the measured noise of gradients (`train.rate`)."""
        return self.lr_rule in ("adascale", "adascale_sqrt")

    def check(self) -> None:
        """Refuses values for which AdamW isn't defined."""
        if self.lr_batch < 0:
            raise ConfigError(f"optimizer.lr_batch = {self.lr_batch}: give the rows that lr was found for, or 0")
        if self.lr_rule != "sqrt" and not self.lr_batch:
            raise ConfigError("optimizer.lr_rule has no effect without optimizer.lr_batch; give the rows of lr's batch")
        for name in ("lr", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it can't be negative")
        if self.eps < SMALLEST_EPS:
            raise ConfigError(
                f"optimizer.eps = {self.eps}: it must be at least {SMALLEST_EPS:.2g}, the least normal number of "
                "float32, or a weight without a gradient moves by 0 / 0; 1e-8 is usual"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it must be at least 0 and under 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Config):
    """The learning rate over steps: linear warm-up, then a shape down to ``floor`` x the peak."""

    shape: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``cosine``; ``linear``; ``wsd``: stable, then linear decay in the last ``decay_share``; ``constant``."""
    warmup: int | None = None
    """Steps of linear warm-up from 0; None for 100, or a quarter of the steps where that is less."""
    warmup_share: float = 0.0
    """Share of the steps that warm up, rounded up, in place of ``warmup``; 0 leaves it to that."""
    floor: float = 0.1
    """Last learning rate as a share of the peak."""
    decay_share: float = 0.2
    """Share of the steps that decay, for ``wsd``."""

    def warmup_steps(self, steps: int) -> int:
        """Returns the warm-up steps of a run of ``steps`` steps."""
        if self.warmup_share:
            return math.ceil(Fraction(str(self.warmup_share)) * steps)
        return min(USUAL_WARMUP, steps // 4) if self.warmup is None else self.warmup

    def check(self) -> None:
        """Refuses shares outside 0..1."""
        for name in ("floor", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name} = {getattr(self, name)}: it is a share, from 0 to 1")
        if not 0 <= self.warmup_share < 1:
            raise ConfigError(f"schedule.warmup_share = {self.warmup_share}: it is a share, from 0 to below 1")
        if self.warmup_share and self.warmup is not None:
            raise ConfigError(
                f"schedule.warmup = {self.warmup} and schedule.warmup_share = {self.warmup_share} both say how long "
                "the rate warms up; leave one of them out"
            )
        if self.warmup is not None and self.warmup < 0:
            raise ConfigError(f"schedule.warmup = {self.warmup}: it can't be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Config):
    """The loop."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    epochs: float = 0.0
    """Passes over the training text, in place of ``steps``: the run counts those that read its rows so often, the last
    one whole, and keeps the number as its ``train.steps``. 0 leaves it to ``steps``."""
    batch: int = 16
    """Rows of the global batch; every layout trains on the same rows in the same steps."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    noise_scale: int = 0
    """Every this many steps, measure the gradient noise scale, the batch beyond which more rows bring little: one more
    forward and backward, of an eighth of the rows' targets (docs/large-runs.md). 0 never does."""
    rebalance: int = 0
    """Every this many steps, move rows from readers that compute slowly to faster ones, where that makes the step at
    least 5 % faster; the global batch stays the same. 0 never does."""
    replan: int = 0
    """Every this many steps, ask the planner which layout is fastest at the ranks' measured speeds; they start again
    under it where that wins more than it costs. A named layout moves its layers or rows alone. 0 never does."""
    sample: str = ""
    """Prompt of the text generated at the end; empty for the beginning of the held-out text, or its first question,
    and those of the training text where nothing is held out."""
    sample_tokens: int = 200
    """Length of that text in tokens; 0 for none."""
    prove: bool = True
    """Before the first step of a layout of several ranks, prove on a small clone that it computes what one device
    computes, and refuse to train where it doesn't; ``proof.json`` says what was proven."""
    prove_s: float = 20.0
    """Limit of that proof in seconds; where it isn't finished by then the run says so and trains."""

    def check(self) -> None:
        """Refuses counts under one."""
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.epochs < math.inf:
            raise ConfigError(f"train.epochs = {self.epochs}: give passes over the text, as 3 or 0.5, or 0 for steps")
        between = {"noise_scale": "measurements", "rebalance": "decisions", "replan": "questions"}
        for name, what in between.items():
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: give steps between {what}, or 0 for none")
        if self.noise_scale and self.batch < 2:
            raise ConfigError(f"train.batch = {self.batch}: train.noise_scale takes a part of it; give 2 rows or more")
        if self.sample_tokens < 0:
            raise ConfigError(f"train.sample_tokens = {self.sample_tokens}: it can't be negative")
        if not self.prove_s > 0:
            raise ConfigError(
                f"train.prove_s = {self.prove_s}: it must be above 0 seconds; --train.no-prove trains without a proof"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig(Config):
    """How islands join (layouts with ``islands=2`` or more; docs/islands.md); any but the default is refused without.

    Source: Douillard et al., DiLoCo (2023); Douillard et al., Streaming DiLoCo (2025); McMahan et al., FedAvg (2017).
    """

    kind: Literal["diloco", "local_sgd"] | None = None
    """``diloco``: Nesterov SGD on the mean of the islands' movements; ``local_sgd``: the mean of their weights; None
    for ``diloco``."""
    every: int | None = None
    """Steps of a round, between two joins; None for 30. Like the three settings below that default to None, with
    ``allow = islands`` None leaves it to the planner."""
    lr: float | None = None
    """Rate of the outer step; None for 0.7, and 1 with ``local_sgd``."""
    momentum: float | None = None
    """Momentum of the outer step; None for 0.6, and 0 with ``local_sgd``. DiLoCo has 0.9, for rounds of 500 steps;
    in rounds of 30 that costs loss (docs/slow-networks.md)."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    compress: Literal["none", "bf16", "int8", "fp8"] | None = None
    """What the islands' movements travel as, and gradients in `warmup`: the weights' own type, two bytes, or one with a
    scale for 256 values; None for ``none``, and the planner rounds with ``allow = islands lossy`` alone."""
    topology: str = "all_reduce"
    """Whom an island exchanges with: ``all_reduce``, all others; ``ring``, both neighbours; ``exponential``, one."""
    fragments: int | None = None
    """Fragments of the weights, by layers, that join at staggered steps, each once in ``every`` steps; None for 1."""
    delay: int | None = None
    """Steps of training between the start of an exchange and the outer step that takes its result; None for 0."""
    warmup: int = 0
    """First steps, in which all islands train as one, by the gradient of the whole batch; then they part."""
    mix: float | None = None
    """Share of an island's own weights that stays when a result arrives; None for 0.5, and 0 without a delay."""
    meet: str = ""
    """``HOST:PORT`` of an outer server (``meshwright serve-outer``): this run is then a site, one island of those that
    dial in there. The settings below are for sites and their server."""
    key_file: str = ""
    """The server's key, a copy on this machine that only its user may read; the server makes it as ``key`` in its run
    directory where none is given."""
    site: int = 0
    """Number of this site, from 0."""
    sites: int = 1
    """Number of sites: each reads its own ``train.batch`` of the ``sites`` x ``train.batch`` rows of a step."""
    mode: Literal["sync", "async", "bounded"] = "sync"
    """When rounds become a version: ``sync``, when a quorum of sites has come; ``async``, each when it comes;
    ``bounded``, as ``async``, and a site that is more than ``staleness`` rounds ahead of the slowest waits."""
    quorum: int | None = None
    """``sync``: sites after whose rounds the others are waited for ``grace_s`` at most; None for all ``sites``."""
    grace_s: float = 30.0
    """Longest wait for sites that are late, and silence after which a site is forgotten until it dials in again."""
    staleness: int = 2
    """``bounded``: rounds by which a site may be ahead of the slowest live one when it begins a round."""
    momentum_every: int | None = None
    """``async``, ``bounded``: rounds between two updates of the momentum; None for one of each site."""
    wait_s: float = 600.0
    """Longest wait of a site for the server at a join, after which its run ends."""

    @property
    def round_steps(self) -> int:
        """Steps of a round."""
        return 30 if self.every is None else self.every

    @property
    def fragment_count(self) -> int:
        """Fragments of the weights."""
        return 1 if self.fragments is None else self.fragments

    @property
    def delay_steps(self) -> int:
        """Steps between the start of an exchange and its outer step."""
        return 0 if self.delay is None else self.delay

    @property
    def number_format(self) -> str:
        """What movements travel as."""
        return "none" if self.compress is None else self.compress

    def filled(self, planned: Mapping[str, int | str]) -> Self:
        """Returns the config with a plan's settings (`Plan.outer`) where the user gave none."""
        missing = {name: value for name, value in planned.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)  # type: ignore[arg-type]

    @property
    def resolved(self) -> Self:
        """The config with the usual values where the user gave none."""
        return dataclasses.replace(
            self,
            kind=self.kind or "diloco",
            every=self.round_steps,
            fragments=self.fragment_count,
            delay=self.delay_steps,
            compress=self.number_format,  # type: ignore[arg-type]
        )

    @property
    def rate(self) -> float:
        """Rate of the outer step."""
        return (1.0 if self.kind == "local_sgd" else 0.7) if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """Momentum of the outer step."""
        return (0.0 if self.kind == "local_sgd" else 0.6) if self.momentum is None else self.momentum

    @property
    def own_share(self) -> float:
        """Share of an island's own weights that stays when a result arrives."""
        return (0.5 if self.delay_steps else 0.0) if self.mix is None else self.mix

    def check(self) -> None:
        """Refuses values for which no outer step is defined, and those that `local_sgd` would ignore."""
        if self.round_steps < 1:
            raise ConfigError(f"outer.every = {self.every}: a round has at least 1 step")
        if self.warmup < 0:
            raise ConfigError(f"outer.warmup = {self.warmup}: give the steps before islands part, or 0")
        if not self.rate > 0:
            raise ConfigError(f"outer.lr = {self.lr}: it must be above 0, or nothing of a round would stay")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"outer.momentum = {self.momentum}: it must be at least 0 and under 1")
        if self.kind == "local_sgd" and (self.rate, self.decay) != (1.0, 0.0):
            raise ConfigError(
                f"outer.kind = local_sgd takes the mean of the islands' weights, which outer.lr = {self.rate:g} and "
                f"outer.momentum = {self.decay:g} would change; leave them out, or write --outer diloco"
            )
        if not 1 <= self.fragment_count <= self.round_steps:
            raise ConfigError(
                f"outer.fragments = {self.fragments}: at least 1, and at most outer.every = {self.round_steps}, since "
                "at most one fragment joins in a step"
            )
        if not 0 <= self.delay_steps < self.round_steps:
            raise ConfigError(
                f"outer.delay = {self.delay}: at least 0, and under outer.every = {self.round_steps}, after which the "
                "same weights are sent again"
            )
        if not 0 <= self.own_share < 1:
            raise ConfigError(f"outer.mix = {self.mix}: it must be at least 0 and under 1, or nothing would be taken")
        if self.mix and not self.delay_steps:
            raise ConfigError(
                f"outer.mix = {self.mix:g} keeps what an island trained while an exchange was under way, which without "
                "a delay is nothing; leave it out, or write --outer.delay 1"
            )
        self._check_sites()

    def _check_sites(self) -> None:
        """Refuses numbers of sites and times that can't be, and an outer step that isn't defined out of order."""
        if not 0 <= self.site < self.sites:
            raise ConfigError(f"outer.site = {self.site}: sites are numbered from 0, and outer.sites = {self.sites}")
        if self.quorum is not None and not 1 <= self.quorum <= self.sites:
            raise ConfigError(f"outer.quorum = {self.quorum}: give 1 to outer.sites = {self.sites}")
        if self.staleness < 0:
            raise ConfigError(f"outer.staleness = {self.staleness}: give at least 0 rounds")
        if self.momentum_every is not None and self.momentum_every < 1:
            raise ConfigError(f"outer.momentum_every = {self.momentum_every}: give at least 1 round")
        if not self.grace_s > 0 or not self.wait_s > 0:
            raise ConfigError(f"outer.grace_s = {self.grace_s}, outer.wait_s = {self.wait_s}: give more than 0 seconds")
        if self.mode != "sync" and self.decay and not self.nesterov:
            raise ConfigError(
                f"outer.mode = {self.mode} takes delayed Nesterov's step, which outer.no-nesterov contradicts; leave "
                "it out, or write outer.momentum = 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(Config):
    """Validation loss over the held-out text."""

    every: int = 250
    """Steps between evaluations; 0 for one at the end alone."""
    rows: int = 512
    """Rows of held-out text used along the way, the same in every layout; the last evaluation takes all of them."""

    def check(self) -> None:
        """Refuses negative counts."""
        if self.every < 0 or self.rows < 1:
            raise ConfigError(f"evaluation: every = {self.every} must be at least 0, rows = {self.rows} at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig(Config):
    """What happens when a rank dies or hangs."""

    enabled: bool = True
    """Start the ranks again, from the newest state in memory, when one of them fails."""
    snapshot_every: int | None = None
    """Steps between copies of the state in this node's memory; 0 for none, None for as often as costs 1 % of a step."""
    copies: int = 1
    """Over several nodes: other nodes that hold a copy of each node's state, the next ones in the ring. So many may be
    lost at once, neighbours too, without going back to the disk; each costs network traffic and memory."""
    attempts: int = 3
    """Failures in a row without a new step between them after which the run ends."""
    on_death: Literal["restart", "shrink"] = "restart"
    """``restart`` puts a new process on the device of one that died, and leaves the device out when that dies too;
    ``shrink`` leaves it out at once."""
    layouts: str = ""
    """Layouts for fewer devices, as ``shard=3,zero=3; tp=2``: the largest that the devices that are left can carry is
    taken, the first of equals; the planner is asked where none can be, as when this is empty."""
    minimum: int = 1
    """Ranks under which the run ends, with a checkpoint of its last state."""
    back_s: float = 60.0
    """Seconds until a device that was left out is tried again; doubled each time that it fails again."""
    on_device_error: Literal["report", "drain"] = "report"
    """What errors of a device's hardware mean (XID, memory that ECC can't correct, a network whose errors rise), seen
    every ``monitor.health_s`` seconds: ``drain`` goes on without it before it fails, as ``meshwright drain`` does."""
    hang_s: float | None = None
    """Seconds without progress of any rank after which the run hangs; None learns it from the run."""
    idle_s: float = 1.0
    """Seconds for which all ranks may sleep within a step, none of them computing or waiting for a disk, after which
    the run hangs (ranks on the CPU of one node); four times as long after each such end without a new step; 0 leaves
    it to ``hang_s``."""
    spike: float = 0.0
    """A loss over this many times the median of the last ones makes a step sick, as 2.0; 0 for no limit."""
    largest_norm: float = 0.0
    """A gradient norm over this, before clipping, makes a step sick, as one that isn't finite does; 0 for no limit."""
    learned_limits: bool = True
    """Do a step again whose loss or gradient norm is far out of what the last steps gave; where it comes to the same
    numbers, go back to a state before them, and go on as usual where these too lead to the same."""
    compare: bool = True
    """Compare every few steps, and before a state is kept, what several ranks hold of the same weights and moments."""
    compare_every: int | None = None
    """Steps between these comparisons; None for as often as costs under 0.2 % of the time."""
    on_sick: Literal["skip", "rewind", "stop"] = "skip"
    """What a sick step means: ``skip`` leaves the weights as they are and goes on with the next rows; ``rewind`` goes
    back to the last checkpoint and on with the rows after the sick ones; ``stop`` ends the run."""
    faults: str = ""
    """Faults on purpose, as ``kill:rank=3,step=20;hang:rank=1,step=30,phase=backward`` (``train/faults.py``)."""

    def check(self) -> None:
        """Refuses counts and times that can't be."""
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise ConfigError(f"recovery.snapshot_every = {self.snapshot_every}: give steps, or 0 for no copies")
        if self.compare_every is not None and self.compare_every < 1:
            raise ConfigError(f"recovery.compare_every = {self.compare_every}: give at least 1 step")
        for name in ("attempts", "minimum", "copies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recovery.{name} = {getattr(self, name)}: it must be at least 1")
        for name in ("back_s", "hang_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"recovery.{name} = {value}: it must be above 0 seconds")
        if self.idle_s and not self.idle_s >= 0.5:
            raise ConfigError(f"recovery.idle_s = {self.idle_s}: give at least 0.5 seconds, or 0 for no such limit")
        if (self.spike and self.spike <= 1.0) or self.largest_norm < 0:
            raise ConfigError(
                f"recovery: spike = {self.spike} must be above 1, or 0; largest_norm = {self.largest_norm} at least 0"
            )
        if self.on_sick == "rewind" and not self.enabled:
            raise ConfigError("recovery.on_sick = rewind needs recovery.enabled: somebody must start the ranks again")
        parse_faults(self.faults)

    def check_nodes(self, nodes: int) -> None:
        """Refuses more copies of a node's state than there are other nodes.

        Args:
            nodes: with a supervisor each.

        Raises:
            ConfigError: with the nearest number that works.
        """
        if self.copies >= max(2, nodes):
            raise ConfigError(
                f"recovery.copies = {self.copies} puts each node's state on as many others, which takes "
                f"{self.copies + 1} nodes with a supervisor each (--nodes, --hostfile), and there "
                f"{'are' if nodes > 1 else 'is'} {nodes}; nearest that works: recovery.copies = {max(1, nodes - 1)}"
            )

    def check_ranks(self, ranks: int) -> None:
        """Refuses more ranks to go on with than the run has.

        Args:
            ranks: of the whole run.

        Raises:
            ConfigError: with the largest number that works.
        """
        if self.minimum > ranks:
            raise ConfigError(
                f"recovery.minimum = {self.minimum} ends a run that has fewer ranks, and this one begins with {ranks}; "
                f"write recovery.minimum = {ranks} or less, or give --devices {self.minimum}"
            )
