# long: a question, its answer and the choice among finalists are one noun
"""Chooses the plan: the fastest layout that fits, its runners-up, and how certain the choice is."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.cluster.cluster import Cluster
from meshwright.control_groups import PROCESS_BYTES
from meshwright.errors import NoRoomError, PlanError
from meshwright.planner.cost.expert_dispatch import fastest_nodes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import CORE_DRAW_BYTES, CORE_DRAW_S, MESHWRIGHT
from meshwright.planner.cost.pipeline_floor import MAX_SIMULATED_ACTIONS, simulated_actions
from meshwright.planner.cost.pipeline_simulation import simulated_prices, simulated_steps_s
from meshwright.planner.cost.prices import Price, Prices
from meshwright.planner.cost.rounding import CORE_BYTE
from meshwright.planner.device_limits import check_host, job_for, with_host_memory
from meshwright.planner.remedies import leaner_optimizer, smaller_jobs
from meshwright.planner.rounds import Rounds
from meshwright.planner.run_history import RunHistory
from meshwright.planner.search import SearchResult, search
from meshwright.planner.space import Space, contains, cores, layout_of
from meshwright.planner.uncertainty import Seen, TimeSpread, fitted_spreads
from meshwright.planner.utilization import data_sheet_flops, model_flops_per_s
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import CPU_CHUNK_TOKENS, Recompute
from meshwright.units import format_bytes

USABLE = 0.94
"""Most share of a device's memory that a plan may fill, however sure its bytes are; the rest is lost to fragmentation
over a long run."""
FITS = 0.99
"""Chance with which a plan fits."""
TIME_TOLERANCE = 0.05
"""Relative difference of predicted times below which layouts tie (docs/predictions.md: regret of the first choice)."""
TIME_TOLERANCE_ON_CORES = 0.15
"""The same on processor cores, where host work competes with the compute and isn't priced."""
NOTED_PACE_SPREAD = 0.1
"""Spread of a machine's pace during calibration from which a plan carries a note."""
FINALISTS = 10
"""Layouts that are priced in full; the plan is one of them, however many are shown."""
KEPT = 200
"""Layouts that a search keeps."""
MOST_KEPT = 12800
"""Most that it keeps where it can't tell yet which is the fastest."""
AFTER_PIPELINE = ("gather", "reduce", "offload", "optimizer", "step", "stragglers")
"""Parts of a step outside the pipeline."""
MIN_MEMORY_SAVING = 0.01
"""Share of memory that a slower layout must save to stand on the Pareto front."""
OBJECTIVES = ("time", "cost", "energy")
"""What the plan minimizes: seconds, dollars or joules of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its price."""

    layout: Layout
    price: Price
    tokens_per_s: float
    """Of the whole job."""
    cost_per_mtoken: float | None
    """Dollars for a million tokens; None without a price of the devices."""
    joules_per_token: float | None
    """At the power under load; None where it isn't known."""
    flops_per_device: float
    """Model FLOP/s of a device: of a training step without what is recomputed (`ModelShape.train_flops_per_token`)."""
    mfu: float
    """Model FLOPs utilisation: share of the data sheet's dense peak (`utilization.data_sheet_flops`)."""
    rounds: Rounds | None = None
    """How its islands join, as it is priced; None without several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The answer to a `Question`: the plan, its runners-up, and what the search covered."""

    best: tuple[Candidate, ...]
    """The finalists: the plan, then the others, fastest first, each of another kind. The plan is the simplest of those
    that tie with the fastest."""
    ties: int
    """How many of `best` tie with the fastest, itself included."""
    front: tuple[tuple[float, float, str], ...]
    """(seconds, bytes of the fullest rank, layout) on the Pareto front of time and memory."""
    considered: int
    """Layouts of the space."""
    priced: int
    """Of these, how many were priced; a lower bound pruned the others."""
    too_large: int
    """Of the priced, how many don't fit."""
    search_s: float
    """Seconds of the search."""
    notes: tuple[str, ...] = ()
    """Further sentences for the user."""
    more: tuple[Candidate, ...] = ()
    """Layouts after the finalists, where more are to be shown."""
    show: int = FINALISTS
    """Most layouts to show."""
    kept: tuple[tuple[float, Layout], ...] = ()
    """(seconds as the search priced them, layout) of all that it kept, the fastest first."""

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """The plan and the others that are to be shown, fastest first."""
        runners_up = sorted((*self.best[1:], *self.more), key=lambda option: option.price.step_s)
        return (self.best[0], *runners_up)[: self.show]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A job to plan on a cluster, and the bounds of the search."""

    job: PricedJob
    cluster: Cluster
    base: Layout = field(default_factory=Layout)
    """Choices that every layout shares: its precision."""
    engine: FrameworkProfile | None = None
    """The runtime that is priced; our own on these devices by default."""
    objective: str = "time"
    """One of `OBJECTIVES`."""
    fits: float = FITS
    """Chance with which a layout must fit its devices."""
    usable: float | None = None
    """Share of a device's memory that may be filled, in place of the one that follows from ``fits``."""
    history: RunHistory = field(default_factory=RunHistory)
    """Measured over priced times of earlier runs on these machines."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Fields of `Space` that differ from their defaults."""
    rounds: Rounds = field(default_factory=Rounds)
    """How islands join, where a layout has several."""
    beside: int = 0
    """Devices of other islands, which compute at the same time on these machines."""
    compile_steps: int = 0
    """Steps that may make up for compiling layers; 0 where layers are compiled only as ``base`` says."""

    def __post_init__(self) -> None:
        """Refuses an unknown objective, and one without its figures."""
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective={self.objective}: it is one of {', '.join(OBJECTIVES)}")
        if self.objective == "cost" and self.cluster.price_per_hour is None:
            raise PlanError(
                f"objective=cost: no price is known for {self.cluster}; give price_per_hour in the cluster's file"
            )
        if self.objective == "energy" and not self.cluster.watts:
            raise PlanError(f"objective=energy: no power is known for {self.cluster}; give watts in the cluster's file")

    @property
    def under_load(self) -> bool:
        """Whether other ranks of these machines compute at the same time as one."""
        return self.cluster.devices + self.beside > 1

    @property
    def runtime(self) -> FrameworkProfile:
        """The profile of the runtime."""
        return self.engine or engine_on(self.cluster)

    @property
    def machine(self) -> Machine:
        """The devices and links that layouts are priced on."""
        return Machine.of(self.cluster)

    @property
    def same(self) -> float:
        """Relative difference of predicted times below which two layouts tie."""
        return TIME_TOLERANCE_ON_CORES if self._on_cores else TIME_TOLERANCE

    @property
    def seen(self) -> Seen:
        """What the prices rest on: runs of this machine, its calibration, or published runs on such devices."""
        measured = self.cluster.calibration is not None or self.history.runs > 0
        fitted = set(self.cluster.kinds) <= fitted_spreads().devices
        own_bytes = self.runtime.name == MESHWRIGHT.name and self.job.activations is not None
        return Seen(framework=measured, device=measured or fitted, own_bytes=own_bytes)

    @property
    def time_spread(self) -> TimeSpread:
        """Scales of the error of predicted times."""
        spread = fitted_spreads().time
        return spread.widened(TIME_TOLERANCE_ON_CORES) if self._on_cores else spread

    @property
    def _on_cores(self) -> bool:
        return self.cluster.device.name.startswith("cpu")

    @property
    def _counts_bytes(self) -> bool:
        """Whether bytes are the model's own: on a calibrated machine, and on cores, where no allocator keeps more."""
        return self.cluster.calibration is not None or self._on_cores

    @property
    def usable_share(self) -> float:
        """Share of each device's memory that a layout may fill: where it fits with the chance ``fits``."""
        if self.usable is not None:
            return self.usable
        return min(USABLE, fitted_spreads().memory.share(self.fits, self.seen, self._counts_bytes))

    @property
    def usable_bytes(self) -> float:
        """Bytes that a layout may fill on each device."""
        return self.usable_share * self.cluster.memory_bytes

    def tightest_stage(self, candidate: Candidate) -> tuple[int, float]:
        """Returns (index of the stage, bytes of its device) of the rank that fills its device most.

        On devices of several sizes that needn't be the rank that needs most: stages differ, and so do their devices.
        """
        cluster, price, islands = self.cluster, candidate.price, candidate.layout.islands
        if cluster.uniform or len(price.stages) == 1:
            return price.fullest, cluster.memory_bytes
        # Outermost are islands, then stages: the ranks of a stage follow one another within an island.
        island_ranks = cluster.devices // islands
        stage_ranks = island_ranks // len(price.stages)
        rooms = [
            (index, cluster.device_of(island * island_ranks + index * stage_ranks).memory_bytes)
            for island in range(islands)
            for index in range(len(price.stages))
        ]
        return max(rooms, key=lambda room: price.stages[room[0]].peak / room[1])

    def chance_fits(self, needed_bytes: float, device_bytes: float) -> float:
        """Returns the chance that a rank of predicted ``needed_bytes`` fits a device of ``device_bytes``."""
        room = math.log(device_bytes / needed_bytes)
        return fitted_spreads().memory.chance(room, self.seen, self._counts_bytes)

    def chance_candidate_fits(self, candidate: Candidate) -> float:
        """Returns the chance that all ranks of a layout fit their devices."""
        index, device_bytes = self.tightest_stage(candidate)
        return self.chance_fits(candidate.price.stages[index].peak, device_bytes)

    @property
    def space(self) -> Space:
        """The layouts to choose from."""
        limits = self.limits
        if self.engine is None and self.job.shape.experts:
            limits = {"expert_nodes": fastest_nodes(self.job, self.machine, self.cluster.devices), **limits}
        space = Space(devices=self.cluster.devices, domain=self.cluster.domain, **limits)
        if self.job.splits_backward and not self.base.compile:
            return space
        # torch.compile can't run a backward in two halves, and some models can't.
        unsplit_schedules = tuple(name for name in space.schedules if not known_schedules()[name].splits_backward)
        return dataclasses.replace(space, schedules=unsplit_schedules)


