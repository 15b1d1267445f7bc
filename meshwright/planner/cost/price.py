"""Prices layouts, one or thousands at once, by the same formulas over arrays (N,)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.array_types import Index
from meshwright.cluster.cluster import Cluster
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.prices import MEMORY, PARTS, Price, Prices, StagePrice
from meshwright.planner.cost.rank_bytes import MemoryByRecompute
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.unequal_ranks import PricedRanks
from meshwright.spec.layout import Layout

ROUNDING = 1e-9
"""Relative difference by which a bound may exceed what it bounds, as sums are rounded."""
BOUND_BATCH = 8000
"""Layouts that are bounded at once: their arrays stay in a core's cache."""
FeasibilityRule = Callable[[LayoutBatch, Mapping[str, Array]], Array]
"""Maps (N layouts, bytes of their fullest ranks by part, (N,) each, as `Prices` names them) to (N,) bool."""


def price(job: PricedJob, layout: Layout, cluster: Cluster | Machine, engine: FrameworkProfile = MESHWRIGHT) -> Price:
    """Returns the price of one layout.

    Args:
        job: model and batch.
        layout: any that fits the model.
        cluster: the hardware.
        engine: the runtime's profile.
    """
    machine = cluster if isinstance(cluster, Machine) else Machine.of(cluster)
    engine = engine.for_layout(layout)
    return price_of(
        RankTimes(LayerCosts.of(job, LayoutBatch.from_layouts([layout], len(job.shape.blocks)), machine, engine))
    )


def price_of(ranks: PricedRanks, layout_index: int = 0, parts_s: Mapping[str, Array] | None = None) -> Price:
    """Returns the price of one of N layouts.

    Args:
        ranks: times and memory of the N layouts' ranks.
        layout_index: which layout.
        parts_s: seconds by part, (N,) each, where they aren't those of the formulas (`PricedRanks.parts`).
    """
    parts_s = ranks.parts() if parts_s is None else parts_s
    parts = {name: float(values[layout_index]) for name, values in parts_s.items()}
    stages = _stage_prices(ranks, layout_index)
    fullest = max(range(len(stages)), key=lambda rank: stages[rank].peak)
    return Price(
        step_s=sum(parts.values()),
        parts=parts,
        stages=stages,
        fullest=fullest,
        memory=stages[fullest].memory,
        most=stages[fullest].most,
        peak=stages[fullest].peak,
        allocated=stages[fullest].allocated,
        host=max(stage.host for stage in stages),
    )


def _stage_prices(ranks: PricedRanks, layout_index: int) -> tuple[StagePrice, ...]:
    """Returns the price of each rank of one layout's pipeline."""
    cut, memory, most_bytes = ranks.cut_of(layout_index), ranks.memory(), ranks.most_bytes
    return tuple(
        StagePrice(
            layers=tuple(bounds for bounds, owner in zip(cut.bounds, cut.owners) if owner == rank),
            forward_s=float(ranks.forward[layout_index, rank]),
            backward_s=float(ranks.backward[layout_index, rank]),
            held=float(ranks.in_flight[layout_index, rank]),
            memory={name: float(memory[name][layout_index, rank]) for name in MEMORY},
            most={name: float(most_bytes[name][layout_index, rank]) for name in MEMORY if name in most_bytes},
            peak=float(memory["peak"][layout_index, rank]),
            allocated=float(memory["allocated"][layout_index, rank]),
            host=float(memory["host"][layout_index, rank]) if "host" in memory else 0.0,
        )
        for rank in range(ranks.ranks)
    )


def price_many(
    job: PricedJob,
    layouts: LayoutBatch,
    cluster: Cluster | Machine,
    engine: FrameworkProfile = MESHWRIGHT,
    is_feasible: FeasibilityRule | None = None,
    limit_s: float = np.inf,
) -> Prices:
    """Returns the prices of N layouts; layouts with equally many pipeline ranks are priced together.

    Args:
        job: model and batch.
        layouts: N layouts.
        cluster: the hardware.
        engine: the runtime's profile.
        is_feasible: selects layouts by their memory; the time of the others isn't priced and is 0.
        limit_s: seconds a step that matter; where compute alone takes longer the time is infinite.
    """
    machine = cluster if isinstance(cluster, Machine) else Machine.of(cluster)
    # Layouts with equal pp become one run of arrays (n, P); results are put back in the order of the argument.
    order = np.argsort(layouts.pp, kind="stable")
    layouts = layouts.take(order)
    costs = LayerCosts.of(job, layouts, machine, engine, timed=is_feasible is None)
    columns = _PriceColumns(layouts.count)
    for run, ranks in _by_pipeline_length(costs):
        columns.put_memory(run, ranks.memory())
    feasible = np.ones(layouts.count, bool)
    if is_feasible is not None:
        # Memory is cheap to price; time only where a layout fits.
        feasible = is_feasible(layouts, columns.memory)
        costs = LayerCosts.of(job, layouts.take(feasible), machine, engine) if feasible.any() else costs
    feasible_indices = np.flatnonzero(feasible)
    for run, ranks in _by_pipeline_length(costs) if len(feasible_indices) else ():
        near = ranks.compute_s() <= limit_s * (1.0 + ROUNDING)
        if not near.all():
            columns.parts["bubble"][feasible_indices[run][~near]] = np.inf
            if not near.any():
                continue
            ranks = RankTimes(ranks.costs.take(near))
        columns.put(columns.parts, feasible_indices[run][near], ranks.parts())
    return columns.prices(np.argsort(order))


