"""Simulates the pipelines of N layouts action by action, with the sends, gathers and sums of their stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.pipeline_floor import FILLING_ROUNDS, is_long, round_micro_batches, sends_of_cut
from meshwright.planner.cost.price import price_of
from meshwright.planner.cost.prices import Price
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.unequal_ranks import PricedRanks
from meshwright.schedules.array_makespan import ArraySchedule, StageSeconds
from meshwright.schedules.file import build_schedule
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

AFTER_SUMS = ("offload", "optimizer", "step", "stragglers")
"""Parts of a step after the last sum of gradients."""


def _compile(name: str, ranks: int, stages_per_rank: int, microbatches: int, splits: bool) -> ArraySchedule:
    schedule = build_schedule(name, ranks, stages_per_rank, microbatches)
    return ArraySchedule(schedule if splits else schedule.unsplit())


@lru_cache(maxsize=128)
def _compile_known(name: str, ranks: int, stages_per_rank: int, microbatches: int, splits: bool) -> ArraySchedule:
    return _compile(name, ranks, stages_per_rank, microbatches, splits)


def _makespan_s(
    name: str, ranks: int, stages_per_rank: int, microbatches: int, splits: bool, seconds: StageSeconds
) -> Array:
    """Returns seconds up to the end of all ranks' sums, (N,).

    Of a known schedule only as many micro-batches are simulated as it needs to fill: once full, each further round of
    as many micro-batches as there are ranks, or a few more, takes as long as the one before it.
    """
    if name not in known_schedules():
        return _compile(name, ranks, stages_per_rank, microbatches, splits).makespan_s(seconds)
    size, left_out = round_micro_batches(ranks, microbatches), max(0, microbatches // ranks - FILLING_ROUNDS)
    counts = [microbatches - left_out * size] + ([microbatches - (left_out + 1) * size] if left_out else [])
    simulated = [_compile_known(name, ranks, stages_per_rank, count, splits).makespan_s(seconds) for count in counts]
    return simulated[0] + left_out * (simulated[0] - simulated[1]) if left_out else simulated[0]


def stage_seconds(ranks: PricedRanks, index: Array) -> StageSeconds:
    """Returns the seconds of every stage of the layouts at an index, (n,), which share their cut."""
    cut, layouts = ranks.cut_of(int(index[0])), ranks.layouts.take(index)
    owners, count, sends = np.array(cut.owners), len(index), sends_of_cut(ranks, cut)
    forward, backward, weight, share = ranks.stage_passes(cut, index)
    inside_s, outside_s = (seconds[index][:, None] for seconds in ranks.hops_s())
    hop_s, none_s = np.where(sends.crosses, outside_s, inside_s) * np.array(sends.moves), np.zeros((count, 1))
    gather_s, reduce_s = (
        np.broadcast_to(wire.seconds, (ranks.count, ranks.ranks))[index] for wire in ranks.pipeline_traffic
    )
    is_late = (layouts.zero == 0)[:, None]
    return StageSeconds(
        forward=forward.T,
        backward=backward.T,
        weight=weight.T,
        split_action=np.full(count, ranks.engine.runtime.action_s),
        send_forward=np.concatenate([hop_s, none_s], axis=1).T,
        send_backward=np.concatenate([none_s, hop_s], axis=1).T,
        # A rank's gathers and sums divide among its stages as its parameters do.
        gather=(gather_s[:, owners] * share).T,
        reduce=np.where(is_late, 0.0, reduce_s[:, owners] * share).T,
        late_reduce=np.where(is_late, reduce_s, 0.0).T,
    )


def simulated_parts(ranks: PricedRanks, with_sends: bool = True) -> dict[str, Array]:
    """Returns seconds by part of `PARTS`, (N,) each, with pipelines simulated action by action.

    No step is shorter than its lower bound, which holds the bytes of every link. What the ranks themselves work to send
    and receive, and what the same actions take longer than with results that are there at once, is ``send``. What no
    part explains is ``bubble``.

    Args:
        ranks: of N layouts.
        with_sends: also simulate without waiting for sends, for what that takes; else it counts as ``bubble``.
    """
    parts = ranks.parts()
    if not ranks.is_simulated:
        return parts
    layouts = ranks.layouts
    is_whole = (layouts.recompute > 0) | (layouts.tp_overlap > 0) | (layouts.ep_halves > 0)
    splits = ~is_whole & ranks.job.splits_backward
    rows = np.stack([layouts.schedule, layouts.stages, layouts.microbatches, splits], axis=1)
    # Cuts differ only in their owners where every rank has one stage.
    cut_index = np.broadcast_to(ranks.cut_index, ranks.count)
    rows = np.concatenate([rows, np.where(layouts.stages > 1, cut_index, -1)[:, None]], axis=1)
    floor_s = np.asarray(sum(parts[name] for name in parts if name not in AFTER_SUMS))
    busy_s = floor_s - parts["bubble"]
    sums_s, exposed_s = floor_s.copy(), np.zeros(ranks.count)
    is_open = ~is_long(layouts)
    for row in np.unique(rows[is_open], axis=0):
        index = np.flatnonzero(is_open & (rows == row).all(axis=1))
        name = layouts.schedules[int(row[0])].name
        sizes = (name, ranks.ranks, int(row[1]), int(row[2]), bool(row[3]))
        seconds = stage_seconds(ranks, index)
        # What a user's own schedule idles is counted by stages that all take as long: no bound for stages that don't.
        bound_s = floor_s if name in known_schedules() else busy_s
        sums_s[index] = np.maximum(_makespan_s(*sizes, seconds), bound_s[index])
        if with_sends:
            free_s = _makespan_s(*sizes, seconds.without_sends())
            exposed_s[index] = np.maximum(sums_s[index] - np.maximum(free_s, busy_s[index]), 0.0)
    parts |= {"send": parts["send"] + exposed_s, "bubble": sums_s - busy_s - exposed_s}
    others_s = sum(seconds for name, seconds in parts.items() if name != "stragglers")
    return parts | {"stragglers": ranks.straggler_share() * others_s}


@lru_cache(maxsize=512)
def known_price(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> list[Price]:
    """Returns the list that holds a layout's price from when it is first computed, and is empty before."""
    return []