def engine_on(cluster: Cluster) -> FrameworkProfile:
    """Returns our runtime's profile on a cluster's devices.

    On processor cores the cores that compute the model also compute its collectives, so none overlaps. The exception
    are those over a network, which hide but for a core's own seconds (`Machine.core_byte_s`), or by the share of an
    all-reduce that an older calibration measured as hidden. Where a quota leaves a node less than a core none hides:
    what sends is stopped with what computes (``benchmarks/bench_slow_train.py --nodes 4 --rates 1gbit`` on two cores:
    714 and 755 ms, 643 planned so, 510 and 490 with what hides on whole cores). A rank has no device context.
    """
    if not cluster.device.name.startswith("cpu"):
        return MESHWRIGHT
    calibration, shares = cluster.calibration, dict[str, float]()
    over_network = calibration is not None and calibration.nodes == cluster.nodes > 1
    if calibration is None or not over_network or calibration.is_throttled or not calibration.host_s(CORE_BYTE):
        hides = calibration is not None and over_network and not calibration.is_throttled
        overlap = (calibration.overlap or 0.0) if calibration is not None and hides else 0.0
        shares = {"dp_overlap": overlap, "gather_overlap": overlap, "reduce_floor": 1.0 - overlap}
    # Gradients are added at the measured rate, and what nodes wait for each other is in measured collectives.
    shares |= dict.fromkeys(("cp_overlap", "ep_overlap", "interference", "accumulate_bytes", "jitter"), 0.0)
    options = {f"runtime__{name}": share for name, share in shares.items()}
    chunks = {"saved__chunk_logits": 0.0, "saved__chunk_tokens": float(CPU_CHUNK_TOKENS)}
    return MESHWRIGHT.with_options(
        **options,
        **chunks,
        saved__logits=12.0,
        runtime__loss_passes=(24.0, 24.0),
        runtime__update_bytes=30.0,
        runtime__host_step_s=0.01,
        runtime__draw_s=CORE_DRAW_S,
        runtime__mask_bytes=1.0,
        runtime__draw_bytes=CORE_DRAW_BYTES,
        runtime__sends_in_turn=False,
        workspace_bytes=0.0,
        context_bytes=PROCESS_BYTES,
    )