def memory_by_recompute(
    job: PricedJob, layouts: LayoutBatch, machine: Machine, engine: FrameworkProfile
) -> Iterator[tuple[Array, MemoryByRecompute]]:
    """Yields (indices, memory) of layouts with equally many pipeline ranks, for any number of recomputed layers.

    Args:
        job: model and batch.
        layouts: N layouts, whose own share of recomputed layers doesn't matter.
        machine: the hardware.
        engine: the runtime's profile.
    """
    order = np.argsort(layouts.pp, kind="stable")
    costs = LayerCosts.of(job, layouts.take(order), machine, engine, timed=False)
    for run, ranks in _by_pipeline_length(costs):
        yield order[run], ranks.by_recompute


def bound_step_s(
    job: PricedJob, layouts: LayoutBatch, machine: Machine, engine: FrameworkProfile = MESHWRIGHT
) -> Array:
    """Returns seconds a step, (N,) float64, without data-parallel traffic and update.

    It is a lower bound on every layout that shares the state in another way.

    Args:
        job: model and batch.
        layouts: N layouts.
        machine: the hardware.
        engine: the runtime's profile.
    """
    # A variant that scatters every micro-batch's gradients adds up fewer of them.
    engine = engine.with_options(runtime__accumulate_bytes=0.0)
    order = np.argsort(layouts.pp, kind="stable")
    step_s = np.empty(layouts.count)
    costs = LayerCosts.of(job, layouts.take(order), machine, engine)
    for run, ranks in _by_pipeline_length(costs, BOUND_BATCH):
        step_s[order[run]] = ranks.bound_s()
    nodes = np.maximum(layouts.world / machine.node_devices, 1.0)
    return (step_s + engine.runtime.host_step_s) * (1.0 + engine.runtime.straggler_share(nodes))


def _by_pipeline_length(costs: LayerCosts, most: int = 0) -> Iterator[tuple[slice, RankTimes]]:
    """Yields (slice, ranks) of each run of layouts with equal pp, in parts of ``most``; they are sorted by pp."""
    pp = costs.model.layouts.pp
    starts = [0, *(np.flatnonzero(np.diff(pp)) + 1).tolist(), len(pp)]
    if most:
        starts = [part for run in pairwise(starts) for part in range(*run, most)] + [len(pp)]
    if len(starts) == 2:
        yield slice(0, len(pp)), RankTimes(costs)
        return
    for start, stop in pairwise(starts):
        yield slice(start, stop), RankTimes(costs.take(slice(start, stop)))


class _PriceColumns:
    """Prices of N layouts, filled run by run.

    Args:
        count: N.
    """

    def __init__(self, count: int) -> None:
        self.parts = {name: np.zeros(count) for name in PARTS}
        names = (
            "allocated",
            "reserved",
            "peak",
            "first_allocated",
            "first_reserved",
            "fullest",
            "host",
            "unoffloaded_peak",
        )
        self.memory = {name: np.zeros(count) for name in (*MEMORY, *names)}

    def put(self, columns: dict[str, Array], index: Index, values: dict[str, Array]) -> None:
        """Writes some layouts' figures by name."""
        for name, figure in values.items():
            columns[name][index] = figure

    def put_memory(self, index: Index, memory: dict[str, Array]) -> None:
        """Writes the bytes of the fullest rank and of the first; ``memory`` is (n, P) by part."""
        fullest = np.argmax(memory["peak"], axis=1)
        self.put(
            self.memory, index, {name: values[np.arange(len(fullest)), fullest] for name, values in memory.items()}
        )
        for name in ("host", "unoffloaded_peak"):
            if name in memory:
                self.memory[name][index] = memory[name].max(axis=1)
        first = {f"first_{name}": memory[name][:, 0] for name in ("allocated", "reserved")}
        self.put(self.memory, index, first | {"fullest": fullest.astype(float)})

    def prices(self, order: Array) -> Prices:
        """Returns the prices in the order of ``order``, (N,) int64."""
        totals = {name: values[order] for name, values in self.memory.items() if name not in MEMORY}
        parts = {name: values[order] for name, values in self.parts.items()}
        step: Any = sum(parts.values())
        return Prices(
            step_s=np.asarray(step),
            parts=parts,
            memory={name: self.memory[name][order] for name in MEMORY},
            **totals,
        )
