"""``meshwright plan``: which layout is fastest on some machines, what it takes, and why the others lose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.arguments import answer, read_config, say, take_flag
from meshwright.config import Config
from meshwright.errors import ConfigError, MeshwrightError, nearest
from meshwright.models.config import ModelConfig
from meshwright.schedules.file import PREFIX
from meshwright.schedules.spec import find_schedule
from meshwright.spec.axes import known_axes
from meshwright.spec.layout import OFFLOADS, Layout

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
    from meshwright.models.build import BuiltModel
    from meshwright.planner.choose import Candidate, Choice, Question
    from meshwright.planner.measured_price import Measure
    from meshwright.planner.scaling import Point
    from meshwright.spec.model_shape import ModelShape

VOCABULARY = 50304
"""Of a model type that names none: GPT-2's, padded to 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Config):
    """What to plan. Nothing is allocated; no GPU is needed."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="gpt2"))
    """The model."""
    sizes: str = ""
    """A standard transformer by its sizes instead, which loads no library:
    ``layers=96,width=12288,heads=96,vocab=51200,gated=false``."""
    cluster: str = ""
    """The machines: ``64xh100``, ``2x8xa100-80``, ``64xh100+32xa100``, a .toml file; the one at hand when empty."""
    hostfile: str = ""
    """Nodes by a hostfile, each with devices as ``device`` says."""
    device: str = ""
    """The device of every node of the hostfile."""
    devices: str = ""
    """So many of the cluster's devices; ``8..512`` plans for each doubling and names the knee."""
    lost: int = 0
    """Nodes that are gone: plans for those left, a few of which may stand idle where that is faster."""
    batch: int = 512
    """Rows of the global batch."""
    sequence: int = 2048
    """Tokens a row."""
    precision: str = "bf16"
    """Precision of the layouts; on CPU cores float32."""
    objective: Literal["time", "cost", "energy"] = "time"
    """What the best has least of: seconds of a step, dollars or joules of a token."""
    fix: str = ""
    """What is given: degrees, micro-batches, a ZeRO level, what lies in host memory: ``tp=8,pp=4,zero=1``,
    ``offload=none``."""
    compile: bool = False
    """Plan for layers that torch.compile made, as ``compile=true`` in a layout runs them."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from; all that ask to be searched when none is named."""
    usable: float = 0.94
    """Share of a device's memory that may be filled."""
    layout: tuple[str, ...] = ()
    """Layouts to compare with the plan; for each the answer says why it is worse or doesn't fit."""
    calibration: str = ""
    """File of `meshwright calibrate`."""
    show: int = 10
    """Layouts in the table."""
    html: str = ""
    """File for the plan as one page."""

    def check(self) -> None:
        """Refuses settings that can't be."""
        if self.batch < 1 or self.sequence < 1 or self.show < 1:
            raise ConfigError("batch, sequence and show must be at least 1")
        if not 0 < self.usable <= 1:
            raise ConfigError(f"usable = {self.usable}: it is a share, above 0 and at most 1")
        if self.lost < 0:
            raise ConfigError(f"lost = {self.lost}: a number of nodes is 0 or more")
        if self.hostfile and not self.device:
            raise ConfigError("a hostfile says how many devices a node has, not which; give --device h100")
        if self.hostfile and self.cluster:
            raise ConfigError("cluster and hostfile both name machines; give one")
        for name in self.schedules:
            if name.startswith(PREFIX):
                raise ConfigError(f"schedules: {name} is of one size; compare it by --layout pp=N,schedule={name}")
            find_schedule(name)


