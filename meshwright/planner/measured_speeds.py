"""Chooses a layout again for equal devices that compute at different speeds, as a run measured them.

Each rank's measured seconds give the factor on the device's rates at which the planner's price of its work is what it
took, whatever slows it down. At these factors the present layout and all others are priced by the same formulas: the
pipelines and data layouts of `planner.unequal`, whose layers and rows follow the speeds, and the best of the full
search, whose ranks share the work evenly and wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.choose import choose
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch
from meshwright.planner.cost.ranks import PASS_PARTS, RankTimes
from meshwright.planner.device_kinds import DeviceKinds, kinds_of_speeds
from meshwright.planner.question import Question
from meshwright.planner.unequal import ROUNDING_TOLERANCE, price_layouts, price_unequal
from meshwright.planner.uneven_split import split_over_ranks, uneven_data_layouts, uneven_pipelines
from meshwright.spec.axis import Mechanics
from meshwright.spec.balanced_shares import balanced_shares
from meshwright.spec.groups import coordinates
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, StageSplit

SPEED_STEP = 0.05
"""Speeds are rounded to multiples of this share of the fastest rank's: finer differences are the clock's."""
MAX_SPEED = 100.0
"""Most times the catalogued rates that a device is taken for: faster, its time is fixed costs alone."""
PACE_ROUNDS = 8
"""Most corrections of the common factor; each leaves a small part of the error, since most of a step scales with it."""
REFINEMENTS = 16
"""Most layers or rows that are moved one by one after a layout's work was split by speed."""
MAX_REFINED_STAGES = 16
"""Most stages whose layers are moved one by one: every two of them are tried."""
BEST = 10
"""Layouts that are returned, of which a model may refuse some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Freedom:
    """What may change about a layout."""

    degrees: bool = True
    """The degrees, and all that goes with them: micro-batches, ZeRO, schedule, recompute, split, rows."""
    split: bool = True
    """Without the degrees: the layers of each stage."""
    rows: bool = True
    """Without the degrees: the readers' shares of the rows."""
    pipelines: bool = True
    """Layouts with pipeline stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedChoice:
    """The layouts for measured speeds."""

    present_s: float
    """Priced seconds of a step under the present layout."""
    faster: tuple[Candidate, ...]
    """Other layouts that are priced below it, the fastest first; at most `BEST`."""
    speeds: tuple[float, ...]
    """Of each rank, as a share of the fastest's."""


def choose_at_speeds(question: Question, layout: Layout, busy_s: Sequence[float], freedom: Freedom) -> SpeedChoice:
    """Prices the present layout and others at measured speeds.

    Args:
        question: on equal devices.
        layout: the present one, without islands.
        busy_s: seconds of a step that each rank computed, above 0.
        freedom: what may change.

    Raises:
        PlanError: where the present layout has no price.
    """
    factors, shares = measured_speeds(question, layout, busy_s)
    kinds = kinds_of_speeds(question.cluster, factors)
    # It runs, so it fits, whatever the formulas say of its memory.
    (present,) = price_layouts(dataclasses.replace(question, usable=np.inf), kinds, [layout])
    layouts = _layouts(question, kinds, layout, freedom) if freedom.degrees else []
    layouts += moved_work(question, kinds, layout, freedom)
    others = [other for other in layouts if other != layout]
    seconds = price_layouts(question, kinds, others)
    fastest = [others[index] for index in np.argsort(seconds, kind="stable")[:BEST].tolist()]
    refined = [_refine(question, kinds, other, freedom) for other in fastest]
    # The two searches may name a layout twice, and refinement may end at the same.
    by_text = {str(other): price_unequal(question, kinds, other) for other in refined if other != layout}
    faster = [candidate for candidate in by_text.values() if candidate and candidate.price.step_s < present]
    faster.sort(key=lambda candidate: candidate.price.step_s)
    return SpeedChoice(present_s=float(present), faster=tuple(faster), speeds=shares)


def _refine(question: Question, kinds: DeviceKinds, layout: Layout, freedom: Freedom) -> Layout:
    """Returns the layout with single layers or rows moved between two ranks while that lowers its price.

    Work in proportion to speed is near the best, not at it: a few rows cost more each, and a pipeline has a bubble.
    """
    seconds = float(price_layouts(question, kinds, [layout])[0])
    for _ in range(REFINEMENTS):
        neighbours = list(_neighbours(question, kinds, layout, freedom))
        prices = price_layouts(question, kinds, neighbours)
        if not len(prices) or not prices.min() < seconds * (1.0 - ROUNDING_TOLERANCE):
            break
        layout, seconds = neighbours[int(prices.argmin())], float(prices.min())
    return layout