def choose(question: Question, show: int = 10) -> Choice:
    """Searches the whole space and returns the plan with its runners-up.

    Args:
        question: job, cluster and bounds.
        show: most layouts in the answer.

    Raises:
        NoRoomError: when none of the layouts fits; the message has the shortage and the nearest that would fit.
        PlanError: when no layout exists; the message names the rule that excludes all.
    """
    result = search_space(question)
    if result.best is None:
        raise NoRoomError(_nothing_fits_message(question, result))
    return build_choice(question, result, show)


def search_space(question: Question, under: float = np.inf, keep: int = KEPT) -> SearchResult:
    """Searches the whole space for the ``keep`` layouts with the least bounds, of at most ``under`` seconds a step.

    Raises:
        PlanError: when no layout exists.
    """
    job, memory_bytes, engine = question.job, question.usable_bytes, question.runtime.for_layout(question.base)
    return search(job, question.space, question.machine, engine, memory_bytes, keep, under)


def build_choice(question: Question, result: SearchResult, show: int) -> Choice:
    """Builds the answer from a search's result.

    Args:
        question: job, cluster and bounds.
        result: of the search; some layout fits.
        show: most layouts in the answer.
    """
    batch, prices, left_out_s = simulate_kept(question, result)
    kept = batch, prices
    layouts, front_layouts = _best_by_kind(question, *kept, max(show, FINALISTS)), _pareto_layouts(question, *kept)
    priced = price_candidates(question, [*layouts, *front_layouts])
    candidates, front = priced[: len(layouts)], priced[len(layouts) :]
    best, ties = sort_candidates(candidates[:FINALISTS], question.same)
    return Choice(
        best=best,
        ties=ties,
        more=tuple(candidates[FINALISTS:]),
        show=show,
        front=pareto_front(front),
        considered=result.considered,
        priced=result.priced,
        too_large=result.too_large,
        search_s=result.search_s,
        notes=(*_limit_notes(question, best[0], float(prices.step_s[0]), left_out_s), *notes(question, best[0])),
        kept=_kept_layouts(question, *kept),
    )