def run(argv: Sequence[str]) -> int:
    """Plans; exit status 0 when something fits."""
    words = list(argv)
    as_json = take_flag(words, "--json")
    config = read_config(PlanConfig, words, "plan")
    built = None if config.sizes else build_of(config)
    question = _left(question_of(config, built), config.lost)
    if ".." in config.devices or "," in config.devices:
        return _curve(config, question, as_json)
    from meshwright.cli.plan_output import show_plan, to_json
    from meshwright.planner.choose import choose
    from meshwright.planner.measured_price import recosted
    from meshwright.planner.unequal import choose_unequal

    search = choose if question.cluster.uniform else choose_unequal
    question, measure = _measured(built, question, config)
    choice = search(question, config.show)
    if question.cluster.uniform:
        choice = recosted(question, choice, measure)
    choice, compared = _compared(config, question, choice, measure)
    if config.html:
        from meshwright.cli.plan_page import write_page

        say(f"page: {write_page(Path(config.html), question, choice, compared)}")
    if as_json:
        answer(json.dumps(to_json(question, choice, compared), indent=2))
    else:
        show_plan(question, choice, compared)
    return 0


def _left(question: Question, lost: int) -> Question:
    """The question for the nodes that are left and worth using."""
    if not lost:
        return question
    import dataclasses

    from meshwright.planner.scaling import replan

    left = dataclasses.replace(question, cluster=question.cluster.without(lost))
    return replan(left, 1)[0] if left.cluster.uniform else left


def _measured(built: BuiltModel | None, question: Question, config: PlanConfig) -> tuple[Question, Measure | None]:
    """Returns the question with what the model's own modules keep, and what runs these; None without modules."""
    if built is None:
        return question, None
    from meshwright.cli.inputs import measure_of
    from meshwright.planner.measured_price import informed

    measure = measure_of(built, config.sequence, question.job.precision)
    return informed(question, measure), measure


def question_of(config: PlanConfig, built: BuiltModel | None) -> Question:
    """Builds what is to be planned.

    Args:
        config: what was asked.
        built: the model, where it isn't given by its sizes.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    from meshwright.planner.choose import Question
    from meshwright.planner.cost.layout_batch import PricedJob

    cluster = cluster_of(config)
    if config.devices.isdigit():
        cluster = cluster.restricted(int(config.devices))
    precision = config.precision
    if cluster.device.name.startswith("cpu") and precision == "bf16":
        precision = "float32"
    shape = shape_of(config, built)
    job = PricedJob(shape=shape, sequence=config.sequence, rows=config.batch, precision=precision)
    base = Layout(precision=precision, compile=config.compile)
    return Question(
        job=job, cluster=cluster, base=base, objective=config.objective, usable=config.usable, limits=_limits(config)
    )


def build_of(config: PlanConfig) -> BuiltModel:
    """Builds the model on meta."""
    from meshwright.launch.preload import prepare_environment
    from meshwright.models.build import build_meta

    prepare_environment()
    named = config.model.kind == "directory" or config.model.vocab
    return build_meta(config.model, vocab=None if named else VOCABULARY, context=config.sequence)


def shape_of(config: PlanConfig, built: BuiltModel | None) -> ModelShape:
    """Returns the model's sizes: from the text, or off its modules on meta."""
    if built is None:
        from meshwright.planner.closed_form import shape_from_sizes

        return shape_from_sizes(_sizes(config.sizes))
    from meshwright.models.measure import measure_shape

    return measure_shape(built)


def cluster_of(config: PlanConfig) -> Cluster:
    """Reads the machines, with what was measured on them."""
    from meshwright.cluster.calibration import Calibration
    from meshwright.cluster.cluster import Cluster

    if config.hostfile:
        cluster = Cluster.from_hostfile(Path(config.hostfile), config.device)
    elif config.cluster:
        cluster = Cluster.parse(config.cluster)
    else:
        from meshwright.cli.inputs import Machines, cluster_here
        from meshwright.launch.devices import found_devices

        devices = found_devices(int(config.devices) if config.devices.isdigit() else None)
        cluster = cluster_here(Machines(devices=devices, ranks=devices.count))
    return cluster.calibrated(Calibration.load(Path(config.calibration))) if config.calibration else cluster


