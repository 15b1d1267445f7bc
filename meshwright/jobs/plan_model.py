# long: a request, its question and its answer are one noun
"""Planning for a model that was read already, or that is given by its sizes; loads no torch.

The job ``plan`` (`jobs.plan`) reads the model and ends here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError, MeshwrightError, PlanError, nearest
from meshwright.jobs.machines import Machines, cluster_of_machines
from meshwright.jobs.requests import PlanConfig
from meshwright.jobs.rounds import make_rounds
from meshwright.launch.devices import found_devices
from meshwright.models.config import ModelConfig
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.cases import Solve, candidate_json, fits
from meshwright.planner.chances import candidate_chances, choice_chances
from meshwright.planner.choose import add_named_layouts
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.compilation import compiled_reason
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.device_limits import check_products
from meshwright.planner.explain import reason, why
from meshwright.planner.finalists import choose_finalists
from meshwright.planner.islands import candidate_join
from meshwright.planner.measured_price import (
    Measure,
    measure_activations,
    price_layout,
    untraced_note,
    use_counted_bytes,
)
from meshwright.planner.preset_bytes import CountedPreset
from meshwright.planner.presets import presets
from meshwright.planner.question import Question
from meshwright.planner.scaling import Point, best_size, curve, knee, replan, sizes
from meshwright.planner.size_text import parse_sizes
from meshwright.planner.uncertainty import INTERVAL
from meshwright.planner.unequal import why_unequal
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import OFFLOADS
from meshwright.spec.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannableModel:
    """A model as the planner needs it; read once, it can be planned for any number of clusters."""

    shape: ModelShape
    """Its sizes."""
    measure: Callable[[int, str], Measure] | None = None
    """Maps (tokens of a row, precision) to a `Measure` that runs the modules on fake tensors; None without modules."""
    preset: CountedPreset | None = None
    """What the modules of a public model take, where they were counted and it is planned without them."""
    draws: bool = False
    """Whether any of its modules draws random numbers, so that a run refuses to compile its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """The planner's answer: the layout, its predicted time and memory, and why the others lose."""

    question: Question
    """What was planned: model, cluster, batch."""
    choice: Choice
    """The best layouts, and the counts of the search."""
    compared: Mapping[str, str] = field(default_factory=dict)
    """For each layout to compare, by its full text form: the reason that it isn't the plan."""

    @property
    def layout(self) -> Layout:
        """The plan's layout."""
        return self.choice.best[0].layout

    @property
    def step_s(self) -> float:
        """Predicted seconds of an optimizer step."""
        return self.choice.best[0].price.step_s

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens a second, over all devices."""
        return self.choice.best[0].tokens_per_s

    @property
    def peak_bytes(self) -> float:
        """Predicted bytes of device memory of the fullest rank."""
        return self.choice.best[0].price.peak

    @property
    def reason(self) -> str:
        """Why this layout, in a sentence."""
        sentences = (reason(self.question, self.choice), compiled_reason(self.question, self.layout))
        return "; ".join(filter(None, sentences))

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        question, choice = self.question, self.choice
        chances = choice_chances(question, choice)
        return {
            "model": {"name": question.job.shape.name, "parameters": question.job.shape.parameters},
            "cluster": question.cluster.to_dict(),
            "devices": question.cluster.devices,
            "batch": question.job.rows,
            "sequence": question.job.sequence,
            "objective": question.objective,
            "reason": self.reason,
            "plan": str(self.layout),
            "best": [
                _candidate_json(question, candidate)
                | {"chance_best": chances.by_layout.get(str(candidate.layout))}
                | self._join_json(candidate)
                for candidate in choice.shown
            ],
            "ties": choice.ties,
            "chances": {"best": chances.best, "ties": chances.ties, "of": chances.of, "interval": INTERVAL},
            "usable_share": question.usable_share,
            "front": [{"step_s": step, "peak_bytes": peak, "layout": text} for step, peak, text in choice.front],
            "search": {
                "considered": choice.considered,
                "priced": choice.priced,
                "too_large": choice.too_large,
                "seconds": choice.search_s,
            },
            "compared": dict(self.compared),
            "notes": list(choice.notes),
        }

    def _join_json(self, candidate: Candidate) -> dict[str, object]:
        """Returns what an exchange of islands sends and exposes; nothing for a layout of one island."""
        if candidate.layout.islands == 1:
            return {}
        return {"join": dataclasses.asdict(candidate_join(self.question, candidate))}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingResult:
    """How the plan changes with the number of devices."""

    question: Question
    """What was planned; its cluster is the largest."""
    points: tuple[Point, ...]
    """The best layout of each number of devices, or why there is none."""

    @property
    def knee(self) -> int | None:
        """Devices beyond which a doubling brings little; None where there is no such number."""
        return knee(list(self.points))

    @property
    def size(self) -> int | None:
        """Devices that the objective asks for: the knee, or the number with the cheapest or most frugal tokens."""
        return best_size(list(self.points), self.question.objective)

    def to_json(self) -> dict[str, object]:
        """Returns the curve as plain values."""
        rows = [
            {
                "devices": point.devices,
                "best": _candidate_json(self.question, point.best) if point.best else None,
                "why": point.why,
                "efficiency": point.efficiency,
            }
            for point in self.points
        ]
        return {"points": rows, "knee": self.knee, "objective": self.question.objective, "size": self.size}


def _candidate_json(question: Question, candidate: Candidate) -> dict[str, object]:
    """Returns a layout and its price as plain values, with the chances of its time and memory."""
    chances = candidate_chances(question, candidate)
    return {
        **candidate_json(candidate),
        "step_range_s": [chances.step_low_s, chances.step_high_s],
        "fits": chances.fits,
    }


def model_of_sizes(text: str) -> PlannableModel:
    """Returns a standard transformer by its sizes, as ``layers=96,width=12288,heads=96,vocab=51200``.

    Args:
        text: ``name=value`` of the sizes, separated by commas; layers, width, heads and vocab are needed.

    Raises:
        ConfigError: for a size that isn't known, isn't a number, is missing or given twice.
        PlanError: for sizes that contradict each other.
    """
    return PlannableModel(shape=shape_from_sizes(parse_sizes(text)))


def model_name(text: str) -> str:
    """Returns a model's name: of a ``config.json`` its directory, where no weights need to be; else the text."""
    path = Path(text)
    return str(path.parent) if path.name == "config.json" and path.is_file() else text


