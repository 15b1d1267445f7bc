"""Plans for devices of several kinds: pipelines with uneven layers, or data layouts with uneven rows.

Ranks fill the cluster in order, and pp is the outermost axis, so a stage is a run of ranks; a stage, and with it tp,
stays inside one kind. Two families are searched: pipelines whose stages differ in layers, and data layouts whose
readers differ in rows. The best plan of each kind alone is compared with them: a slow device may slow all others down.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.choose import AFTER_PIPELINE, Candidate, Choice, Question, choose
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

ROUNDING_TOLERANCE = 1e-9
"""Relative difference of two sums of the same times in another order."""


def choose_unequal(question: Question, show: int = 10) -> Choice:
    """Searches both families on all devices, and each kind alone.

    Args:
        question: its cluster has devices of several kinds.
        show: most layouts in the answer.

    Raises:
        PlanError: when nothing fits, or the question limits choices that neither family has.
    """
    started_s, kinds = time.perf_counter(), kinds_of(question.cluster)
    _refuse_limits(question)
    layouts, seconds = _timed(question, kinds)
    candidates = _fastest_candidates(question, kinds, layouts, seconds, show)
    if not candidates:
        names = " and ".join(question.cluster.kinds)
        raise PlanError(
            f"no layout over {names} together fits {question.job.shape.name}: stages and readers would each have to "
            "lie on one kind, and their ranks must divide every kind's; nearest that works: one kind alone, "
            + " or ".join(f"--cluster {count}x{name}" for name, count in question.cluster.kinds.items())
        )
    best = tuple(candidates[:show])
    return Choice(
        best=best,
        ties=1,
        front=tuple((candidate.price.step_s, candidate.price.peak, str(candidate.layout)) for candidate in best[:1]),
        considered=len(layouts),
        priced=len(layouts),
        too_large=int(np.isinf(seconds).sum()),
        took_s=time.perf_counter() - started_s,
        notes=_compare_single_kinds(question, best[0]),
    )


def _refuse_limits(question: Question) -> None:
    """Refuses limits on the layouts, which the two families would ignore."""
    for field, option in (("fixed", "--fix"), ("levels", "--fix zero"), ("schedules", "--schedules")):
        if limit := question.limits.get(field):
            raise PlanError(
                f"{option} ({limit}): on devices of several kinds pipelines of one schedule and data layouts are "
                "searched, whatever is given; name whole layouts by --layout, or plan for one kind"
            )


def _timed(question: Question, kinds: Sequence[Kind]) -> tuple[list[Layout], Array]:
    """Returns the N layouts of both families and their seconds a step, (N,) float64; inf where one doesn't fit."""
    layouts: list[Layout] = []
    seconds = [np.zeros(0)]
    for batch in pipelines(question, kinds):
        layouts += batch
        seconds.append(_pipelines_s(question, kinds, batch))
    data_layouts = list(shared(question, kinds))
    return layouts + data_layouts, np.concatenate([*seconds, _shared_s(question, kinds, data_layouts)])


def _fastest_candidates(
    question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout], seconds: Array, show: int
) -> list[Candidate]:
    """Returns the ``show`` fastest layouts priced in full, fastest first; ``seconds`` is (N,) float64."""
    # A layout may be a rounding error slower here than priced alone, so ties with the last one are priced in full too.
    slowest_kept_s = np.sort(seconds)[:show][-1] if len(seconds) else 0.0
    kept_indices = np.flatnonzero(np.isfinite(seconds) & (seconds <= slowest_kept_s * (1 + ROUNDING_TOLERANCE)))
    candidates = [_candidate(question, kinds, layouts[index]) for index in kept_indices.tolist()]
    return sorted(
        [candidate for candidate in candidates if candidate is not None], key=lambda candidate: candidate.price.step_s
    )


