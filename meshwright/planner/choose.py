"""The planner's answer: the fastest layout that fits, the runners-up, what else was looked at, and how sure it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.activation_bytes import ActivationBytes, adjusted_one
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.framework_profiles import MESHWRIGHT
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import CORE_DRAW_BYTES
from meshwright.planner.cost.price import price
from meshwright.planner.cost.prices import Price, Prices
from meshwright.planner.device_limits import check_host, job_for, with_host_memory
from meshwright.planner.run_history import RunHistory
from meshwright.planner.search import SearchResult, search
from meshwright.planner.space import Space, contains, cores, layout_of
from meshwright.planner.timeline import pipeline_s
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.units import format_bytes

USABLE = 0.94
"""Share of a device's memory that a plan may fill; the rest is what the allocator loses to holes over a long run."""
SAME = 0.05
"""Relative difference of two layouts' predicted times that the model can't tell apart (docs/predictions.md: the regret
of the first choice)."""
PROCESS_BYTES = 0.35 * 2**30
"""Memory of a rank's process with torch and transformers loaded, before the model (resident set, torch 2.13)."""
SAME_ON_CORES = 0.15
"""The same on processor cores, where the host work of stages and shards competes with the compute and isn't priced."""
UNSTEADY = 0.1
"""Spread of a machine's pace while it was calibrated from which a plan says so."""
MOST_ACTIONS = 8192
"""Forwards and backwards of a step up to which a layout's pipeline is simulated one by one: a tenth of a second."""
FINALISTS = 10
"""Layouts that are priced in full, of which the plan is chosen, however many are shown."""
AFTER = ("gather", "reduce", "offload", "optimizer", "step")
"""Parts of a step that are no part of the pipeline."""
LEANER = 0.01
"""Share of memory by which a slower layout must be leaner to be told of."""
OBJECTIVES = ("time", "cost", "energy")
"""What the best has least of: seconds, dollars or joules of a token."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a search gives a user."""

    best: tuple[Candidate, ...]
    """The finalists: the plan, then the others, fastest first, each unlike the others. The plan is the fastest, or, of
    those that the model can't tell from it, the simplest."""
    ties: int
    """How many of `best` the model can't tell from the fastest, itself included."""
    front: tuple[tuple[float, float, str], ...]
    """(seconds, bytes of the fullest rank, layout) of those than which none is both faster and leaner."""
    considered: int
    """Layouts of the space."""
    priced: int
    """Of these, how many were priced; a bound shows that no other is among the best."""
    too_large: int
    """Of the priced, how many don't fit."""
    took_s: float
    """Seconds of the search."""
    notes: tuple[str, ...] = ()
    """What a user should know besides."""
    more: tuple[Candidate, ...] = ()
    """Layouts after the finalists, where more are to be shown."""
    show: int = FINALISTS
    """Most layouts to show."""

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """The plan and the others that are to be shown, fastest first."""
        others = sorted((*self.best[1:], *self.more), key=lambda one: one.price.step_s)
        return (self.best[0], *others)[: self.show]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be planned."""

    job: PricedJob
    cluster: Cluster
    base: Layout = field(default_factory=Layout)
    """Choices that every layout shares: its precision."""
    engine: FrameworkProfile | None = None
    """How it is run; our own runtime on these devices by default."""
    objective: str = "time"
    """One of `OBJECTIVES`."""
    usable: float = USABLE
    """Share of a device's memory that may be filled."""
    lesson: RunHistory = field(default_factory=RunHistory)
    """What earlier runs on these machines taught."""
    kept: ActivationBytes | None = None
    """What the model's modules keep, where it was read; else the closed form says."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Fields of `Space` that are set otherwise."""

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
    def runtime(self) -> FrameworkProfile:
        """How layouts are run."""
        return self.engine or engine_on(self.cluster)

    @property
    def machine(self) -> Machine:
        """What layouts are priced on."""
        return Machine.of(self.cluster)

    @property
    def same(self) -> float:
        """Relative difference of two predicted times that tells nothing."""
        return SAME_ON_CORES if self.cluster.device.name.startswith("cpu") else SAME

    @property
    def room_bytes(self) -> float:
        """Bytes that a layout may take of each device."""
        return self.usable * self.cluster.memory_bytes

    @property
    def space(self) -> Space:
        """The layouts to choose from."""
        space = Space(devices=self.cluster.devices, domain=self.cluster.domain, **self.limits)
        if not self.base.compile:
            return space
        # torch.compile can't run a backward in two halves.
        whole = tuple(name for name in space.schedules if not known_schedules()[name].splits_backward)
        return dataclasses.replace(space, schedules=whole)


