# long: every way in which a run gets its plan is one noun
"""The plan of a run: the layout that the user named, the planner's choice, or one for the surviving ranks."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations

from meshwright.cluster.cluster_text import with_network
from meshwright.cluster.node import standard_node
from meshwright.errors import ClusterError, ConfigError, NoRoomError, PlanError
from meshwright.jobs.attention_checks import as_run_on
from meshwright.jobs.machines import Machines, cluster_of_machines, run_history_file
from meshwright.jobs.model_reading import ReadModel, model_parts
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.rounds import make_rounds
from meshwright.launch.devices import Devices, device_memory_bytes
from meshwright.models.measure import measure_shape
from meshwright.models.random_draws import drawing_parts
from meshwright.parallel.build import check
from meshwright.planner import predict, state_rule
from meshwright.planner.candidate import FINALISTS, Choice
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.device_limits import host_shortage
from meshwright.planner.finalists import choose_finalists
from meshwright.planner.measured_price import Measure, measure_activations, price_layout, reprice_choice, untraced_note
from meshwright.planner.measured_speeds import Freedom, choose_at_speeds
from meshwright.planner.question import Question
from meshwright.planner.run_history import learn
from meshwright.resilience.planning import Replan, ReplanRequest
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import LOSSY_CHOICES, Layout
from meshwright.spec.layout_choices import BatchShares
from meshwright.spec.layout_rules import expert_node_over, secondary_over
from meshwright.spec.plan import Plan
from meshwright.torch_compat.compiler import can_compile
from meshwright.train.island_checks import check_islands
from meshwright.train.model_analysis import ModelAnalysis, check_shapes
from meshwright.train.noise_scale import check_noise_scale
from meshwright.train.run_config import RunConfig
from meshwright.train.share_balance import check_rebalance
from meshwright.train.stage_times import is_plain, may_change_degrees, names_choice
from meshwright.units import format_bytes, format_seconds


def make_plans(
    config: RunConfig, model: ReadModel, machines: Machines, count: int = 1, say: Say = to_stderr
) -> list[tuple[Plan, ModelAnalysis]]:
    """Returns the plan of a named layout, or up to ``count`` of the planner's best that the model allows.

    Each comes with the `ModelAnalysis` that its layout needs. A line reports a model or a device that can't be priced.

    Raises:
        PlanError: for a layout that can't run.
        ClusterError: for a network that the catalogue doesn't have.
    """
    # Refuses an unknown network by name, whatever the layout.
    with_network(standard_node("cpu"), machines.network)
    if config.layout == "auto":
        return _planner_plans(config, model, machines, count, say=say)
    layout = Layout.parse(config.layout)
    layout.check_ranks(machines.ranks)
    analysis = analyse_layout(config, model, layout, machines.devices)
    model_weights, host_shortage_text = model_parts(model.built, analysis), ""
    try:
        question = _make_question(config, model, machines, layout.precision)
        host_shortage_text = host_shortage(question.job, layout, question.cluster, question.runtime)
        measure = _make_measure(config, model, machines, layout.precision)
        return [(predict.named_plan(question, layout, model_weights, measure), analysis)]
    except (ClusterError, PlanError) as error:
        if host_shortage_text:
            raise
        say(f"plan: by state alone, since time can't be priced here: {error}")
        # A device without figures, or a model without layers: its state is priced all the same.
        rounds = make_rounds(config.outer)
        return [(state_rule.named_plan(layout, machines.ranks, model_weights, rounds), analysis)]


def analyse_layout(config: RunConfig, model: ReadModel, layout: Layout, devices: Devices) -> ModelAnalysis:
    """Analyses the model for a layout, refusing a layout that can't run."""
    check(layout, devices.kind, len(model.built.structure.layers))
    analysis = model.analyse(layout, config.data.sequence)
    check_shapes(analysis, layout, config.train.batch, config.data.sequence)
    check_rebalance(config.train, layout, analysis.rows)
    check_noise_scale(config.train.noise_scale, layout, analysis.has_own_loss)
    return analysis


