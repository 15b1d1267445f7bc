"""A layout with its price, and the choice among several: the plan, its runners-up, the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.cost.prices import Price
from meshwright.planner.rounds import Rounds
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

FINALISTS = 10
"""Layouts that are priced in full; the plan is one of them, however many are shown."""
MIN_MEMORY_SAVING = 0.01
"""Share of memory that a slower layout must save to stand on the Pareto front."""


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


def intricacy(layout: Layout) -> tuple[int, int, int, int, int]:
    """Returns a layout's complexity, what counts most first.

    (axes other than data axes + choices, ZeRO level above 1, ranks of its pipeline, ZeRO level, micro-batches): a
    shorter pipeline comes before a longer one without ZeRO-1, but not at the price of ZeRO-2 or 3.
    """
    axes = sum(known_axes()[name].mechanics is not Mechanics.NONE for name in layout.degrees)
    options = layout.recompute, layout.stages > 1, layout.offload != "none", layout.is_lossy
    further = layout.secondary, layout.tp_overlap, layout.ep_node, layout.ep_overlap, layout.ep_halves, layout.ep_keep
    choices, pipeline = axes + sum(map(bool, (*options, *further))), layout.degree(Mechanics.STAGES)
    return choices, max(0, layout.zero - 1), pipeline, layout.zero, layout.microbatches


def pareto_front(candidates: Sequence[Candidate]) -> tuple[tuple[float, float, str], ...]:
    """Returns the Pareto front of candidates: (seconds, bytes of the fullest rank, layout), fastest first."""
    lowest_peak, front = np.inf, []
    for option in sorted(candidates, key=lambda option: (option.price.step_s, option.price.peak)):
        if option.price.peak < lowest_peak * (1 - MIN_MEMORY_SAVING):
            lowest_peak = option.price.peak
            front.append((option.price.step_s, option.price.peak, str(option.layout)))
    return tuple(front)