def engine_on(cluster: Cluster) -> FrameworkProfile:
    """Returns our runtime's options on a cluster's devices.

    On processor cores collectives are computed by the cores that compute the model, so that nothing hides but, over a
    network, the share of an all-reduce that was seen to hide when the nodes were measured together. A rank is a process
    of its own that takes no context of a device.
    """
    if not cluster.device.name.startswith("cpu"):
        return MESHWRIGHT
    found = cluster.calibration
    over_network = found is not None and found.nodes == cluster.nodes > 1
    seen = (found.overlap or 0.0) if found is not None and over_network else 0.0
    hidden = {"dp_overlap": seen, "gather_overlap": seen, "cp_overlap": 0.0, "ep_overlap": 0.0}
    options = {f"runtime__{name}": share for name, share in hidden.items()}
    return MESHWRIGHT.with_options(**options, runtime__draw_bytes=CORE_DRAW_BYTES, context_bytes=PROCESS_BYTES)


def choose(question: Question, show: int = 10) -> Choice:
    """Searches the whole space.

    Args:
        question: what is to be planned.
        show: most layouts in the answer.

    Raises:
        PlanError: when no layout exists, or none fits: says what is missing, and the nearest that would.
    """
    found = searched(question)
    if found.best is None:
        raise PlanError(_nothing_fits(question, found))
    return chosen(question, found, show)


def searched(question: Question, under: float = np.inf) -> SearchResult:
    """Searches the whole space for layouts that take no more than ``under`` seconds a step.

    Raises:
        PlanError: when no layout exists.
    """
    job, room, engine = question.job, question.room_bytes, question.runtime.for_layout(question.base)
    return search(job, question.space, question.machine, engine, room, kept=question.kept, under=under)


def chosen(question: Question, found: SearchResult, show: int) -> Choice:
    """Returns the answer that a search gives.

    Args:
        question: what was searched for.
        found: what was found, not nothing.
        show: most layouts in the answer.
    """
    assert found.best is not None
    picked = [candidate(question, layout) for layout in _unlike(question, *found.best, max(show, FINALISTS))]
    best, ties = arranged(picked[:FINALISTS], question.same)
    return Choice(
        best=best,
        ties=ties,
        more=tuple(picked[FINALISTS:]),
        show=show,
        front=front_of([candidate(question, layout) for layout in _lean(question, *found.best)]),
        considered=found.considered,
        priced=found.priced,
        too_large=found.too_large,
        took_s=found.took_s,
        notes=notes(question, best[0]),
    )


def arranged(found: Sequence[Candidate], same: float) -> tuple[tuple[Candidate, ...], int]:
    """Returns candidates with the plan first, then fastest first; and how many can't be told from the fastest.

    What the model can't tell apart is decided by what is easier to run.

    Args:
        found: in any order.
        same: relative difference of times that tells nothing.
    """
    best = sorted(found, key=lambda one: one.price.step_s)
    alike = [one for one in best if one.price.step_s <= best[0].price.step_s * (1 + same)]
    first = min(alike, key=lambda one: (intricacy(one.layout), one.price.step_s))
    return (first, *(one for one in best if one is not first)), len(alike)


def intricacy(layout: Layout) -> tuple[int, int, int]:
    """Returns how much a layout asks for: axes besides the data axes and choices, ZeRO level, micro-batches."""
    axes = sum(known_axes()[name].mechanics is not Mechanics.NONE for name in layout.degrees)
    choices = bool(layout.recompute) + (layout.stages > 1) + (layout.offload != "none")
    return axes + choices, layout.zero, layout.microbatches


def candidate(question: Question, layout: Layout) -> Candidate:
    """Prices one layout in full.

    Raises:
        PlanError: for state in host memory where there is none for it; for a precision that devices have no rate for.
    """
    job, cluster = job_for(question.job, layout, question.cluster), question.cluster
    question = dataclasses.replace(question, job=job)
    check_host(job, layout, cluster, question.runtime)
    found = _simulated(question, layout, price(job, layout, question.machine, question.runtime))
    found = adjusted_one(found, layout, question.kept, question.runtime, len(job.shape.blocks))
    tokens = job.rows * job.sequence
    dollars, watts = cluster.price_per_hour, cluster.watts
    return Candidate(
        layout=layout,
        price=found,
        tokens_per_s=tokens / found.step_s,
        cost_per_mtoken=None if dollars is None else dollars / 3600.0 * found.step_s / tokens * 1e6,
        joules_per_token=watts * found.step_s / tokens if watts else None,
    )


def _simulated(question: Question, layout: Layout, found: Price) -> Price:
    """The price with the pipeline's actions run one by one, where the closed form was an approximation."""
    if layout.degree(Mechanics.STAGES) == 1:
        return found
    chunks = layout.stages_per_rank
    if 2 * layout.degree(Mechanics.STAGES) * layout.microbatches * chunks > MOST_ACTIONS:
        return found
    simulated_s = pipeline_s(question.job, layout, question.machine, question.runtime)
    piped = sum(seconds for name, seconds in found.parts.items() if name not in AFTER)
    bubble = max(0.0, found.parts["bubble"] + simulated_s - piped)
    parts = {**found.parts, "bubble": bubble}
    return dataclasses.replace(found, parts=parts, step_s=sum(parts.values()))


