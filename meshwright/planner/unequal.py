"""Devices of several kinds: layers by speed and memory of each stage, or rows by speed of each reader.

Ranks fill the cluster in order, and pp is the outermost axis, so stages lie on runs of ranks; a stage, and with it tp,
stays inside one kind. Two families are searched: pipelines whose stages differ in layers, and data layouts whose
readers differ in rows. Beside them stands the best plan of each kind alone: a slow device may cost more than it brings.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.choose import AFTER, Candidate, Choice, Question, choose
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.cost.prices import Price, StagePrice
from meshwright.planner.cost.ranks import LayerCosts, RankTimes
from meshwright.planner.cost.timing import makespan
from meshwright.planner.device_kinds import Kind, describe_kinds, kinds_of, places_of
from meshwright.planner.device_limits import check_host, job_for
from meshwright.planner.explain import against
from meshwright.planner.uneven_split import pipelines, shared
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares
from meshwright.units import format_seconds

ROUNDED = 1e-9
"""Relative difference of times by which sums in another order may differ."""


def choose_unequal(question: Question, show: int = 10) -> Choice:
    """Searches both families on all devices, and each kind alone.

    Args:
        question: its cluster has devices of several kinds.
        show: most layouts in the answer.

    Raises:
        PlanError: when nothing fits, or something is asked for that neither family has.
    """
    began, kinds = time.perf_counter(), kinds_of(question.cluster)
    _check_limits(question)
    layouts, seconds = _timed(question, kinds)
    found = _best(question, kinds, layouts, seconds, show)
    if not found:
        names = " and ".join(question.cluster.kinds)
        raise PlanError(
            f"no layout over {names} together fits {question.job.shape.name}: stages and readers would each have to "
            "lie on one kind, and their ranks must divide every kind's; nearest that works: one kind alone, "
            + " or ".join(f"--cluster {count}x{name}" for name, count in question.cluster.kinds.items())
        )
    best = tuple(found[:show])
    return Choice(
        best=best,
        ties=1,
        front=tuple((one.price.step_s, one.price.peak, str(one.layout)) for one in best[:1]),
        considered=len(layouts),
        priced=len(layouts),
        too_large=int(np.isinf(seconds).sum()),
        took_s=time.perf_counter() - began,
        notes=_alone(question, best[0]),
    )


def _check_limits(question: Question) -> None:
    """Refuses what is given of the layouts, which the families don't have: the answer would be without it."""
    for field, option in (("fixed", "--fix"), ("levels", "--fix zero"), ("schedules", "--schedules")):
        if given := question.limits.get(field):
            raise PlanError(
                f"{option} ({given}): on devices of several kinds pipelines of one schedule and data layouts are "
                "searched, whatever is given; name whole layouts by --layout, or plan for one kind"
            )


def _timed(question: Question, kinds: Sequence[Kind]) -> tuple[list[Layout], Array]:
    """Every layout of both families, and its seconds a step; infinite where it doesn't fit."""
    layouts: list[Layout] = []
    seconds = [np.zeros(0)]
    for some in pipelines(question, kinds):
        layouts += some
        seconds.append(_pipelines_s(question, kinds, some))
    readers = list(shared(question, kinds))
    return layouts + readers, np.concatenate([*seconds, _shared_s(question, kinds, readers)])


def _best(
    question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout], seconds: Array, show: int
) -> list[Candidate]:
    """The fastest with their whole prices, fastest first."""
    last = np.sort(seconds)[:show][-1] if len(seconds) else 0.0
    chosen = np.flatnonzero(np.isfinite(seconds) & (seconds <= last * (1 + ROUNDED)))
    found = [_candidate(question, kinds, layouts[at]) for at in chosen.tolist()]
    return sorted([one for one in found if one is not None], key=lambda one: one.price.step_s)