def simulate_kept(question: Question, result: SearchResult) -> tuple[LayoutBatch, Prices, float]:
    """Returns what a search kept with the seconds that are printed, fastest first, and the bound of what it left out.

    A search keeps the layouts with the least lower bounds. Where one that it left out may still be faster than the
    fastest, because its bound is, it searches again and keeps more, up to `MOST_KEPT`. Of all others no step is shorter
    than the returned seconds.

    Args:
        question: job, cluster and bounds.
        result: of the search; some layout fits.
    """
    job, machine, engine = question.job, question.machine, question.runtime.for_layout(question.base)
    keep = KEPT
    while True:
        assert result.best is not None
        batch, prices = result.best
        steps_s = simulated_steps_s(job, batch, prices.step_s, machine, engine)
        if batch.count < keep or prices.step_s[-1] >= steps_s.min() or keep >= MOST_KEPT:
            break
        keep *= 4
        result = search_space(question, float(steps_s.min()), keep)
    order = np.argsort(steps_s, kind="stable")[:KEPT]
    left_out_s = float(prices.step_s[-1]) if batch.count >= keep else np.inf
    return batch.take(order), dataclasses.replace(prices, step_s=steps_s).take(order), left_out_s


def _limit_notes(question: Question, plan: Candidate, fastest_s: float, left_out_s: float) -> list[str]:
    """Returns sentences on limits of the search that a plan met.

    Args:
        question: job, cluster and bounds.
        plan: the first choice.
        fastest_s: seconds of the fastest layout that was simulated.
        left_out_s: seconds below which no other layout's step can be.
    """
    sentences, layout = [], plan.layout
    if left_out_s < fastest_s:
        sentences.append(
            f"the {MOST_KEPT:,} layouts of least bound were simulated; of the others none can be more than "
            f"{1.0 - left_out_s / fastest_s:.1%} faster, by its lower bound"
        )
    if layout.degree(Mechanics.STAGES) > 1 and question.runtime.runtime.simulated:
        actions = int(simulated_actions(layout.degree(Mechanics.STAGES), layout.stages_per_rank, layout.microbatches))
        if actions > MAX_SIMULATED_ACTIONS:
            sentences.append(
                f"its pipeline's {actions:,} actions are too many to simulate (at most {MAX_SIMULATED_ACTIONS:,}): its "
                "time is the longer of a lower bound and its schedule's formula"
            )
    return sentences