def _unlike(question: Question, degrees: LayoutBatch, prices: Prices, show: int) -> list[Layout]:
    """The best layouts, of each kind one: others of its kind differ in ZeRO level or layers recomputed alone."""
    layers = len(question.job.shape.blocks)
    order = np.lexsort((prices.peak, prices.step_s))
    chosen: list[Layout] = []
    seen: set[str] = set()
    for at in order:
        layout = layout_of(degrees, int(at), question.base, layers, question.space.fixed)
        kind = dataclasses.replace(layout, zero=min(layout.zero, 1), recompute=Recompute(layout.recompute.mode))
        if str(kind) not in seen:
            seen.add(str(kind))
            chosen.append(layout)
        if len(chosen) == show:
            break
    return chosen


def _lean(question: Question, degrees: LayoutBatch, prices: Prices) -> list[Layout]:
    """Of the layouts that were kept, those than which none is both faster and leaner."""
    layers = len(question.job.shape.blocks)
    least, found = np.inf, []
    for at in np.lexsort((prices.peak, prices.step_s)):
        if float(prices.peak[at]) < least * (1 - LEANER):
            least = float(prices.peak[at])
            found.append(layout_of(degrees, int(at), question.base, layers, question.space.fixed))
    return found


def front_of(found: Sequence[Candidate]) -> tuple[tuple[float, float, str], ...]:
    """Returns (seconds, bytes of the fullest rank, layout) of those than which none is both faster and leaner.

    Args:
        found: in any order.
    """
    least, front = np.inf, []
    for one in sorted(found, key=lambda one: (one.price.step_s, one.price.peak)):
        if one.price.peak < least * (1 - LEANER):
            least = one.price.peak
            front.append((one.price.step_s, one.price.peak, str(one.layout)))
    return tuple(front)


def joined(question: Question, choice: Choice, named: Sequence[Candidate]) -> Choice:
    """Returns the answer with layouts of the space that turned out faster than all finalists.

    The search orders by closed forms; what is priced in full afterwards may change places.

    Args:
        question: what was planned.
        choice: the answer.
        named: layouts that were priced like the finalists.
    """
    limit = min(one.price.step_s for one in choice.best) / (1 + question.same)
    fitting = [one for one in named if one.price.step_s < limit and one.price.peak <= question.room_bytes]
    if not fitting:
        return choice
    every = cores(question.job, question.space)
    faster = [one for one in fitting if contains(question.job, question.space, every, question.base, one.layout)]
    if not faster:
        return choice
    best, ties = arranged([*choice.best, *faster], question.same)
    told = "the plan is a layout that was named: priced in full it is faster than what the search put first"
    return dataclasses.replace(choice, best=best, ties=ties, notes=(*notes(question, best[0]), told))


def notes(question: Question, best: Candidate) -> tuple[str, ...]:
    """Returns what a user should know of the plan besides its figures."""
    told = []
    room = question.cluster.memory_bytes - best.price.peak
    if room < 0.08 * question.cluster.memory_bytes:
        told.append(
            f"the fullest rank leaves {format_bytes(room)} free: longer rows or another allocator may not fit; "
            "--usable 0.85 plans with more room"
        )
    bubble = best.price.parts.get("bubble", 0.0) / best.price.step_s
    if bubble > 0.2:
        told.append(f"{bubble:.0%} of the step is the pipeline's bubble: a larger batch would fill it")
    if question.lesson.note:
        told.append(question.lesson.note)
    measured = question.cluster.calibration
    if measured is not None and measured.pace_spread > UNSTEADY:
        told.append(
            f"while this machine was calibrated it ran {measured.pace_spread:.0%} slower in the median than at its "
            "fastest, so something else was running: times are no surer than that; calibrate again when it is quiet"
        )
    if measured is None:
        told.append("device and links are the catalogue's figures; `meshwright calibrate` measures these machines")
    return tuple(told)


def _nothing_fits(question: Question, found: SearchResult) -> str:
    job, room = question.job, question.room_bytes
    if found.leanest is None:
        return f"no layout of {question.cluster} exists for {job.shape.name}"
    degrees, prices = found.leanest
    layout = layout_of(degrees, 0, question.base, len(job.shape.blocks), question.space.fixed)
    need = float(prices.peak[0])
    layers = int(len(job.shape.blocks) * room / need)
    cures = [f"about {round(question.cluster.devices * need / room)} devices"]
    if layers:
        cures.append(f"{layers} layers instead of {len(job.shape.blocks)}")
    engine = question.runtime.for_layout(question.base)
    cures += with_host_memory(job, question.cluster, engine, question.space, room, question.base)
    return (
        f"no layout of {question.cluster} holds {job.shape.name} with {job.rows} rows of {job.sequence} tokens: the "
        f"leanest of {found.considered} ({layout}) needs {format_bytes(need)} on its fullest rank, of "
        f"{format_bytes(room)} that may be filled; nearest that would: {', or '.join(cures)}"
    )