def _sizes(text: str) -> Any:
    import dataclasses

    from meshwright.planner.closed_form import TableSizes

    known = {item.name: str(item.type) for item in dataclasses.fields(TableSizes) if item.name != "latent"}
    values: dict[str, Any] = {"name": "sizes"}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise ConfigError(f"sizes: '{part}' is unknown{nearest(key, known)}; write layers=96,width=12288,...")
        if "bool" in known[key]:
            values[key] = value.lower() in ("true", "1", "yes")
        elif known[key] == "str":
            values[key] = value
        elif value.isdigit():
            values[key] = int(value)
        else:
            raise ConfigError(f"sizes: {key}={value} is not a whole number")
    missing = [key for key in ("layers", "width", "heads", "vocab") if key not in values]
    if missing:
        raise ConfigError(f"sizes: {', '.join(missing)} missing; a model needs layers, width, heads and vocab")
    return TableSizes(**values)


def _limits(config: PlanConfig) -> dict[str, Any]:
    """Reads what is given into fields of the space.

    Raises:
        ConfigError: for what can't be given.
    """
    fixed: dict[str, int] = {}
    limits: dict[str, Any] = {"fixed": fixed}
    for part in (part.strip() for part in config.fix.split(",") if part.strip()):
        key, _, value = part.partition("=")
        known = (*known_axes(), "microbatches", "zero", "offload")
        if key not in known:
            raise ConfigError(f"fix: '{key}' can't be given{nearest(key, known)}; it takes {', '.join(known)}")
        if key == "offload":
            if value not in OFFLOADS:
                raise ConfigError(f"fix: {part}{nearest(value, OFFLOADS)}")
            limits["offloads"] = (value,)
            continue
        if not value.isdigit() or (key != "zero" and int(value) < 1) or (key == "zero" and int(value) > 3):
            raise ConfigError(f"fix: {part}: a degree is a whole number of at least 1, a ZeRO level 0 to 3")
        if key == "zero":
            limits["levels"] = (int(value),)
        else:
            fixed[key] = int(value)
    if config.schedules:
        limits["schedules"] = tuple(config.schedules)
    return limits


def _compared(
    config: PlanConfig, question: Question, choice: Choice, measure: Measure | None
) -> tuple[Choice, dict[str, str]]:
    """For each layout that the user named, why it isn't the plan; and the answer, which one of them may change."""
    from meshwright.planner.choose import joined
    from meshwright.planner.explain import why
    from meshwright.planner.measured_price import priced
    from meshwright.planner.unequal import why_unequal

    layouts = [_named(text, question) for text in config.layout]
    told: dict[str, str] = {}
    found: list[Candidate] = []
    for layout in layouts:
        try:
            if question.cluster.uniform:
                found.append(priced(question, layout, measure))
            else:
                told[str(layout)] = why_unequal(question, layout, choice)
        except MeshwrightError as error:
            told[str(layout)] = f"can't be: {error}"
    choice = joined(question, choice, found)
    for one in found:
        told[str(one.layout)] = why(question, one, choice, lambda layout: priced(question, layout, measure))
    return choice, {str(layout): told[str(layout)] for layout in layouts}


def _named(text: str, question: Question) -> Layout:
    """Reads a layout, in the precision and form that all have unless it says otherwise."""
    layout = Layout.parse(text)
    precision = layout.precision if "precision" in text else question.base.precision
    compiled = layout.compile if "compile" in text else question.base.compile
    return replace(layout, precision=precision, compile=compiled)


def _curve(config: PlanConfig, question: Question, as_json: bool) -> int:
    from meshwright.cli.plan_output import curve_json, show_curve
    from meshwright.planner.scaling import curve, sizes

    points: list[Point] = curve(question, sizes(config.devices, question.cluster.devices))
    if as_json:
        answer(json.dumps(curve_json(points), indent=2))
    else:
        show_curve(question, points)
    return 0 if any(point.best for point in points) else 1
