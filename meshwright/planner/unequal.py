"""Plans for devices of several kinds: pipelines with uneven layers, or data layouts with uneven rows.

Ranks fill the cluster in order, and pp is the outermost axis, so a stage is a run of ranks; a stage, and with it tp,
stays inside one kind. Two families are searched: pipelines whose stages differ in layers, and data layouts whose
readers differ in rows. The best plan of each kind alone is compared with them: a slow device may slow all others down.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.candidate_prices import priced_candidate
from meshwright.planner.choose import choose
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.planner.cost.pipeline_simulation import simulated_parts, simulated_price_of
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.unequal_ranks import PricedRanks, UnequalRankTimes
from meshwright.planner.device_kinds import DeviceKinds, describe_kinds, kinds_of
from meshwright.planner.device_limits import check_host, job_for
from meshwright.planner.explain import against
from meshwright.planner.question import Question
from meshwright.planner.uneven_split import uneven_data_layouts, uneven_pipelines
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
        search_s=time.perf_counter() - started_s,
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


def _timed(question: Question, kinds: DeviceKinds) -> tuple[list[Layout], Array]:
    """Returns the N layouts of both families and their seconds a step, (N,) float64; inf where one doesn't fit."""
    layouts: list[Layout] = []
    seconds = [np.zeros(0)]
    for batch in (*uneven_pipelines(question, kinds), list(uneven_data_layouts(question, kinds))):
        layouts += batch
        seconds.append(_step_seconds(question, kinds, batch))
    return layouts, np.concatenate(seconds)


def _step_seconds(question: Question, kinds: DeviceKinds, layouts: Sequence[Layout]) -> Array:
    """Returns seconds a step of N layouts of equal pp, (N,) float64; inf where one doesn't fit."""
    seconds = np.full(len(layouts), -np.inf)
    for run in _priced_runs(question, kinds, layouts):
        np.maximum.at(seconds, run.layout_index, np.where(run.fits, run.step_s, np.inf))
    return np.where(np.isneginf(seconds), np.inf, seconds)