def simulated_prices(
    job: PricedJob, layouts: Sequence[Layout], machine: Machine, engine: FrameworkProfile
) -> list[Price]:
    """Returns the price of each layout; those with equally many pipeline ranks are priced at once.

    A plan compares its best layouts several times, so their prices are kept.

    Args:
        job: model and batch.
        layouts: any that fit the model.
        machine: the hardware.
        engine: the runtime's profile.
    """
    # A custom schedule's file may change.
    known = [
        known_price(job, layout, machine, engine) if layout.schedule in ("", *known_schedules()) else []
        for layout in layouts
    ]
    runs: dict[tuple[FrameworkProfile, int], list[int]] = {}
    for index, (layout, prices) in enumerate(zip(layouts, known)):
        if not prices:
            key = engine.for_layout(layout), layout.degree(Mechanics.STAGES)
            runs.setdefault(key, []).append(index)
    for (profile, _), indices in runs.items():
        batch = LayoutBatch.from_layouts([layouts[index] for index in indices], len(job.shape.blocks))
        ranks = RankTimes(LayerCosts.of(job, batch, machine, profile))
        parts_s = simulated_parts(ranks)
        for place, index in enumerate(indices):
            known[index][:] = [price_of(ranks, place, parts_s)]
    return [prices[0] for prices in known]


def simulated_price_of(ranks: PricedRanks, layout_index: int = 0) -> Price:
    """Returns the price of one of N layouts, its pipeline simulated action by action where it has one."""
    return price_of(ranks, layout_index, simulated_parts(ranks))


def simulated_steps_s(
    job: PricedJob, batch: LayoutBatch, steps_s: Array, machine: Machine, engine: FrameworkProfile
) -> Array:
    """Returns seconds a step of N layouts with their pipelines simulated, (N,).

    Args:
        job: model and batch.
        batch: N layouts.
        steps_s: lower bounds, as `price_many` returns them, (N,): the price where there is no pipeline.
        machine: the hardware.
        engine: the runtime's profile.
    """
    simulated_s = steps_s.copy()
    for pp in np.unique(batch.pp[batch.pp > 1]):
        index = np.flatnonzero(batch.pp == pp)
        parts = simulated_parts(RankTimes(LayerCosts.of(job, batch.take(index), machine, engine)), False)
        simulated_s[index] = sum(parts.values())
    return simulated_s