def _kept_layouts(question: Question, batch: LayoutBatch, prices: Prices) -> tuple[tuple[float, Layout], ...]:
    """Returns (seconds, layout) of all that a search kept, the fastest first."""
    layers, fixed = len(question.job.shape.blocks), question.space.fixed
    layouts = (layout_of(batch, i, question.base, layers, fixed) for i in range(batch.count))
    return tuple(zip(prices.step_s.tolist(), layouts))


def sort_candidates(candidates: Sequence[Candidate], tolerance: float) -> tuple[tuple[Candidate, ...], int]:
    """Returns the candidates, the plan first and the others by time; and how many tie with the fastest.

    Args:
        candidates: in any order.
        tolerance: relative difference of times below which two candidates tie; the simplest of them is the plan.
    """
    by_time = sorted(candidates, key=lambda option: option.price.step_s)
    tied = [option for option in by_time if option.price.step_s <= by_time[0].price.step_s * (1 + tolerance)]
    plan = min(tied, key=lambda option: (intricacy(option.layout), option.price.step_s))
    return (plan, *(option for option in by_time if option is not plan)), len(tied)


def intricacy(layout: Layout) -> tuple[int, int, int]:
    """Returns a layout's complexity: (axes other than data axes + choices, ZeRO level, micro-batches)."""
    axes = sum(known_axes()[name].mechanics is not Mechanics.NONE for name in layout.degrees)
    options = layout.recompute, layout.stages > 1, layout.offload != "none", layout.is_lossy
    further = layout.secondary, layout.tp_overlap, layout.ep_node, layout.ep_overlap, layout.ep_halves, layout.ep_keep
    return axes + sum(map(bool, (*options, *further))), layout.zero, layout.microbatches


def price_candidate(question: Question, layout: Layout) -> Candidate:
    """Prices one layout in full.

    Raises:
        PlanError: for state in host memory without room for it; for a precision that devices have no rate for.
    """
    return price_candidates(question, [layout])[0]


def price_candidates(question: Question, layouts: Sequence[Layout]) -> list[Candidate]:
    """Prices layouts in full, many at once.

    Raises:
        PlanError: for state in host memory without room for it; for a precision that devices have no rate for.
    """
    cluster, layouts_of_job = question.cluster, dict[PricedJob, dict[Layout, None]]()
    for layout in layouts:
        job = job_for(question.job, layout, cluster)
        check_host(job, layout, cluster, question.runtime)
        layouts_of_job.setdefault(job, {})[layout] = None
    candidates: dict[Layout, Candidate] = {}
    for job, priced in layouts_of_job.items():
        prices = simulated_prices(job, list(priced), question.machine, question.runtime)
        asked = dataclasses.replace(question, job=job)
        candidates |= {layout: priced_candidate(asked, layout, price) for layout, price in zip(priced, prices)}
    return [candidates[layout] for layout in layouts]


def price_ahead(question: Question, layouts: Iterable[Layout]) -> None:
    """Prices at once, as finalists are, layouts that are then priced one by one; what can't be is left to that."""
    job = question.job
    # Islands, and compiled layers that are still to be measured, make another question of it.
    alike = [
        layout
        for layout in layouts
        if layout.islands == 1 and not (layout.compile and job.activations and job.compiled_activations is None)
    ]
    with contextlib.suppress(PlanError):
        price_candidates(question, alike)


def price_possible(
    question: Question, layouts: Iterable[Layout], price_one: Callable[[Layout], Candidate]
) -> list[Candidate]:
    """Returns the prices of variants that can run; one that a host, say, has no room for is left out.

    Args:
        question: what is planned.
        layouts: variants that are tried, not asked for.
        price_one: prices one, or raises `PlanError` where it can't run.
    """
    variants, candidates = list(layouts), []
    price_ahead(question, variants)
    for layout in variants:
        with contextlib.suppress(PlanError):
            candidates.append(price_one(layout))
    return candidates