def _pipelines_s(question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout]) -> Array:
    """Seconds a step of pipelines of equally many stages that fit, (N,): `_pipeline_price` of many."""
    if not layouts:
        return np.zeros(0)
    pp, blocks = layouts[0].degree(Mechanics.STAGES), len(question.job.shape.blocks)
    places = places_of(kinds, question.cluster.devices // pp)
    degrees = LayoutBatch.from_layouts(layouts, blocks)
    forward, backward = np.empty((len(layouts), pp)), np.empty((len(layouts), pp))
    after = np.zeros(len(layouts))
    engine = question.runtime.for_layout(question.base)
    for number, (_, machine, _) in enumerate(kinds):
        ranks, own = RankTimes(LayerCosts.of(question.job, degrees, machine, engine)), np.array(places) == number
        forward[:, own], backward[:, own] = ranks.forward[:, own], ranks.backward[:, own]
        after = np.maximum(after, sum(ranks.ending().values()))
    work = degrees.microbatches * (forward + backward).max(axis=1)
    whole = makespan(degrees, forward, backward, backward / 2)
    return np.asarray(np.maximum(whole, work) + after + question.runtime.runtime.host_step_s)


def _shared_s(question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout]) -> Array:
    """Seconds a step of data layouts, (N,), infinite where some reader doesn't fit: `_shared_price` of many."""
    seconds = np.full(len(layouts), -np.inf)
    parts: dict[int, list[tuple[int, int]]] = {}
    for at, layout in enumerate(layouts):
        try:
            layout.check_batch(question.job.rows)
        except PlanError:
            seconds[at] = np.inf
            continue
        for rows, place in _readers(question, kinds, layout):
            parts.setdefault(place, []).append((at, rows))
    for place, found in parts.items():
        device, machine, _ = kinds[place]
        index, rows = np.array(found).T
        plain = [dataclasses.replace(layouts[at], rows="") for at in index]
        degrees = LayoutBatch.from_layouts(plain, len(question.job.shape.blocks))
        degrees = dataclasses.replace(degrees, rows=rows.astype(float))
        prices = price_many(question.job, degrees, machine, question.runtime.for_layout(question.base))
        fits = prices.peak <= question.usable * device.memory_bytes
        np.maximum.at(seconds, index, np.where(fits, prices.step_s, np.inf))
    return seconds


def _readers(question: Question, kinds: Sequence[Kind], layout: Layout) -> list[tuple[int, int]]:
    """The readers of a data layout that differ: rows of the batch if all were such, and the kind."""
    places, shares = places_of(kinds, layout.degree(Mechanics.MATRICES)), layout.shares()
    unit = question.job.rows // sum(shares) * len(shares)
    return sorted({(share * unit, place) for share, place in zip(shares, places or ())})


def why_unequal(question: Question, layout: Layout, choice: Choice) -> str:
    """Returns why a layout that the user names is worse than the plan, or doesn't fit.

    Raises:
        PlanError: when the layout can't be on these devices at all.
    """
    layout.check_ranks(question.cluster.devices)
    layout.check_batch(question.job.rows)
    kinds = kinds_of(question.cluster)
    piped = layout.degree(Mechanics.STAGES) > 1
    size = question.cluster.devices // layout.degree(Mechanics.STAGES) if piped else layout.degree(Mechanics.MATRICES)
    if places_of(kinds, size) is None:
        raise PlanError(f"its stages would lie on several kinds of device ({describe_kinds(question.cluster)})")
    question = dataclasses.replace(question, job=job_for(question.job, layout, question.cluster))
    check_host(question.job, layout, question.cluster, question.runtime)
    one = _candidate(question, kinds, layout)
    if one is None:
        return f"doesn't fit the device of some stage or reader ({describe_kinds(question.cluster)})"
    return f"fits, {format_seconds(one.price.step_s)} a step: {against(one, choice.best[0], question.same)}"