def _neighbours(question: Question, kinds: DeviceKinds, layout: Layout, freedom: Freedom) -> Iterator[Layout]:
    """Yields the layouts with one layer moved to another stage, or one row to another reader."""
    stages, readers = layout.degree(Mechanics.STAGES) * layout.stages_per_rank, layout.reader(0)[1]
    if layout.degree(Mechanics.STAGES) > 1:
        if stages <= MAX_REFINED_STAGES and layout.split and (freedom.degrees or freedom.split):
            for layers in _moved_by_one(list(layout.split.layers), list(range(stages))):
                yield dataclasses.replace(layout, split=StageSplit(tuple(layers)))
        return
    reader_kinds = kinds.of_runs(layout.world // readers)
    if readers > 1 and reader_kinds is not None and (freedom.degrees or freedom.rows):
        shares, rows = layout.reader_shares(), question.job.rows // layout.microbatches
        sizes = [rows * share // sum(shares) for share in shares]
        # Readers of equal speed and equal rows are alike.
        classes = [kind * (rows + 1) + size for kind, size in zip(reader_kinds, sizes)]
        for moved in _moved_by_one(sizes, classes):
            yield dataclasses.replace(layout, rows=BatchShares.of(moved))


def _moved_by_one(sizes: Sequence[int], classes: Sequence[int]) -> Iterator[list[int]]:
    """Yields sizes with one unit moved from one to another, once for each two classes; none falls below 1."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, name in enumerate(classes):
        first.setdefault(name, index)
        last[name] = index
    for giver, taker in itertools.product(first.values(), last.values()):
        if giver != taker and sizes[giver] > 1:
            moved = list(sizes)
            moved[giver] -= 1
            moved[taker] += 1
            yield moved


def measured_speeds(
    question: Question, layout: Layout, busy_s: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns each rank's factor on the device's rates, and its speed as a share of the fastest rank's.

    Args:
        question: on equal devices.
        layout: that the ranks have.
        busy_s: seconds of a step that each rank computed, above 0.
    """
    machine = question.machine
    priced_s = _compute_seconds(question, machine, layout)
    rates = [priced / busy for priced, busy in zip(priced_s, busy_s, strict=True)]
    shares = [max(SPEED_STEP, round(rate / max(rates) / SPEED_STEP) * SPEED_STEP) for rate in rates]
    # The common factor is that at which the rank that computed longest is priced as it was measured.
    slowest, factor = max(range(len(rates)), key=busy_s.__getitem__), max(rates)
    for _ in range(PACE_ROUNDS):
        factor = min(factor, MAX_SPEED)
        device = machine.device.scaled(factor * shares[slowest], machine.device.memory_bytes)
        slowed = dataclasses.replace(machine, device=device)
        factor *= _compute_seconds(question, slowed, layout)[slowest] / busy_s[slowest]
    factor = min(factor, MAX_SPEED)
    return tuple(factor * share for share in shares), tuple(shares)


def _compute_seconds(question: Question, machine: Machine, layout: Layout) -> list[float]:
    """Returns the priced seconds of a step that each rank computes: without traffic and bubble."""
    batch = LayoutBatch.from_layouts([dataclasses.replace(layout, rows=BatchShares())], len(question.job.shape.blocks))
    engine, shares = question.runtime.for_layout(layout), layout.reader_shares()
    names = [name for name in PASS_PARTS if name in ("matmul", "attention", "elementwise", "recompute")]
    by_share: dict[int, list[float]] = {}
    for share in set(shares):
        # As if all readers had so many rows.
        rows = np.array([question.job.rows * share * len(shares) / sum(shares)])
        ranks = RankTimes(LayerCosts.of(question.job, dataclasses.replace(batch, rows=rows), machine, engine))
        # Of each stage its own update, which of the other stages may take longer.
        updates_s = ranks.optimizer_parts()["optimizer"][0] + engine.runtime.host_step_s
        parts = [ranks.busy_parts(np.array([stage])) for stage in range(ranks.ranks)]
        by_share[share] = [
            sum(float(part[name][0]) for name in (*names, "host")) + float(update_s)
            for part, update_s in zip(parts, updates_s, strict=True)
        ]
    axis, is_pipelined = layout.axis(Mechanics.STAGES), layout.degree(Mechanics.STAGES) > 1
    stages = [coordinates(rank, layout.degrees)[axis] if is_pipelined else 0 for rank in range(layout.world)]
    return [by_share[shares[layout.reader(rank)[0]]][stage] for rank, stage in enumerate(stages)]


def _layouts(question: Question, kinds: DeviceKinds, layout: Layout, freedom: Freedom) -> list[Layout]:
    """Returns layouts of any degrees in the present one's precision: with uneven work, and the best with even work."""
    question = dataclasses.replace(question, base=Layout(precision=layout.precision))
    layouts = list(uneven_data_layouts(question, kinds))
    if freedom.pipelines:
        layouts += [pipeline for batch in uneven_pipelines(question, kinds) for pipeline in batch]
    groups = tuple(
        dataclasses.replace(group, node=dataclasses.replace(group.node, device=kinds.machines[-1].device))
        for group in question.cluster.groups
    )
    limits = {"offloads": ("none",)} | ({} if freedom.pipelines else {"fixed": {layout.axis(Mechanics.STAGES): 1}})
    slowed = dataclasses.replace(
        question, cluster=dataclasses.replace(question.cluster, groups=groups), limits=question.limits | limits
    )
    try:
        return layouts + [candidate.layout for candidate in choose(slowed).shown]
    except PlanError:  # nothing shares the work evenly: rows or layers don't divide
        return layouts


def moved_work(question: Question, kinds: DeviceKinds, layout: Layout, freedom: Freedom) -> list[Layout]:
    """Returns the layout with its layers or rows in proportion to the ranks' speeds, where they may and can be."""
    if layout.degree(Mechanics.STAGES) > 1:
        split = split_over_ranks(question, kinds, layout) if freedom.split else None
        return [dataclasses.replace(layout, split=split)] if split is not None else []
    readers, rows = layout.reader(0)[1], question.job.rows // layout.microbatches
    reader_kinds = kinds.of_runs(layout.world // readers)
    if not freedom.rows or readers == 1 or rows < readers or reader_kinds is None:
        return []
    costs = [1.0 / kinds.machines[kind].device.bandwidth_bytes_per_s for kind in reader_kinds]
    return [dataclasses.replace(layout, rows=BatchShares.of(balanced_shares(costs, [rows] * readers, rows)))]