def priced_candidate(question: Question, layout: Layout, layout_price: Price) -> Candidate:
    """Returns a layout with its price, and the rates that follow from its seconds a step."""
    tokens, step_s = question.job.rows * question.job.sequence, layout_price.step_s
    dollars, watts = question.cluster.price_per_hour, question.cluster.watts
    job = job_for(question.job, layout, question.cluster)
    return Candidate(
        layout=layout,
        price=layout_price,
        tokens_per_s=tokens / step_s,
        cost_per_mtoken=None if dollars is None else dollars / 3600.0 * step_s / tokens * 1e6,
        joules_per_token=watts * step_s / tokens if watts else None,
        flops_per_device=model_flops_per_s(job, step_s) / question.cluster.devices,
        mfu=model_flops_per_s(job, step_s) / data_sheet_flops(question.cluster, job.dtype),
    )


def _best_by_kind(question: Question, batch: LayoutBatch, prices: Prices, limit: int) -> list[Layout]:
    """Returns the best layout of each kind; layouts of a kind differ only in ZeRO level and recomputed layers."""
    layers = len(question.job.shape.blocks)
    order = np.lexsort((prices.peak, prices.step_s))
    layouts: list[Layout] = []
    seen_kinds: set[str] = set()
    for index in order:
        layout = layout_of(batch, int(index), question.base, layers, question.space.fixed)
        kind = dataclasses.replace(layout, zero=min(layout.zero, 1), recompute=Recompute(layout.recompute.mode))
        if str(kind) not in seen_kinds:
            seen_kinds.add(str(kind))
            layouts.append(layout)
        if len(layouts) == limit:
            break
    return layouts


def _pareto_layouts(question: Question, batch: LayoutBatch, prices: Prices) -> list[Layout]:
    """Returns the layouts of a search's result on the Pareto front of time and memory, fastest first."""
    layers = len(question.job.shape.blocks)
    lowest_peak, layouts = np.inf, []
    for index in np.lexsort((prices.peak, prices.step_s)):
        if float(prices.peak[index]) < lowest_peak * (1 - MIN_MEMORY_SAVING):
            lowest_peak = float(prices.peak[index])
            layouts.append(layout_of(batch, int(index), question.base, layers, question.space.fixed))
    return layouts


def pareto_front(candidates: Sequence[Candidate]) -> tuple[tuple[float, float, str], ...]:
    """Returns the Pareto front of candidates: (seconds, bytes of the fullest rank, layout), fastest first."""
    lowest_peak, front = np.inf, []
    for option in sorted(candidates, key=lambda option: (option.price.step_s, option.price.peak)):
        if option.price.peak < lowest_peak * (1 - MIN_MEMORY_SAVING):
            lowest_peak = option.price.peak
            front.append((option.price.step_s, option.price.peak, str(option.layout)))
    return tuple(front)


def add_named_layouts(question: Question, choice: Choice, named: Sequence[Candidate]) -> Choice:
    """Returns the answer with the named layouts that are faster than all finalists once priced in full.

    Args:
        question: what was planned.
        choice: the answer.
        named: layouts that the user named, priced like the finalists.
    """
    limit = min(option.price.step_s for option in choice.best) / (1 + question.same)
    fitting = [option for option in named if option.price.step_s < limit and option.price.peak <= question.usable_bytes]
    if not fitting:
        return choice
    core_rows = cores(question.job, question.space)
    faster = [
        option for option in fitting if contains(question.job, question.space, core_rows, question.base, option.layout)
    ]
    if not faster:
        return choice
    best, ties = sort_candidates([*choice.best, *faster], question.same)
    note = "the plan is a layout that was named: priced in full it is faster than what the search put first"
    return dataclasses.replace(choice, best=best, ties=ties, notes=(*notes(question, best[0]), note))