def preset_model(config: ModelConfig) -> PlannableModel | None:
    """Returns a public model by its name, as ``llama-3-70b``, as sizes; None for other names.

    Args:
        config: of a model; sizes that it sets replace the preset's.

    Raises:
        ConfigError: for a setting that a model of sizes alone doesn't have.
    """
    preset = presets().get(config.name)
    if preset is None or config.kind != "type":
        return None
    plain = ModelConfig(name=config.name)
    fields = {"layers", "width", "heads", "kv_heads", "ffn", "vocab"}
    for item in dataclasses.fields(ModelConfig):
        if item.name not in {*fields, "name"} and getattr(config, item.name) != getattr(plain, item.name):
            raise ConfigError(
                f"model.{item.name} can't be set for {config.name}, which is known by its sizes alone; take its "
                f"directory or family, or set {', '.join(sorted(fields))}"
            )
    changed = {name: value for name, value in config.sizes.items() if name in fields}
    sizes: TableSizes = replace(preset.sizes, **changed)  # type: ignore[arg-type]
    return PlannableModel(shape=shape_from_sizes(sizes), preset=preset.counted)


def plan_model(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> PlanResult:
    """Finds the fastest layout of a model that fits.

    Args:
        config: what to plan; its ``model`` and ``sizes`` count as read.
        model: the model.
        cluster: the machines, instead of those that the config names.

    Raises:
        ConfigError, ClusterError: for what can't be.
        PlanError: when no layout fits.
    """
    if spans_devices(config):
        raise ConfigError(f"devices = {config.devices} is several numbers; scaling() plans for each")
    question, measure = with_modules(question_of(config, model, cluster), model)
    choice = choose_finalists(question, config.show, measure, config.allow)
    choice, compared = _compare_layouts(config, question, choice, measure)
    if note := untraced_note(question, choice.best[0].layout, measure):
        choice = replace(choice, notes=(*choice.notes, note))
    return PlanResult(question=question, choice=choice, compared=compared)


def scale_model(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> ScalingResult:
    """Plans for each number of devices that the config names, as ``8..512`` or ``8,24``.

    Args:
        config: what to plan; its ``model`` and ``sizes`` count as read.
        model: the model.
        cluster: the machines, instead of those that the config names.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    question = question_of(config, model, cluster)
    points = curve(question, sizes(config.devices, question.cluster.devices), make_solver(config, model))
    return ScalingResult(question=question, points=tuple(points))


def make_solver(config: PlanConfig, model: PlannableModel) -> Solve:
    """Returns a function that plans as `plan_model` does, for questions about clusters, batches and rows.

    Args:
        config: what the plan may do to the numbers of training.
        model: its modules are measured anew for each length of rows; without them its sizes are priced.
    """

    def solve(question: Question) -> Candidate:
        question, measure = with_modules(question, model)
        return choose_finalists(question, 1, measure, config.allow).best[0]

    return solve


def make_fits(model: PlannableModel) -> Callable[[Question], bool]:
    """Returns a function that says whether `make_solver`'s finds a plan.

    Args:
        model: as `make_solver` takes it.
    """
    return lambda question: fits(with_modules(question, model)[0])


def with_modules(question: Question, model: PlannableModel) -> tuple[Question, Measure | None]:
    """Returns the question with what the model's modules take, and what measures them if they are there."""
    if model.measure is not None:
        measure = model.measure(question.job.sequence, question.job.precision)
        return measure_activations(question, measure), measure
    return question if model.preset is None else use_counted_bytes(question, model.preset), None


def spans_devices(config: PlanConfig) -> bool:
    """Returns whether a config names several numbers of devices."""
    return ".." in config.devices or "," in config.devices


def question_of(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> Question:
    """Builds the planner's question from a request.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    cluster = cluster if cluster is not None else read_cluster(config)
    if config.devices.isdigit():
        cluster = cluster.restricted(int(config.devices))
    precision = config.precision
    # bf16 is the request's default; layouts of CPU cores are planned in float32.
    if cluster.device.name.startswith("cpu") and precision == "bf16":
        precision = "float32"
    base = Layout(precision=precision, compile=bool(config.compile))
    if base.product_precision == "fp8" and cluster.device.name.startswith("cpu"):
        raise PlanError(
            f"precision={precision}: processor cores emulate float8, which is slower than any other precision; plan in "
            "float32"
        )
    check_products(base, cluster)
    job = PricedJob(
        shape=model.shape,
        sequence=config.sequence,
        rows=config.rows,
        precision=base.compute_precision,
        products=base.product_precision,
    )
    question = Question(
        job=job,
        cluster=cluster,
        base=base,
        objective=config.objective,
        fits=config.fits,
        usable=config.usable,
        limits=_parse_limits(config, model.shape),
        rounds=make_rounds(config.outer),
        compile_steps=0 if model.draws else _compile_steps(config, cluster),
    )
    if not config.lost:
        return question
    # Plan for the surviving nodes; on a uniform cluster an idle node may be faster than a badly divided batch.
    question_without_lost = replace(question, cluster=question.cluster.without(config.lost))
    return replan(question_without_lost, 1)[0] if question_without_lost.cluster.uniform else question_without_lost


def _compile_steps(config: PlanConfig, cluster: Cluster) -> int:
    """Returns the steps that may make up for compiling layers; 0 where the plan has no choice of it."""
    # Megatron has no flag for it.
    is_free = config.compile is None and config.emit != "megatron" and not cluster.device.name.startswith("cpu")
    return config.steps if is_free else 0


def read_cluster(config: PlanConfig) -> Cluster:
    """Returns the cluster that the request names, with its calibration if one is given."""
    if config.hostfile:
        cluster = Cluster.from_hostfile(Path(config.hostfile), config.device)
    elif config.cluster:
        cluster = Cluster.parse(config.cluster)
    else:
        devices = found_devices(int(config.devices) if config.devices.isdigit() else None)
        cluster = cluster_of_machines(Machines(devices=devices, ranks=devices.count))
    return cluster.calibrated(Calibration.load(Path(config.calibration))) if config.calibration else cluster


def _parse_limits(config: PlanConfig, shape: ModelShape) -> dict[str, object]:
    """Parses ``fix`` and ``schedules`` into limits of the search space.

    Raises:
        ConfigError: for what can't be given.
    """
    fixed: dict[str, int] = {}
    limits: dict[str, Any] = {"fixed": fixed}
    given: set[str] = set()
    for assignment in (assignment.strip() for assignment in config.fix.split(",") if assignment.strip()):
        key, _, value = assignment.partition("=")
        if key in given:
            raise ConfigError(f"fix: {key} is given twice; leave one of them out")
        given.add(key)
        known_keys = (*known_axes(), "microbatches", "zero", "offload")
        if key not in known_keys:
            raise ConfigError(f"fix: '{key}' can't be given{nearest(key, known_keys)}")
        if key == "offload":
            if value not in OFFLOADS:
                raise ConfigError(f"fix: {assignment}{nearest(value, OFFLOADS)}")
            limits["offloads"] = (value,)
            continue
        if not value.isdigit() or (key != "zero" and int(value) < 1) or (key == "zero" and int(value) > 3):
            raise ConfigError(f"fix: {assignment}: a degree is a whole number of at least 1, a ZeRO level 0 to 3")
        if key == "zero":
            limits["levels"] = (int(value),)
        else:
            fixed[key] = int(value)
    experts = [key for key in fixed if key in known_axes() and known_axes()[key].mechanics is Mechanics.EXPERTS]
    if experts and fixed[experts[0]] > 1 and not shape.experts:
        raise ConfigError(f"fix: {experts[0]}={fixed[experts[0]]}: {shape.name} has no experts; leave {experts[0]} out")
    if config.schedules:
        limits["schedules"] = tuple(config.schedules)
    return limits


def _compare_layouts(
    config: PlanConfig, question: Question, choice: Choice, measure: Measure | None
) -> tuple[Choice, dict[str, str]]:
    """Returns the choice, which a named layout may improve, and for each named layout why it isn't the plan."""
    layouts = [named_layout(text, question) for text in config.layout]
    reasons: dict[str, str] = {}
    candidates: list[Candidate] = []
    for layout in layouts:
        try:
            if question.cluster.uniform:
                candidates.append(price_layout(question, layout, measure))
            else:
                reasons[str(layout)] = why_unequal(question, layout, choice)
        except MeshwrightError as error:
            reasons[str(layout)] = f"can't be: {error}"
    choice = add_named_layouts(question, choice, candidates)
    for candidate in candidates:
        reasons[str(candidate.layout)] = why(
            question, candidate, choice, lambda layout: price_layout(question, layout, measure)
        )
    return choice, {str(layout): reasons[str(layout)] for layout in layouts}


def named_layout(text: str, question: Question) -> Layout:
    """Parses a layout; precision and compile default to the question's where the text doesn't name them."""
    layout = Layout.parse(text)
    precision = layout.precision if "precision" in text else question.base.precision
    compiled = layout.compile if "compile" in text else question.base.compile
    return replace(layout, precision=precision, compile=compiled)
