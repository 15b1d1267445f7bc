"""Requests to the planner, the proofs, the inspection and the calibration, as configs; loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from meshwright.config import Config
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.models.config import ModelConfig
from meshwright.schedules.file import PREFIX
from meshwright.schedules.spec import find_schedule
from meshwright.spec.layout import Layout
from meshwright.spec.plan import check_allowed, check_fits
from meshwright.train.config import OuterConfig
from meshwright.units import parse_count

C = TypeVar("C", bound=Config)
DEFAULT_BATCH = 512
"""Rows of a plan's global batch."""
MOST_ROWS = 1 << 20
"""Most rows of a plan's global batch; its micro-batches, of a row each, are looked at one by one."""


def with_fields(config: C, **fields: Any) -> C:
    """Returns a config with the fields that aren't None set anew, checked as a whole.

    A model's name stands for its config, and one layout, by its text form or as a `Layout`, for a sequence of one.

    Raises:
        ConfigError: for values that can't be.
    """
    new_values = {name: value for name, value in fields.items() if value is not None}
    if isinstance(new_values.get("model"), str):
        new_values["model"] = ModelConfig(name=new_values["model"])
    if "layout" in new_values:
        layouts = new_values["layout"]
        single = isinstance(layouts, (str, Layout))
        new_values["layout"] = tuple(str(layout) for layout in ([layouts] if single else layouts))
    changed = dataclasses.replace(config, **new_values)  # type: ignore[type-var]
    changed.check_all()
    return changed


