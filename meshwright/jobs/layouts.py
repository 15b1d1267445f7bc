"""The plan of a run: the layout that the user named, the planner's choice, or one for the ranks that are left."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations

from meshwright.cluster.cluster_text import with_network
from meshwright.cluster.node import standard_node
from meshwright.errors import ClusterError, PlanError
from meshwright.jobs.machines import Machines, cluster_here, ledger_here
from meshwright.jobs.model_reading import ReadModel, measure_of, model_parts
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.devices import Devices, device_memory_bytes
from meshwright.models.measure import measure_shape
from meshwright.parallel.build import check
from meshwright.planner import predict, state_rule
from meshwright.planner.choose import Question, candidate, choose
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.device_limits import host_shortage
from meshwright.planner.measured_price import informed, recosted
from meshwright.planner.run_history import learn
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_shapes
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes, format_seconds


def make_plans(
    config: RunConfig, model: ReadModel, machines: Machines, count: int = 1, say: Say = to_stderr
) -> list[tuple[Plan, ModelAnalysis]]:
    """Returns the plan of a named layout, or up to ``count`` of the planner's best that the model allows.

    Each comes with what its layout needs of the model. A model or a device that can't be priced is said to be.

    Raises:
        PlanError: for a layout that can't run.
        ClusterError: for a network that the catalogue doesn't have.
    """
    with_network(standard_node("cpu"), machines.network)
    if config.layout == "auto":
        return _automatic(config, model, machines, count, say=say)
    layout = Layout.parse(config.layout)
    layout.check_ranks(machines.ranks)
    facts = facts_of(config, model, layout, machines.devices)
    parts, short = model_parts(model.built, facts), ""
    try:
        question = _question(config, model, machines, layout.precision)
        short = host_shortage(question.job, layout, question.cluster, question.runtime)
        measure = measure_of(model.built, config.data.sequence, layout.precision)
        return [(predict.named_plan(question, layout, parts, measure), facts)]
    except (ClusterError, PlanError) as error:
        if short:
            raise
        say(f"plan: by state alone, since time can't be priced here: {error}")
        # A device without figures, or a model without layers: its state is priced all the same.
        return [(state_rule.named_plan(layout, machines.ranks, parts), facts)]


def facts_of(config: RunConfig, model: ReadModel, layout: Layout, devices: Devices) -> ModelAnalysis:
    """Reads what a layout needs of the model, refusing one that can't run."""
    check(layout, devices.kind, len(model.built.structure.layers))
    facts = analyse_model(model.built, layout, tokens=config.data.sequence)
    check_shapes(facts, layout, config.train.batch, config.data.sequence)
    return facts


def plan_for_less(
    config: RunConfig, model: ReadModel, machines: Machines, whole: Layout, say: Say = to_stderr
) -> tuple[Plan, ModelAnalysis]:
    """Plans for the ranks that are left of a layout, keeping what values depend on: its precision.

    Layouts that the config names for fewer ranks come first. Where the planner has nothing for that
    many ranks, since they don't divide the batch, they share it unevenly.

    Raises:
        PlanError: when no layout of that many ranks can run.
    """
    ranks, named = machines.ranks, fallbacks(config, whole)
    for layout in named:
        if layout.world == ranks:
            return make_plans(dataclasses.replace(config, layout=str(layout)), model, machines, say=say)[0]
    if any(layout.world < ranks for layout in named):
        raise PlanError(f"recovery.layouts names none for {ranks} ranks, but one for fewer")
    if whole.precision != "float64":
        try:
            return _automatic(config, model, machines, 1, whole.precision, say)[0]
        except PlanError as error:
            why: PlanError = error
    for layout in _like(whole, ranks, config.train.batch):
        try:
            layout.check_batch(config.train.batch)
            facts = facts_of(config, model, layout, machines.devices)
        except PlanError as error:
            why = error
        else:
            plan = state_rule.named_plan(layout, ranks, model_parts(model.built, facts))
            return dataclasses.replace(plan, reason=f"for the {ranks} ranks that are left of {whole}"), facts
    raise why


def fallbacks(config: RunConfig, whole: Layout) -> list[Layout]:
    """Returns the layouts that the config names for fewer ranks than ``whole`` has, in its precision.

    Raises:
        PlanError: for one that has as many, or another precision.
    """
    found = []
    for text in (text.strip() for text in config.recovery.layouts.split(";")):
        if not text:
            continue
        layout = Layout.parse(text)
        if "precision" in text and layout.precision != whole.precision:
            raise PlanError(
                f"recovery.layouts: '{text}' has another precision than the run, whose values depend on it; "
                f"write precision={whole.precision}, or leave it out"
            )
        if not config.recovery.minimum <= layout.world < whole.world:
            raise PlanError(
                f"recovery.layouts: '{text}' has {layout.world} ranks; these are layouts for when fewer than "
                f"{whole.world} are left, and at least recovery.minimum = {config.recovery.minimum}"
            )
        found.append(dataclasses.replace(layout, precision=whole.precision))
    return found