def _alone(question: Question, best: Candidate) -> tuple[str, ...]:
    """Says whether some kind by itself is faster than all together."""
    told = []
    by_kind: dict[str, list[int]] = {}
    for index, group in enumerate(question.cluster.groups):
        by_kind.setdefault(group.node.device.name, []).append(index)
    for name, indices in by_kind.items():
        part = question.cluster.subset(indices)
        try:
            single = choose(dataclasses.replace(question, cluster=part), 1).best[0]
        except PlanError:
            told.append(f"{part.devices}x{name} alone: nothing fits")
            continue
        ratio = single.price.step_s / best.price.step_s
        text = f"{part.devices}x{name} alone: {single.layout}, "
        if ratio < 1:
            others = ", ".join(other for other in by_kind if other != name)
            text += f"{1 - ratio:.0%} faster than all together: leave {others} out"
        else:
            text += f"{ratio - 1:.0%} slower than all together"
        told.append(text)
    return tuple(told)


def _candidate(question: Question, kinds: Sequence[Kind], layout: Layout) -> Candidate | None:
    """The layout with its price; None where it doesn't fit."""
    try:
        layout.check_batch(question.job.rows)
    except PlanError:
        return None
    found = unequal_price(question, kinds, layout)
    if found is None:
        return None
    tokens = question.job.rows * question.job.sequence
    dollars, watts = question.cluster.price_per_hour, question.cluster.watts
    return Candidate(
        layout=layout,
        price=found,
        tokens_per_s=tokens / found.step_s,
        cost_per_mtoken=None if dollars is None else dollars / 3600.0 * found.step_s / tokens * 1e6,
        joules_per_token=watts * found.step_s / tokens if watts else None,
    )


def unequal_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    """Returns what a layout takes on devices of several kinds; None where a stage or reader doesn't fit its device."""
    if layout.degree(Mechanics.STAGES) > 1:
        return _pipeline_price(question, kinds, layout)
    return _shared_price(question, kinds, layout)


def _pipeline_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    pp = layout.degree(Mechanics.STAGES)
    places = places_of(kinds, question.cluster.devices // pp)
    if places is None:
        return None
    prices = [price(question.job, layout, machine, question.runtime) for _, machine, _ in kinds]
    stages = [prices[place].stages[number] for number, place in enumerate(places)]
    if any(stage.peak > question.usable * kinds[place][0].memory_bytes for stage, place in zip(stages, places)):
        return None
    forward = np.array([[stage.forward_s for stage in stages]])
    backward = np.array([[stage.backward_s for stage in stages]])
    degrees = LayoutBatch.from_layouts([layout], len(question.job.shape.blocks))
    whole = float(makespan(degrees, forward, backward, backward / 2)[0])
    slow = max(prices, key=lambda item: sum(item.parts[name] for name in AFTER))
    after = {name: slow.parts[name] for name in AFTER}
    busiest = int(np.argmax(forward + backward))
    own = prices[places[busiest]]
    piped = {name: value for name, value in own.parts.items() if name not in AFTER}
    work = layout.microbatches * float((forward + backward)[0, busiest])
    scale = work / (sum(piped.values()) - piped["bubble"] or 1.0)
    parts = {name: value * scale for name, value in piped.items()} | {"bubble": max(0.0, whole - work)}
    return _summed(parts | after, stages, own)


def _shared_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    found: list[Price] = []
    plain = dataclasses.replace(layout, rows=BatchShares())
    for rows, place in _readers(question, kinds, layout):
        job: PricedJob = dataclasses.replace(question.job, rows=rows)
        one = price(job, plain, kinds[place][1], question.runtime)
        if one.peak > question.usable * kinds[place][0].memory_bytes:
            return None
        found.append(one)
    return max(found, key=lambda one: one.step_s) if found else None


def _summed(parts: dict[str, float], stages: Sequence[StagePrice], like: Price) -> Price:
    fullest = max(range(len(stages)), key=lambda at: stages[at].peak)
    values: dict[str, Any] = {
        "step_s": sum(parts.values()),
        "parts": parts,
        "stages": tuple(stages),
        "fullest": fullest,
        "memory": stages[fullest].memory,
        "peak": stages[fullest].peak,
        "host": max(stage.host for stage in stages),
    }
    return Price(**values)