Layouts = str | Layout | Sequence[str | Layout]
"""One or several layouts, by text form or as `Layout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Config):
    """What to plan. Nothing is allocated; no GPU is needed."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="gpt2"))
    """The model."""
    sizes: str = ""
    """A standard transformer by its sizes instead, which loads no library:
    ``layers=96,width=12288,heads=96,vocab=51200,gated=false``."""
    cluster: str = ""
    """The machines: ``64xh100``, ``2x8xa100-80``, ``64xh100+32xa100``, a .toml file; the one at hand when empty. With
    ``tokens`` several may follow each other, separated by commas, and are compared."""
    hostfile: str = ""
    """Nodes by a hostfile, each with devices as ``device`` says."""
    device: str = ""
    """The device of every node of the hostfile."""
    devices: str = ""
    """So many of the cluster's devices; ``8..512`` plans for each doubling and names the knee."""
    lost: int = 0
    """Nodes that are gone: plans for those left, a few of which may stand idle where that is faster."""
    batch: int | Literal["auto"] = DEFAULT_BATCH
    """Rows of the global batch; ``auto`` plans for each doubling and names the knee of the throughput."""
    sequence: int = 2048
    """Tokens a row."""
    precision: str = "bf16"
    """Precision of the layouts; on CPU cores float32."""
    objective: Literal["time", "cost", "energy"] = "time"
    """What the best has least of: seconds of a step, dollars or joules of a token."""
    fix: str = ""
    """What is given: degrees, micro-batches, a ZeRO level, what lies in host memory: ``tp=8,pp=4,zero=1``,
    ``offload=none``."""
    compile: bool | None = None
    """Layers that torch.compile made: true for every layout, false for none. When not given, what a run with ``layout =
    auto`` does: on GPUs they are compiled where its ``steps`` make up for it."""
    steps: int = 1000
    """Steps of the run, as ``train.steps``, in which compiled layers make up for the seconds that compiling takes."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from; all that ask to be searched when none is named."""
    allow: tuple[str, ...] = ()
    """What the plan may do to the numbers of training: ``lossy``, send gradients and weights rounded; ``islands``, join
    copies once in ``outer.every`` steps."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """How islands join, where ``fix`` or ``layout`` has several, or the plan may; ``allow = islands`` chooses what of
    it is None."""
    fits: float = 0.99
    """Chance with which the plan fits the memory of its devices."""
    usable: float | None = None
    """Share of a device's memory that may be filled, in place of the one that follows from ``fits``."""
    layout: tuple[str, ...] = ()
    """Layouts to compare with the plan; for each the answer says why it is worse or doesn't fit."""
    calibration: str = ""
    """File of `meshwright calibrate`."""
    show: int = 10
    """Layouts in the table."""
    html: str = ""
    """File for the plan as one page."""
    tokens: str = ""
    """Tokens to train on, as ``15T``: days, device hours, dollars and energy that this takes."""
    days: float | None = None
    """With ``tokens``: days that the training may take. Finds the cheapest number of devices that meets it."""
    largest: bool = False
    """Find the largest model of the given one's family that fits: its layers and widths grow alike."""
    longest: bool = False
    """Find the longest rows that fit, in as many rows."""
    what_if: str = ""
    """Plan for a changed cluster too: ``nic=2x,memory=1.5x,bandwidth=0.5x,flops=2x``."""
    measured_s: float | None = None
    """Seconds of a step that were measured under ``layout``: its utilisation, and where it loses against the plan."""
    reshape: bool = False
    """Find nearby sizes of the model that use the devices better."""
    walls: bool = False
    """Say which of compute, memory and network bounds the plan, and what more of each would bring."""
    emit: Literal["", "torchtitan", "megatron", "deepspeed"] = ""
    """Write the plan as flags or a configuration of this framework."""

    @property
    def rows(self) -> int:
        """Rows of the global batch; where they are to be found, of a first one."""
        return DEFAULT_BATCH if self.batch == "auto" else self.batch

    @property
    def question(self) -> str:
        """The field that asks for more than a plan; empty for a plan."""
        asked = {
            "tokens": bool(self.tokens),
            "largest": self.largest,
            "longest": self.longest,
            "batch": self.batch == "auto",
            "what_if": bool(self.what_if),
            "measured_s": self.measured_s is not None,
            "reshape": self.reshape,
            "walls": self.walls,
            "emit": bool(self.emit),
        }
        names = [name for name, is_asked in asked.items() if is_asked]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} are questions of their own; ask one at a time")
        return names[0] if names else ""

    def check(self) -> None:
        """Refuses settings that can't be."""
        self._check_question()
        if self.rows < 1 or self.sequence < 1 or self.show < 1 or self.steps < 1:
            raise ConfigError("batch, sequence, steps and show must be at least 1")
        if self.rows > MOST_ROWS:
            raise ConfigError(f"batch = {self.rows}: a plan is for at most {MOST_ROWS} rows; give fewer, longer rows")
        check_fits(self.fits)
        if self.usable is not None and not 0 < self.usable <= 1:
            raise ConfigError(f"usable = {self.usable}: it is a share, above 0 and at most 1")
        if self.devices and not (self.devices.isdigit() or ".." in self.devices or "," in self.devices):
            raise ConfigError(
                f"devices = {self.devices}: give a number, as 64, several, as 8,24,64, or each doubling, as 8..512"
            )
        if self.lost < 0:
            raise ConfigError(f"lost = {self.lost}: a number of nodes is 0 or more")
        check_allowed(self.allow)
        if self.hostfile and not self.device:
            raise ConfigError("a hostfile says how many devices a node has, not which; give --device h100")
        if self.hostfile and self.cluster:
            raise ConfigError("cluster and hostfile both name machines; give one")
        for name in self.schedules:
            if name.startswith(PREFIX):
                raise ConfigError(f"schedules: {name} is of one size; compare it by --layout pp=N,schedule={name}")
            find_schedule(name)

    def _check_question(self) -> None:
        """Refuses questions that other settings don't go with."""
        question, spans = self.question, ".." in self.devices or "," in self.devices
        for name, example in (("days", "--days 30"), ("measured_s", "--measured-s 6.5")):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} = {value}: write a number above 0, as {example}")
        if self.days is not None and not self.tokens:
            raise ConfigError(f"days = {self.days} is the time for some tokens; say how many, as --tokens 15T")
        if self.tokens and not (parse_count(self.tokens) or 0) > 0:
            raise ConfigError(f"tokens = {self.tokens}: write a number above 0, as 300B or 15T")
        if "," in self.cluster and question != "tokens":
            raise ConfigError("several clusters are compared by --tokens; name one, or kinds of one joined by +")
        if spans and question not in ("", "tokens"):
            raise ConfigError(f"{question} is asked of one number of devices; devices = {self.devices} is several")
        if question and self.html:
            raise ConfigError(f"html is the page of a plan; {question} prints a table, or --json")
        if question == "measured_s" and len(self.layout) != 1:
            raise ConfigError("measured_s is of one layout; name it by --layout")
        if question not in ("", "measured_s") and self.layout:
            raise ConfigError(
                f"layout = {'; '.join(self.layout)} is for comparing layouts with the plan, and {question} takes the "
                "plan as it is; leave layout out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig(Config):
    """What to prove. Without layouts: every layout of ``devices`` ranks."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="gpt2"))
    """The model; a small clone of it (fewer, narrower layers) unless ``full``."""
    layout: tuple[str, ...] = ()
    """Layouts by text form; several may follow one ``--layout``."""
    devices: int | None = None
    """Number of ranks when no layout is named; None for all GPUs, else all cores."""
    steps: int = 3
    """Optimizer steps that are compared."""
    dtype: Literal["float64", "float32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"] = "float64"
    """Precision of layouts that name none. In float64 nothing but 1e-9 is allowed; in any other what rounding does to
    one plain device, measured (`proof.rounding`)."""
    full: bool = False
    """The model as it is, instead of a small clone."""
    rows: int = 0
    """Rows of the global batch; 0 for the fewest, at least 8, that all layouts divide."""
    sequence: int = 0
    """Tokens of the long rows; 0 for 240, which divides over every degree up to 6, over 8 and over 16, or for the most
    of 120, 48 and 24 on which the model runs."""
    short_sequence: int = 24
    """Tokens of the short rows, with which the long ones take turns; both are trained on from two steps on."""
    allow_whole: bool = False
    """Let a layout pass that left whole what it was asked to split."""
    training: bool = True
    """Training mode. ``false`` proves a model in evaluation mode: one that draws random numbers in training, say."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to take tokens from; made-up tokens when no path is given."""
    timeout_s: float = 600.0
    """Limit for one layout."""

    def check(self) -> None:
        """Refuses counts under one."""
        rules = (
            (self.steps >= 1, f"steps = {self.steps} must be at least 1"),
            (self.sequence == 0 or self.sequence >= 2, f"sequence = {self.sequence} must be 0 or at least 2"),
            (self.short_sequence >= 2, f"short_sequence = {self.short_sequence} must be at least 2"),
            (self.rows >= 0, f"rows = {self.rows} must be at least 0"),
            (self.timeout_s > 0, f"timeout_s = {self.timeout_s} must be above 0"),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise ConfigError(f"verify: {', and '.join(broken)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig(Config):
    """What to prove. Without layouts: every layout of ``devices`` ranks that a custom loop can run."""

    loop: str = ""
    """``FILE:FUNCTION``: takes a strategy, trains, and returns the losses of its rows."""
    layout: tuple[str, ...] = ()
    """Layouts by text form; several may follow one ``--layout``."""
    devices: int = 2
    """Number of ranks when no layout is named; CPU ranks of this machine."""
    dtype: Literal["float64", "float32"] = "float64"
    """Torch's default type while the loop runs: float64 is the proof, float32 shows rounding."""
    timeout_s: float = 600.0
    """Limit for one layout."""

    def check(self) -> None:
        """Refuses counts under one."""
        if self.devices < 1 or self.timeout_s <= 0:
            raise ConfigError(
                f"verify: devices = {self.devices} must be at least 1 and timeout_s = {self.timeout_s} above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig(Config):
    """What to measure."""

    devices: int | None = None
    """Ranks, as the run will have on all nodes; None for all GPUs, else all cores, of each."""
    out: str = ""
    """File to write; empty for the user's cache, where plans for this machine look for it."""
    quick: bool = False
    """A few sizes for a few seconds, for a first idea; kept beside one that is in the cache."""
    practice: int = 1
    """Rounds of short runs of a small model under each axis, which teach what the runtime takes beside operators and
    collectives; three are surer where the machine isn't quiet, 0 leaves them out."""
    timeout_s: float = 300.0
    """Limit for all of it."""

    def check(self) -> None:
        """Refuses a limit that leaves no time, and fewer rounds than none."""
        if self.practice < 0:
            raise ConfigError(f"calibrate: practice = {self.practice} must be 0 or more")
        if self.timeout_s <= 0:
            raise ConfigError(f"calibrate: timeout_s = {self.timeout_s} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig(Config):
    """What to look at: a model, and layouts to price."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; its name may stand first, without a flag."""
    layout: tuple[str, ...] = ()
    """Layouts by text form, whose bytes of state are listed; several may follow one ``--layout``."""
    stack: str = ""
    """A module, such as ``model.layers.0``, or ``.`` for the model: what lies under each layout between a call of it
    and its own code (hooks, and wrappers of its forward, in the order in which they run), and so for all in it."""
    rank: int = 0
    """The rank of each layout whose stack is shown."""
    explain: str = ""
    """A layer, such as ``model.layers.0``, or a module such as ``lm_head``: the evidence for each decision on its
    weights is shown, as the analysis used it; ranks are those of the first layout with tp, else of tp=2."""

    def check(self) -> None:
        """Refuses a stack of no layout, a rank without a stack, and a stack beside an explanation."""
        if self.stack and self.explain:
            raise ConfigError("stack and explain can't be shown together; leave one of them out")
        if self.stack and not self.layout:
            raise ConfigError(f"stack = {self.stack}: modules are wrapped by a layout; name one, as --layout tp=2")
        if self.rank and not self.stack:
            raise ConfigError(
                f"rank = {self.rank} has no effect without stack; name a module, as --stack model.layers.0"
            )
