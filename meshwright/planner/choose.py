"""Chooses the plan: the fastest layout that fits, its runners-up, and how certain the choice is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from meshwright.errors import NoRoomError
from meshwright.planner.candidate import (
    FINALISTS,
    MIN_MEMORY_SAVING,
    Candidate,
    Choice,
    pareto_front,
    sort_candidates,
)
from meshwright.planner.candidate_prices import price_candidates
from meshwright.planner.cost.layout_batch import LayoutBatch
from meshwright.planner.cost.pipeline_floor import MAX_SIMULATED_ACTIONS, simulated_actions
from meshwright.planner.cost.pipeline_simulation import simulated_steps_s
from meshwright.planner.cost.prices import Prices
from meshwright.planner.device_limits import with_host_memory
from meshwright.planner.plan_notes import plan_notes
from meshwright.planner.question import Question
from meshwright.planner.remedies import leaner_optimizer, smaller_jobs
from meshwright.planner.search import SearchResult, search
from meshwright.planner.space import contains, cores, layout_of
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.units import format_bytes

KEPT = 200
"""Layouts that a search keeps."""
MOST_KEPT = 12800
"""Most that it keeps where it can't tell yet which is the fastest."""


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
    best, ties = sort_candidates(candidates[:FINALISTS], question.tie_tolerance)
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
        notes=(*_limit_notes(question, best[0], float(prices.step_s[0]), left_out_s), *plan_notes(question, best[0])),
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


def add_named_layouts(question: Question, choice: Choice, named: Sequence[Candidate]) -> Choice:
    """Returns the answer with the named layouts that are faster than all finalists once priced in full.

    Args:
        question: what was planned.
        choice: the answer.
        named: layouts that the user named, priced like the finalists.
    """
    limit = min(option.price.step_s for option in choice.best) / (1 + question.tie_tolerance)
    fitting = [option for option in named if option.price.step_s < limit and option.price.peak <= question.usable_bytes]
    if not fitting:
        return choice
    core_rows = cores(question.job, question.space)
    faster = [
        option for option in fitting if contains(question.job, question.space, core_rows, question.base, option.layout)
    ]
    if not faster:
        return choice
    best, ties = sort_candidates([*choice.best, *faster], question.tie_tolerance)
    note = "the plan is a layout that was named: priced in full it is faster than what the search put first"
    return dataclasses.replace(choice, best=best, ties=ties, notes=(*plan_notes(question, best[0]), note))


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