def _fastest_candidates(
    question: Question, kinds: DeviceKinds, layouts: Sequence[Layout], seconds: Array, show: int
) -> list[Candidate]:
    """Returns the ``show`` fastest layouts priced in full, fastest first; ``seconds`` is (N,) float64."""
    # A layout may be a rounding error slower here than priced alone, so ties with the last one are priced in full too.
    slowest_kept_s = np.sort(seconds)[:show][-1] if len(seconds) else 0.0
    kept_indices = np.flatnonzero(np.isfinite(seconds) & (seconds <= slowest_kept_s * (1 + ROUNDING_TOLERANCE)))
    candidates = [price_unequal(question, kinds, layouts[index]) for index in kept_indices.tolist()]
    return sorted(
        [candidate for candidate in candidates if candidate is not None], key=lambda candidate: candidate.price.step_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PricedRun:
    """Layouts, or readers of layouts, that are priced at once; a layout is as slow as its slowest reader."""

    ranks: PricedRanks
    """Their n times and memories."""
    layout_index: Array
    """Index of the layout that each belongs to, (n,) int64."""
    limits_bytes: Array
    """Bytes that each rank of pp may fill of its device, (P,)."""

    @property
    def step_s(self) -> Array:
        """Seconds a step, pipelines simulated, (n,)."""
        return np.asarray(sum(simulated_parts(self.ranks, False).values()))

    @property
    def fits(self) -> Array:
        """Whether every rank fits its device, (n,) bool."""
        return np.asarray((self.ranks.memory()["peak"] <= self.limits_bytes).all(axis=1))


def _priced_runs(question: Question, kinds: DeviceKinds, layouts: Sequence[Layout]) -> Iterator[_PricedRun]:
    """Yields the prices of N layouts with equally many stages; none of those that the batch's rows don't divide."""
    blocks, limits = len(question.job.shape.blocks), kinds.limits_bytes(question.usable_share)

    def price(batch: LayoutBatch, kind: int) -> RankTimes:
        engine = question.runtime.for_layout(layouts[0])
        return RankTimes(LayerCosts.of(question.job, batch, kinds.machines[kind], engine))

    indices = [index for index, layout in enumerate(layouts) if _divides_batch(question, layout)]
    if not indices:
        return
    pp = layouts[0].degree(Mechanics.STAGES)
    if pp > 1:
        stage_kinds = kinds.of_runs(question.cluster.devices // pp)
        if stage_kinds is not None:
            batch = LayoutBatch.from_layouts([layouts[index] for index in indices], blocks)
            ranks = UnequalRankTimes([price(batch, kind) for kind in range(len(kinds.machines))], stage_kinds)
            yield _PricedRun(ranks=ranks, layout_index=np.array(indices), limits_bytes=np.array(limits)[stage_kinds])
        return
    readers_by_kind: dict[int, list[tuple[int, int]]] = {}
    for index in indices:
        for rows, kind in _readers(question, kinds, layouts[index]):
            readers_by_kind.setdefault(kind, []).append((index, rows))
    for kind, index_and_rows in readers_by_kind.items():
        layout_index, rows = np.array(index_and_rows).T
        even_layouts = [dataclasses.replace(layouts[index], rows=BatchShares()) for index in layout_index]
        batch = dataclasses.replace(LayoutBatch.from_layouts(even_layouts, blocks), rows=rows.astype(float))
        yield _PricedRun(ranks=price(batch, kind), layout_index=layout_index, limits_bytes=np.array([limits[kind]]))


def _divides_batch(question: Question, layout: Layout) -> bool:
    try:
        layout.check_batch(question.job.rows)
    except PlanError:
        return False
    return True


def _readers(question: Question, kinds: DeviceKinds, layout: Layout) -> list[tuple[int, int]]:
    """Returns the distinct readers of a data layout: (batch rows if all readers were like it, index of the kind)."""
    shares = layout.reader_shares()
    reader_kinds = kinds.of_runs(layout.world // len(shares))
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
    if kinds.of_runs(ranks_per_run) is None:
        raise PlanError(f"its stages would lie on several kinds of device ({describe_kinds(question.cluster)})")
    question = dataclasses.replace(question, job=job_for(question.job, layout, question.cluster))
    check_host(question.job, layout, question.cluster, question.runtime)
    candidate = price_unequal(question, kinds, layout)
    if candidate is None:
        return f"doesn't fit the device of some stage or reader ({describe_kinds(question.cluster)})"
    comparison = against(candidate, choice.best[0], question.tie_tolerance)
    return f"fits, {format_seconds(candidate.price.step_s)} a step: {comparison}"


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


def price_layouts(question: Question, kinds: DeviceKinds, layouts: Sequence[Layout]) -> Array:
    """Returns seconds a step of any N layouts, (N,) float64; inf where one doesn't fit, or doesn't divide the batch."""
    indices_by_pp: dict[int, list[int]] = {}
    for index, layout in enumerate(layouts):
        indices_by_pp.setdefault(layout.degree(Mechanics.STAGES), []).append(index)
    seconds = np.full(len(layouts), np.inf)
    for indices in indices_by_pp.values():
        seconds[indices] = _step_seconds(question, kinds, [layouts[index] for index in indices])
    return seconds


def price_unequal(question: Question, kinds: DeviceKinds, layout: Layout) -> Candidate | None:
    """Returns the layout with the price of its slowest reader; None where a stage or reader doesn't fit its device."""
    runs = list(_priced_runs(question, kinds, [layout]))
    if not runs or not all(run.fits.all() for run in runs):
        return None
    prices = [simulated_price_of(run.ranks, reader) for run in runs for reader in range(len(run.layout_index))]
    return priced_candidate(question, layout, max(prices, key=lambda reader_price: reader_price.step_s))