def plan_for_fewer_ranks(
    config: RunConfig, model: ReadModel, machines: Machines, full_layout: Layout, say: Say = to_stderr
) -> tuple[Plan, ModelAnalysis]:
    """Plans for the surviving ranks of a layout, keeping its precision, on which the values depend.

    Layouts that the config names for fewer ranks come first. Islands that lost a rank are left out as a whole.
    Where the planner has nothing for that many ranks, since they don't divide the batch, they share it unevenly.

    Raises:
        PlanError: when no layout of that many ranks can run.
    """
    ranks, named = machines.ranks, fallback_layouts(config, full_layout)
    # What was agreed to for the run's own plan isn't begun in the middle of it.
    config = dataclasses.replace(_without_rebalance(config), allow=())
    for layout in named:
        if layout.world == ranks:
            return _plan_fallback(config, layout, model, machines, say)
    # The user named layouts to fall back to: none other is chosen silently.
    if any(layout.world < ranks for layout in named):
        raise PlanError(f"recovery.layouts names none for {ranks} ranks, but one for fewer")
    island_ranks = full_layout.world // full_layout.islands
    if full_layout.islands > 1 and ranks >= island_ranks:
        # Another layout inside would change every island: those that lost a rank are left out as a whole.
        fewer_islands = full_layout.with_islands(ranks // island_ranks)
        return _plan_fallback(config, fewer_islands, model, machines, say)
    if full_layout.precision != "float64":
        try:
            exact = _planner_plans(config, model, machines, 1, full_layout.precision, say)[0]
        except PlanError as error:
            refusal: PlanError = error
        else:
            return _keep_rounding(config, exact, full_layout, model, machines, say)
    for layout in _similar_layouts(full_layout, ranks, config.train.batch):
        try:
            layout.check_batch(config.train.batch)
            analysis = analyse_layout(config, model, layout, machines.devices)
        except PlanError as error:
            refusal = error
        else:
            plan = state_rule.named_plan(layout, ranks, model_parts(model.built, analysis))
            reason = f"for the {ranks} ranks that are left of {full_layout}{_lost_rounding(full_layout, layout)}"
            return dataclasses.replace(plan, reason=reason), analysis
    raise refusal


def _keep_rounding(
    config: RunConfig,
    exact: tuple[Plan, ModelAnalysis],
    full_layout: Layout,
    model: ReadModel,
    machines: Machines,
    say: Say,
) -> tuple[Plan, ModelAnalysis]:
    """Returns a plan with the run's rounding added, whose reason says what of it is left out.

    The search ranks exact layouts, and a run that rounds must not become another one in silence.
    """
    (plan, analysis), words = exact, ""
    compress = full_layout.compress.over(plan.layout.copies)
    weights = full_layout.compress_weights if plan.layout.zero else "none"
    tokens = full_layout.compress_tokens if plan.layout.degree(Mechanics.EXPERTS) > 1 else "none"
    layout = dataclasses.replace(plan.layout, compress=compress, compress_weights=weights, compress_tokens=tokens)
    if layout.is_lossy:
        try:
            plan, analysis = _plan_fallback(config, layout, model, machines, say)
            words = f"; rounded as {full_layout} was"
        except PlanError as error:
            words = f"; {layout} can't run: {error}"
    return dataclasses.replace(
        plan, reason=exact[0].reason + words + _lost_rounding(full_layout, plan.layout)
    ), analysis


def _lost_rounding(full_layout: Layout, layout: Layout) -> str:
    """Returns words on what a run rounded and a layout for fewer ranks doesn't; none where that is nothing."""
    exact_names = [name for name in LOSSY_CHOICES if str(getattr(layout, name)) == "none"]
    lost = [f"{name}={choice}" for name in exact_names if (choice := str(getattr(full_layout, name))) != "none"]
    return f"; sends exactly what {' and '.join(lost)} rounded" if lost else ""


def _plan_fallback(
    config: RunConfig, layout: Layout, model: ReadModel, machines: Machines, say: Say
) -> tuple[Plan, ModelAnalysis]:
    """Returns the plan of a layout for fewer ranks than the run started with."""
    _check_fallback_islands(config, layout)
    return make_plans(dataclasses.replace(config, layout=str(layout)), model, machines, say=say)[0]


def _check_fallback_islands(config: RunConfig, layout: Layout) -> None:
    """Refuses a layout for fewer ranks whose islands can't join as the run's do.

    Raises:
        PlanError: so that a plan for still fewer ranks is tried.
    """
    try:
        check_islands(config, layout, resumes=True)
    except ConfigError as error:
        raise PlanError(f"{layout}: {error}") from error


def _without_rebalance(config: RunConfig) -> RunConfig:
    """Returns the config for ranks that are left over, whose layout may have shares that can't change."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, rebalance=0))


def fallback_layouts(config: RunConfig, full_layout: Layout) -> list[Layout]:
    """Returns the layouts that the config names for fewer ranks than ``full_layout`` has, in its precision.

    Raises:
        PlanError: for one that has as many, or another precision.
    """
    layouts = []
    for text in (text.strip() for text in config.recovery.layouts.split(";")):
        if not text:
            continue
        layout = Layout.parse(text)
        if "precision" in text and layout.precision != full_layout.precision:
            raise PlanError(
                f"recovery.layouts: '{text}' has another precision than the run, whose values depend on it; "
                f"write precision={full_layout.precision}, or leave it out"
            )
        if not config.recovery.minimum <= layout.world < full_layout.world:
            raise PlanError(
                f"recovery.layouts: '{text}' has {layout.world} ranks; these are layouts for when fewer than "
                f"{full_layout.world} are left, and at least recovery.minimum = {config.recovery.minimum}"
            )
        layouts.append(dataclasses.replace(layout, precision=full_layout.precision))
    return layouts


def check_fallback_layouts(config: RunConfig, model: ReadModel, full_layout: Layout, devices: Devices) -> None:
    """Refuses, before a rank starts, layouts for fewer ranks that can't run."""
    for layout in fallback_layouts(config, full_layout):
        _check_fallback_islands(config, layout)
        analyse_layout(_without_rebalance(config), model, layout, devices)


def replan_layout(config: RunConfig, model: ReadModel, machines: Machines, request: ReplanRequest) -> Replan | None:
    """Returns the plan of the layout that is fastest at measured speeds; None without one faster than the present.

    Args:
        config: of the run.
        model: of the run.
        machines: of its ranks.
        request: the present layout, and what its ranks computed.

    Raises:
        PlanError, ClusterError: where nothing can be priced.
    """
    layout, machines = request.layout, machines.for_ranks(request.layout.world)
    measure = _make_measure(config, model, machines, layout.precision)
    question = measure_activations(_make_question(config, model, machines, layout.precision), measure)
    freedom = Freedom(
        degrees=may_change_degrees(config, layout),
        split=not names_choice(config, layout, "split"),
        rows=not names_choice(config, layout, "rows"),
        pipelines=machines.devices.kind == "cpu",
    )
    choice = choose_at_speeds(question, layout, request.busy_s, freedom)
    for candidate in choice.faster:
        if str(candidate.layout) in request.disappointing or (freedom.degrees and not is_plain(candidate.layout)):
            continue
        try:
            analysis = analyse_layout(config, model, candidate.layout, machines.devices)
        except PlanError:  # the model doesn't allow it
            continue
        parts = model_parts(model.built, analysis)
        if predict.whole_backward_reason(candidate.layout, parts):  # its price counts on halves
            continue
        plan = predict.named_plan(question, candidate.layout, parts, measure)
        present_s, step_s = choice.present_s, candidate.price.step_s
        # What the price doesn't explain of a measured step stays, whatever the layout.
        ratio = 1.0 - (present_s - step_s) / max(present_s, request.step_s)
        # Priced on equal devices; what is expected of these follows from what was measured.
        prediction = plan.prediction.rescaled(request.step_s * ratio)
        speeds = ", ".join(f"{speed:.0%}" for speed in choice.speeds)
        plan = dataclasses.replace(plan, prediction=prediction, reason=f"fastest for ranks at speeds of {speeds}")
        return Replan(
            plan=plan, analysis=analysis, step_ratio=ratio, speeds=choice.speeds, priced_s=(present_s, step_s)
        )
    return None


LEANER_SHARE = 0.8
"""A layout is suggested after an out-of-memory error only below this share of the failed layout's planned memory."""


def name_leaner_layout(config: RunConfig, model: ReadModel, machines: Machines, plan: Plan) -> str:
    """Returns the sentence that names the fastest layout which needs clearly less memory than one that ran out."""
    planned: float = plan.prediction.together
    precision = "float32" if plan.layout.precision == "float64" else plan.layout.precision
    try:
        question = _make_question(config, model, machines.for_ranks(plan.ranks), precision)
        if plan.layout.offload != "none":  # the plan's total includes bytes in host memory; compare the device's alone
            planned = price_candidate(question, plan.layout).price.peak
        measure = _make_measure(config, model, machines, precision)
        front = reprice_choice(question, choose(question), measure).front
    except (ClusterError, PlanError):
        front = ()
    fits = [(step_s, size, text) for step_s, size, text in front if size <= LEANER_SHARE * planned]
    if not fits:
        return "no layout of these devices needs clearly less: take more devices, fewer rows or fewer layers"
    step_s, size, text = min(fits)
    return f"nearest that needs less: --layout {text}, {format_bytes(size)} a rank, {format_seconds(step_s)} a step"


LESS_SHARE = 0.9
"""The plan after one that ran out of memory takes at most this share of its bytes, but for those of every layout alike:
a run shows that it needed more than there was, not how much, and each try costs a start."""


def leaner_plan(
    config: RunConfig, model: ReadModel, machines: Machines, plan: Plan
) -> tuple[Plan, ModelAnalysis] | None:
    """Returns the fastest plan that needs clearly less memory than one that ran out; None without one.

    Only the planner's own choice is followed by another: a layout that the user named stays, and so do islands.

    Args:
        config: of the run.
        model: of the run.
        machines: of its ranks.
        plan: that ran out of memory.
    """
    names_fallbacks = bool(config.recovery.layouts) and plan.ranks < machines.ranks
    # Another number of islands in the middle of a run would train otherwise.
    if config.layout != "auto" or names_fallbacks or plan.layout.islands > 1:
        return None
    machines = machines.for_ranks(plan.ranks)
    try:
        question = _make_question(config, model, machines, plan.layout.precision)
        measure = _make_measure(config, model, machines, plan.layout.precision)
        question = measure_activations(question, measure)
        # Those of every layout alike, which none saves.
        fixed_bytes = question.runtime.context_bytes + question.runtime.allocator_bytes
        planned_bytes = price_layout(question, plan.layout, measure).price.peak
        limit_bytes = fixed_bytes + LESS_SHARE * (planned_bytes - fixed_bytes)
        question = dataclasses.replace(question, usable=limit_bytes / question.cluster.memory_bytes)
        allow = [name for name in config.allow if name != "islands"]
        choice = choose_finalists(question, FINALISTS, measure, allow)
        (offer,) = _allowed_plans(config, model, machines.devices, question, measure, choice, 1)
    except (ClusterError, PlanError):
        return None
    following, analysis = offer
    reason = f"{plan.layout} ran out of memory, and this one needs less; {following.reason}"
    return dataclasses.replace(following, reason=reason), analysis


MODEL_SPLITS = (Mechanics.STAGES, Mechanics.MATRICES, Mechanics.TOKENS)
"""Axes whose degree is kept when ranks are lost, the most important first; experts are spread over the other ranks."""


def _similar_layouts(full_layout: Layout, ranks: int, rows: int) -> list[Layout]:
    """Returns layouts of ``ranks`` ranks that keep some of the model-parallel degrees and add data parallelism.

    Layouts that keep more of the model's axes come first.
    """
    named = [full_layout.axis(mechanics) for mechanics in MODEL_SPLITS if full_layout.degree(mechanics) > 1]
    layouts = []
    for names in (names for count in range(len(named), -1, -1) for names in combinations(named, count)):
        model_axes = {name: full_layout.degree(name) for name in names}
        # What the model's axes leave goes to readers of other rows; each needs a row at least.
        readers, remainder = divmod(ranks, math.prod(model_axes.values()))
        if remainder or readers > rows:
            continue
        data = {} if readers == 1 else {row_axes(Holds.SHARD if full_layout.zero else Holds.COPY)[0]: readers}
        layout = Layout(
            degrees=model_axes | data,
            zero=full_layout.zero if full_layout.zero and readers > 1 else 0,
            precision=full_layout.precision,
            recompute=full_layout.recompute,
            sequence=full_layout.sequence and full_layout.axis(Mechanics.MATRICES) in model_axes,
            tp_overlap=full_layout.tp_overlap if full_layout.axis(Mechanics.MATRICES) in model_axes else 0,
            schedule=full_layout.schedule if full_layout.axis(Mechanics.STAGES) in model_axes else "",
            stages=full_layout.stages if full_layout.axis(Mechanics.STAGES) in model_axes else 0,
            attention=full_layout.attention if full_layout.axis(Mechanics.TOKENS) in model_axes else "",
            rows=uneven_shares(rows, readers),
        )
        microbatches = full_layout.microbatches
        layouts.append(
            dataclasses.replace(
                layout,
                microbatches=microbatches if rows % (sum(layout.reader_shares()) * microbatches) == 0 else 1,
                compress=full_layout.compress.over(layout.copies),
                compress_weights=full_layout.compress_weights if layout.zero else "none",
                ep_overlap=full_layout.ep_overlap if layout.degree(Mechanics.EXPERTS) > 1 else 0,
                ep_halves=full_layout.ep_halves and layout.can_halve,
                ep_keep=full_layout.ep_keep and layout.degree(Mechanics.EXPERTS) > 1,
                ep_node=expert_node_over(full_layout.ep_node, layout.degrees),
                secondary=secondary_over(full_layout.secondary, layout.degrees, layout.zero),
            )
        )
    return layouts


def uneven_shares(rows: int, readers: int) -> BatchShares:
    """Returns shares of readers as even as whole rows allow; no shares where the rows divide evenly."""
    smaller_share, larger_shares = divmod(rows, readers)
    return BatchShares.of([smaller_share + 1] * larger_shares + [smaller_share] * (readers - larger_shares))


def _planner_plans(
    config: RunConfig,
    model: ReadModel,
    machines: Machines,
    count: int,
    precision: str | None = None,
    say: Say = to_stderr,
) -> list[tuple[Plan, ModelAnalysis]]:
    """Returns up to ``count`` of the planner's best layouts, skipping those that the model doesn't allow."""
    ranks, devices = machines.ranks, machines.devices
    precision = precision or ("bf16" if devices.kind == "cuda" else "float32")
    try:
        question = _make_question(config, model, machines, precision)
        measure = _make_measure(config, model, machines, precision)
        question = measure_activations(question, measure)
        choice = choose_finalists(question, FINALISTS, measure, config.allow)
    except (ClusterError, PlanError) as error:
        # What takes a GPU's memory is known to a percent; ranks of a host share more of theirs than is planned.
        if isinstance(error, NoRoomError) and devices.kind == "cuda":
            raise
        memory = device_memory_bytes(devices, ranks)
        try:
            plan = state_rule.choose(ranks, config.train.batch, model.sizes, memory, precision)
        except PlanError:
            # The search names what would fit, if it got so far.
            if isinstance(error, PlanError):
                raise error from None
            raise
        say(f"plan: by state alone, since none could be planned here: {error}")
        analysis = analyse_layout(config, model, plan.layout, devices)
        prediction = state_rule.predict(plan.layout, model_parts(model.built, analysis))
        return [(dataclasses.replace(plan, prediction=prediction), analysis)]
    return _allowed_plans(config, model, devices, question, measure, choice, count)


def _allowed_plans(
    config: RunConfig,
    model: ReadModel,
    devices: Devices,
    question: Question,
    measure: Measure,
    choice: Choice,
    count: int,
) -> list[tuple[Plan, ModelAnalysis]]:
    """Returns up to ``count`` of a choice's best layouts, skipping those that the model doesn't allow.

    Raises:
        PlanError: where it allows none.
    """
    plans: list[tuple[Plan, ModelAnalysis]] = []
    refused = []
    for layout_index, ranked in enumerate(choice.best):
        try:
            analysis = analyse_layout(config, model, ranked.layout, devices)
        except PlanError as error:
            refused.append(f"{ranked.layout}: {error}")
            continue
        parts = model_parts(model.built, analysis)
        if question.job.splits_backward and predict.whole_backward_reason(ranked.layout, parts):
            # Known only once the model was rehearsed: plan again without schedules that count on halves.
            unsplit_job = dataclasses.replace(question.job, splits_backward=False)
            question = dataclasses.replace(question, job=unsplit_job)
            choice = choose_finalists(question, FINALISTS, measure, config.allow)
            return _allowed_plans(config, model, devices, question, measure, choice, count)
        plan = predict.chosen_plan(question, choice, layout_index, parts)
        untraced = untraced_note(question, plan.layout, measure)
        # The faster one that can't run is named, with its reason: the user may have allowed it.
        reasons = filter(None, (plan.reason, untraced, *refused[:1]))
        plans.append((dataclasses.replace(plan, reason="; ".join(reasons)), analysis))
        if len(plans) == count:
            break
    if not plans:
        raise PlanError(f"none of the best layouts can run: {refused[0]}; name one with --layout")
    return plans


def _make_measure(config: RunConfig, model: ReadModel, machines: Machines, precision: str) -> Measure:
    """Returns what measures the model for a layout, as these machines run it."""
    tokens = config.data.sequence
    return model.measure(as_run_on(model.built, precision, tokens, machines.devices), tokens, precision)


def _make_question(config: RunConfig, model: ReadModel, machines: Machines, precision: str) -> Question:
    base = Layout(precision=precision)
    is_free = machines.devices.kind == "cuda" and can_compile() and not drawing_parts(model.built)
    job = PricedJob(
        shape=measure_shape(model.built),
        sequence=config.data.sequence,
        rows=config.train.batch,
        precision=base.compute_precision,
        products=base.product_precision,
    )
    return Question(
        job=job,
        cluster=cluster_of_machines(machines),
        base=base,
        fits=config.fits,
        rounds=make_rounds(config.outer, config.least_steps),
        history=learn(*run_history_file(machines), job.step_flops, precision),
        compile_steps=config.least_steps if is_free else 0,
    )