def _pipelines_s(question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout]) -> Array:
    """Returns seconds a step, (N,) float64, of N pipelines that fit and have equally many stages (P).

    They equal `_pipeline_price` of each.
    """
    if not layouts:
        return np.zeros(0)
    pp, blocks = layouts[0].degree(Mechanics.STAGES), len(question.job.shape.blocks)
    stage_kinds = places_of(kinds, question.cluster.devices // pp)
    batch = LayoutBatch.from_layouts(layouts, blocks)
    forward, backward = np.empty((len(layouts), pp)), np.empty((len(layouts), pp))
    after_pipeline_s = np.zeros(len(layouts))
    engine = question.runtime.for_layout(question.base)
    for kind, (_, machine, _) in enumerate(kinds):
        # Price all stages on this kind, and keep the columns of the stages that lie on it.
        times = RankTimes(LayerCosts.of(question.job, batch, machine, engine))
        is_of_kind = np.array(stage_kinds) == kind
        forward[:, is_of_kind], backward[:, is_of_kind] = times.forward[:, is_of_kind], times.backward[:, is_of_kind]
        after_pipeline_s = np.maximum(after_pipeline_s, sum(times.ending().values()))
    busiest_stage_s = batch.microbatches * (forward + backward).max(axis=1)
    pipeline_s = makespan(batch, forward, backward, backward / 2)
    return np.asarray(np.maximum(pipeline_s, busiest_stage_s) + after_pipeline_s + question.runtime.runtime.host_step_s)


def _shared_s(question: Question, kinds: Sequence[Kind], layouts: Sequence[Layout]) -> Array:
    """Returns seconds a step of N data layouts, (N,) float64; inf where a reader doesn't fit.

    They equal `_shared_price` of each.
    """
    seconds = np.full(len(layouts), -np.inf)
    readers_by_kind: dict[int, list[tuple[int, int]]] = {}
    for index, layout in enumerate(layouts):
        try:
            layout.check_batch(question.job.rows)
        except PlanError:
            seconds[index] = np.inf
            continue
        for rows, kind in _readers(question, kinds, layout):
            readers_by_kind.setdefault(kind, []).append((index, rows))
    for kind, index_and_rows in readers_by_kind.items():
        device, machine, _ = kinds[kind]
        layout_indices, rows = np.array(index_and_rows).T
        even_layouts = [dataclasses.replace(layouts[index], rows="") for index in layout_indices]
        batch = LayoutBatch.from_layouts(even_layouts, len(question.job.shape.blocks))
        batch = dataclasses.replace(batch, rows=rows.astype(float))
        prices = price_many(question.job, batch, machine, question.runtime.for_layout(question.base))
        fits = prices.peak <= question.usable * device.memory_bytes
        np.maximum.at(seconds, layout_indices, np.where(fits, prices.step_s, np.inf))
    return seconds


def _readers(question: Question, kinds: Sequence[Kind], layout: Layout) -> list[tuple[int, int]]:
    """Returns the distinct readers of a data layout: (batch rows if all readers were like it, index of the kind)."""
    reader_kinds, shares = places_of(kinds, layout.degree(Mechanics.MATRICES)), layout.reader_shares()
    rows_per_share = question.job.rows // sum(shares) * len(shares)
    return sorted({(share * rows_per_share, kind) for share, kind in zip(shares, reader_kinds or ())})


def why_unequal(question: Question, layout: Layout, choice: Choice) -> str:
    """Returns why a layout that the user named is worse than the plan, or doesn't fit.

    Raises:
        PlanError: when the layout isn't possible on these devices.
    """
    layout.check_ranks(question.cluster.devices)
    layout.check_batch(question.job.rows)
    kinds = kinds_of(question.cluster)
    is_pipelined = layout.degree(Mechanics.STAGES) > 1
    ranks_per_run = (
        question.cluster.devices // layout.degree(Mechanics.STAGES)
        if is_pipelined
        else layout.degree(Mechanics.MATRICES)
    )
    if places_of(kinds, ranks_per_run) is None:
        raise PlanError(f"its stages would lie on several kinds of device ({describe_kinds(question.cluster)})")
    question = dataclasses.replace(question, job=job_for(question.job, layout, question.cluster))
    check_host(question.job, layout, question.cluster, question.runtime)
    candidate = _candidate(question, kinds, layout)
    if candidate is None:
        return f"doesn't fit the device of some stage or reader ({describe_kinds(question.cluster)})"
    return f"fits, {format_seconds(candidate.price.step_s)} a step: {against(candidate, choice.best[0], question.same)}"


def _compare_single_kinds(question: Question, best: Candidate) -> tuple[str, ...]:
    """Returns a sentence for each kind of device: its best plan alone, compared with the plan for all."""
    sentences = []
    by_kind: dict[str, list[int]] = {}
    for index, group in enumerate(question.cluster.groups):
        by_kind.setdefault(group.node.device.name, []).append(index)
    for name, indices in by_kind.items():
        cluster = question.cluster.subset(indices)
        try:
            best_alone = choose(dataclasses.replace(question, cluster=cluster), 1).best[0]
        except PlanError:
            sentences.append(f"{cluster.devices}x{name} alone: nothing fits")
            continue
        ratio = best_alone.price.step_s / best.price.step_s
        sentence = f"{cluster.devices}x{name} alone: {best_alone.layout}, "
        if ratio < 1:
            other_names = ", ".join(other_name for other_name in by_kind if other_name != name)
            sentence += f"{1 - ratio:.0%} faster than all together: leave {other_names} out"
        else:
            sentence += f"{ratio - 1:.0%} slower than all together"
        sentences.append(sentence)
    return tuple(sentences)


def _candidate(question: Question, kinds: Sequence[Kind], layout: Layout) -> Candidate | None:
    """Returns the layout with its price; None where it doesn't fit."""
    try:
        layout.check_batch(question.job.rows)
    except PlanError:
        return None
    layout_price = unequal_price(question, kinds, layout)
    if layout_price is None:
        return None
    tokens = question.job.rows * question.job.sequence
    dollars, watts = question.cluster.price_per_hour, question.cluster.watts
    return Candidate(
        layout=layout,
        price=layout_price,
        tokens_per_s=tokens / layout_price.step_s,
        cost_per_mtoken=None if dollars is None else dollars / 3600.0 * layout_price.step_s / tokens * 1e6,
        joules_per_token=watts * layout_price.step_s / tokens if watts else None,
    )


def unequal_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    """Returns a layout's price on devices of several kinds; None where a stage or reader doesn't fit its device."""
    if layout.degree(Mechanics.STAGES) > 1:
        return _pipeline_price(question, kinds, layout)
    return _shared_price(question, kinds, layout)


def _pipeline_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    """Prices a pipeline whose stages lie on several kinds; None where a stage doesn't fit."""
    pp = layout.degree(Mechanics.STAGES)
    stage_kinds = places_of(kinds, question.cluster.devices // pp)
    if stage_kinds is None:
        return None
    prices = [price(question.job, layout, machine, question.runtime) for _, machine, _ in kinds]
    stages = [prices[kind].stages[stage_index] for stage_index, kind in enumerate(stage_kinds)]
    if any(stage.peak > question.usable * kinds[kind][0].memory_bytes for stage, kind in zip(stages, stage_kinds)):
        return None
    forward = np.array([[stage.forward_s for stage in stages]])
    backward = np.array([[stage.backward_s for stage in stages]])
    batch = LayoutBatch.from_layouts([layout], len(question.job.shape.blocks))
    makespan_s = float(makespan(batch, forward, backward, backward / 2)[0])
    slowest = max(prices, key=lambda item: sum(item.parts[name] for name in AFTER_PIPELINE))
    after_pipeline = {name: slowest.parts[name] for name in AFTER_PIPELINE}
    busiest = int(np.argmax(forward + backward))
    busiest_price = prices[stage_kinds[busiest]]
    pipeline_parts = {name: value for name, value in busiest_price.parts.items() if name not in AFTER_PIPELINE}
    busy_s = layout.microbatches * float((forward + backward)[0, busiest])
    # Split the busiest stage's seconds into parts in the proportions of the same layout on that stage's kind alone.
    scale = busy_s / (sum(pipeline_parts.values()) - pipeline_parts["bubble"] or 1.0)
    parts = {name: value * scale for name, value in pipeline_parts.items()} | {"bubble": max(0.0, makespan_s - busy_s)}
    return _price_of_parts(parts | after_pipeline, stages, busiest_price)


def _shared_price(question: Question, kinds: Sequence[Kind], layout: Layout) -> Price | None:
    """Prices a data layout by its slowest reader; None where a reader doesn't fit."""
    reader_prices: list[Price] = []
    even_layout = dataclasses.replace(layout, rows=BatchShares())
    for rows, kind in _readers(question, kinds, layout):
        job: PricedJob = dataclasses.replace(question.job, rows=rows)
        reader_price = price(job, even_layout, kinds[kind][1], question.runtime)
        if reader_price.peak > question.usable * kinds[kind][0].memory_bytes:
            return None
        reader_prices.append(reader_price)
    return max(reader_prices, key=lambda reader_price: reader_price.step_s) if reader_prices else None


def _price_of_parts(parts: dict[str, float], stages: Sequence[StagePrice], like: Price) -> Price:
    fullest = max(range(len(stages)), key=lambda stage_index: stages[stage_index].peak)
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