def check_fallbacks(config: RunConfig, model: ReadModel, whole: Layout, devices: Devices) -> None:
    """Refuses, before a rank starts, layouts for fewer ranks that can't run."""
    for layout in fallbacks(config, whole):
        facts_of(config, model, layout, devices)


LEANER = 0.8
"""Share of the planned memory of a layout that ran out which another may take, to be named instead."""


def leaner(config: RunConfig, model: ReadModel, machines: Machines, plan: Plan) -> str:
    """Returns the sentence that names the fastest layout which needs clearly less memory than one that ran out."""
    planned: float = sum(plan.prediction.memory.values())
    precision = "float32" if plan.layout.precision == "float64" else plan.layout.precision
    try:
        question = _question(config, model, machines.fewer(plan.ranks), precision)
        if plan.layout.offload != "none":  # of what it was planned to take, a part lies in host memory
            planned = candidate(question, plan.layout).price.peak
        measure = measure_of(model.built, config.data.sequence, precision)
        front = recosted(question, choose(question), measure).front
    except (ClusterError, PlanError):
        front = ()
    fits = [(step_s, size, text) for step_s, size, text in front if size <= LEANER * planned]
    if not fits:
        return "no layout of these devices needs clearly less: take more devices, fewer rows or fewer layers"
    step_s, size, text = min(fits)
    return f"nearest that needs less: --layout {text}, {format_bytes(size)} a rank, {format_seconds(step_s)} a step"


MODEL_SPLITS = (Mechanics.STAGES, Mechanics.MATRICES, Mechanics.TOKENS)
"""What keeps its degree when ranks are lost, the first longest; experts are dealt out over what is left."""


def _like(whole: Layout, ranks: int, rows: int) -> list[Layout]:
    """Returns layouts of other numbers of ranks: what splits the model stays where it can, data take up the rest."""
    named = [whole.axis(one) for one in MODEL_SPLITS if whole.degree(one) > 1]
    found = []
    for names in (names for count in range(len(named), -1, -1) for names in combinations(named, count)):
        model_axes = {name: whole.degree(name) for name in names}
        readers, rest = divmod(ranks, math.prod(model_axes.values()))
        if rest or readers > rows:
            continue
        data = {} if readers == 1 else {row_axes(Holds.SHARD if whole.zero else Holds.COPY)[0]: readers}
        layout = Layout(
            degrees=model_axes | data,
            zero=whole.zero if whole.zero and readers > 1 else 0,
            precision=whole.precision,
            recompute=whole.recompute,
            sequence=whole.sequence and whole.axis(Mechanics.MATRICES) in model_axes,
            schedule=whole.schedule if whole.axis(Mechanics.STAGES) in model_axes else "",
            stages=whole.stages if whole.axis(Mechanics.STAGES) in model_axes else 0,
            attention=whole.attention if whole.axis(Mechanics.TOKENS) in model_axes else "",
            rows=uneven(rows, readers),
        )
        more = whole.microbatches
        found.append(dataclasses.replace(layout, microbatches=more if rows % (sum(layout.shares()) * more) == 0 else 1))
    return found


def uneven(rows: int, readers: int) -> BatchShares:
    """Returns shares of readers as even as whole rows allow; without any where they are even."""
    least, more = divmod(rows, readers)
    return BatchShares.of([least + 1] * more + [least] * (readers - more))


def _automatic(
    config: RunConfig,
    model: ReadModel,
    machines: Machines,
    count: int,
    precision: str | None = None,
    say: Say = to_stderr,
) -> list[tuple[Plan, ModelAnalysis]]:
    """The best layouts that the model allows, of those that the planner ranks first."""
    ranks, devices = machines.ranks, machines.devices
    precision = precision or ("bf16" if devices.kind == "cuda" else "float32")
    try:
        question = _question(config, model, machines, precision)
        measure = measure_of(model.built, config.data.sequence, precision)
        question = informed(question, measure)
        choice = recosted(question, choose(question), measure)
    except (ClusterError, PlanError) as error:
        memory = device_memory_bytes(devices, ranks)
        plan = state_rule.choose(ranks, config.train.batch, model.sizes, memory, precision)
        say(f"plan: by state alone, since time can't be priced here: {error}")
        return [(plan, facts_of(config, model, plan.layout, devices))]
    found: list[tuple[Plan, ModelAnalysis]] = []
    refused = []
    for at, one in enumerate(choice.best):
        try:
            facts = facts_of(config, model, one.layout, devices)
        except PlanError as error:
            refused.append(f"{one.layout}: {error}")
            continue
        found.append((predict.chosen_plan(question, choice, at, model_parts(model.built, facts)), facts))
        if len(found) == count:
            break
    if not found:
        raise PlanError(f"none of the best layouts can run: {refused[0]}; name one with --layout")
    return found


def _question(config: RunConfig, model: ReadModel, machines: Machines, precision: str) -> Question:
    job = PricedJob(
        shape=measure_shape(model.built),
        sequence=config.data.sequence,
        rows=config.train.batch,
        precision=precision,
    )
    return Question(
        job=job,
        cluster=cluster_here(machines),
        base=Layout(precision=precision),
        lesson=learn(*ledger_here(machines)),
    )