def _form_notes(layout: Layout) -> Iterator[str]:
    """Yields what a layout does that the search of plain layouts didn't price."""
    if layout.secondary:
        yield (
            f"secondary={layout.secondary}: backward gathers weights inside a node, whose ranks share each layer from "
            "its forward on"
        )
    if layout.tp_overlap:
        yield (
            f"tp_overlap={layout.tp_overlap}: tp's traffic is sent under products, which is priced and was never "
            "measured on several GPUs"
        )
    if layout.ep_node:
        whom = f"each {layout.ep_node} ranks" if layout.ep_node > 1 else "each rank"
        yield (
            f"ep_node={layout.ep_node}: a token travels once to {whom} with experts of it; priced for a router that "
            "chooses all experts, or groups of experts, as often, and never measured on several GPUs"
        )
    if layout.ep_overlap:
        yield (
            f"ep_overlap={layout.ep_overlap}: tokens travel to their experts under the products of others, which is "
            "priced and was never measured on several GPUs"
        )
    if layout.ep_halves:
        yield (
            "ep_halves=true: tokens travel to their experts under what the other half of a micro-batch computes, which "
            "is priced and was never measured on several GPUs"
        )
    if layout.ep_keep:
        yield "ep_keep=true: what came from the ranks of experts is kept, so that recompute exchanges nothing again"


def notes(question: Question, best: Candidate) -> tuple[str, ...]:
    """Returns the sentences about a plan that a user should read besides its figures."""
    sentences = [*question.rounds.advice(best.price.parts), *_form_notes(best.layout)]
    index, device_bytes = question.tightest_stage(best)
    free_bytes = device_bytes - best.price.stages[index].peak
    if free_bytes < 0.08 * device_bytes:
        sentences.append(
            f"the fullest rank leaves {format_bytes(free_bytes)} free: longer rows or another allocator may not fit; "
            "--usable 0.85 plans with more room"
        )
    elif question.usable is None and question.usable_share < 0.9 * USABLE:
        is_known = question.seen.own_bytes and question.seen.device
        runs = "measured on one device and not on several" if is_known else "not measured on such devices"
        sentences.append(
            f"plans fill {question.usable_share:.0%} of a device at most, so that they fit with {question.fits:.0%}: "
            f"what this runtime takes was {runs}; `meshwright calibrate` there permits more, as does a smaller --fits"
        )
    bubble = best.price.parts.get("bubble", 0.0) / best.price.step_s
    if bubble > 0.2:
        sentences.append(f"{bubble:.0%} of the step is the pipeline's bubble: a larger batch would fill it")
    if history_note := question.history.note(best.layout):
        sentences.append(history_note)
    measured = question.cluster.calibration
    if measured is not None and measured.pace_spread > NOTED_PACE_SPREAD:
        sentences.append(
            f"while this machine was calibrated it ran {measured.pace_spread:.0%} slower in the median than at its "
            "fastest, so something else was running: times are no surer than that; calibrate again when it is quiet"
        )
    if unused_network := "" if question.beside else question.cluster.unused_network:
        sentences.append(f"the cluster is one node, so its network, {unused_network}, isn't used")
    if measured is None:
        sentences.append("device and links are the catalogue's figures; `meshwright calibrate` measures these machines")
    return tuple(sentences)


def _nothing_fits_message(question: Question, result: SearchResult) -> str:
    job, usable_bytes = question.job, question.usable_bytes
    if result.leanest is None:
        return f"no layout of {question.cluster} exists for {job.shape.name}"
    batch, prices = result.leanest
    layout = layout_of(batch, 0, question.base, len(job.shape.blocks), question.space.fixed)
    needed_bytes = float(prices.peak[0])
    fitting_layers = int(len(job.shape.blocks) * usable_bytes / needed_bytes)
    # More than there are, however little is missing.
    enough_devices = math.floor(question.cluster.devices * needed_bytes / usable_bytes) + 1
    remedies = [f"about {enough_devices} devices"]
    if fitting_layers:
        remedies.append(f"{fitting_layers} layers instead of {len(job.shape.blocks)}")
    engine = question.runtime.for_layout(question.base)
    remedies += smaller_jobs(job, question.machine, engine, question.space, usable_bytes, question.base)
    remedies += with_host_memory(job, question.cluster, engine, question.space, usable_bytes, question.base)
    remedies += leaner_optimizer({name: float(values[0]) for name, values in prices.memory.items()}, usable_bytes)
    return (
        f"no layout of {question.cluster} holds {job.shape.name} with {job.rows} rows of {job.sequence} tokens: the "
        f"leanest of {result.considered} ({layout}) needs {format_bytes(needed_bytes)} on its fullest rank, of "
        f"{format_bytes(usable_bytes)} that may be filled; nearest that would: {', or '.join(remedies)}"
    )
