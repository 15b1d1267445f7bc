"""Finds the fastest layouts that fit: all of the space, in order of a bound that never drops the best.

Every core is priced once in its fastest form, which is a bound on all of its variants: nothing recomputed, and no
traffic between data ranks. Cores are then expanded from the lowest bound on, until the bound of the next one is above
the time of the last that is kept. What was skipped can't be among those.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.planner.cost.engine import Engine
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.job import Array, Degrees, Job
from meshwright.planner.cost.price import Holds, piped_many, price_many
from meshwright.planner.cost.prices import Prices
from meshwright.planner.kept import Kept, adjusted, extra_bytes
from meshwright.planner.space import Space, cores, expand, families, leanest, lightest, variants

CHECKED = 4000
"""Cores of which it is looked at a time whether anything fits."""
BATCH = 200
"""Cores that are expanded at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found."""

    best: tuple[Degrees, Prices] | None
    """Layouts that were priced and fit, fastest first, with their prices; None where none fits."""
    considered: int
    """Layouts of the space."""
    priced: int
    """Of these, how many were priced; the others' bound was above the last that is kept."""
    too_large: int
    """Of the priced, how many don't fit."""
    leanest: tuple[Degrees, Prices] | None
    """Of those that don't fit, the one that takes least; None where none was refused."""
    took_s: float
    """Seconds of the search."""


def search(
    job: Job,
    space: Space,
    machine: Machine,
    engine: Engine,
    memory_bytes: float,
    keep: int = 200,
    kept: Kept | None = None,
    under: float = np.inf,
) -> Found:
    """Returns the best layouts that fit, exactly: no layout of the space that isn't among them is faster.

    Args:
        job: model and batch.
        space: what may be chosen.
        machine: devices and wires.
        engine: the runtime's options.
        memory_bytes: that each device has for it.
        keep: how many of the best are returned.
        kept: activations as the modules keep them.
        under: seconds above which no layout is wanted.

    Raises:
        PlanError: when nothing in the space exists.
    """
    began = time.perf_counter()
    every = cores(job, space)

    def holds(degrees: Degrees, peak: Array, activations: Array) -> Array:
        return np.asarray(peak + extra_bytes(activations, degrees, kept, engine) <= memory_bytes)

    pool = _Pool(keep, memory_bytes, under)

    def offer(degrees: Degrees) -> Prices:
        prices = adjusted(price_many(job, degrees, machine, engine, holds, sent=False), degrees, kept, engine)
        pool.take(degrees, prices)
        return prices

    for degrees in _nearest(job, space, machine, engine, every, holds, pool):
        limit = pool.limit
        some = _partly(job, space, degrees, offer(degrees), memory_bytes, limit)
        if some is not None:
            offer(some)
    return Found(
        best=_best(pool.found, keep),
        considered=_count(job, space, every),
        priced=pool.priced,
        too_large=pool.refused,
        leanest=pool.lean or min(pool.forms, key=lambda lean: float(lean[1].peak[0]), default=None),
        took_s=time.perf_counter() - began,
    )


def _nearest(
    job: Job, space: Space, machine: Machine, engine: Engine, every: np.ndarray, holds: Holds, pool: _Pool
) -> Iterator[Degrees]:
    """Yields variants of the cores that may fit, lowest bounds first, until the next is above the pool's limit."""
    bounds = _bounds(job, space, machine, engine, every)
    order = np.argsort(bounds, kind="stable")
    for start in range(0, len(every), CHECKED):
        near = order[start : start + CHECKED]
        near = near[bounds[near] <= pool.limit]
        if not len(near):
            return
        fits, lean = _hopeful(job, space, machine, engine, every[near], holds)
        pool.forms.append(lean)
        near = near[fits]
        for at in range(0, len(near), BATCH):
            if bounds[near[at]] > pool.limit:
                return
            degrees = expand(job, space, every[near[at : at + BATCH]])
            if degrees.count:
                yield degrees


def _hopeful(
    job: Job, space: Space, machine: Machine, engine: Engine, rows: np.ndarray, holds: Holds
) -> tuple[np.ndarray, tuple[Degrees, Prices]]:
    """Returns of which cores some variant may fit, by their leanest forms; and the leanest of all."""
    degrees = leanest(job, space, rows)

    def never(some: Degrees, peak: Array, activations: Array) -> Array:
        return np.zeros(some.count, dtype=bool)

    prices = price_many(job, degrees, machine, engine, never)
    fits = holds(degrees, prices.peak, prices.memory["activations"]).reshape(2, -1).any(axis=0)
    return np.asarray(fits), _picked(degrees, prices, np.array([int(np.argmin(prices.peak))]))


class _Pool:
    """The best layouts so far.

    Args:
        keep: how many are kept.
        memory_bytes: what each may take.
        under: seconds above which none is taken.
    """

    def __init__(self, keep: int, memory_bytes: float, under: float) -> None:
        self._keep, self._memory_bytes, self._under = keep, memory_bytes, under
        self._times = np.empty(0)
        self.found: list[tuple[Degrees, Prices]] = []
        self.priced = self.refused = 0
        self.lean: tuple[Degrees, Prices] | None = None
        self.forms: list[tuple[Degrees, Prices]] = []

    @property
    def limit(self) -> float:
        """Seconds above which nothing is taken any more."""
        return float(self._times[self._keep - 1]) if len(self._times) >= self._keep else self._under

    def take(self, degrees: Degrees, prices: Prices) -> None:
        """Keeps those of the layouts that fit and are among the best."""
        fits = prices.peak <= self._memory_bytes
        self.priced += degrees.count
        self.refused += int((~fits).sum())
        least = int(np.argmin(prices.peak))
        if self.lean is None or prices.peak[least] < self.lean[1].peak[0]:
            self.lean = _picked(degrees, prices, np.array([least]))
        good = np.flatnonzero(fits & (prices.step_s <= self.limit))
        good = good[np.argsort(prices.step_s[good], kind="stable")[: self._keep]]
        if len(good):
            self.found.append(_picked(degrees, prices, good))
            self._times = np.sort(np.concatenate([self._times, prices.step_s[good]]))[: self._keep]


def _bounds(job: Job, space: Space, machine: Machine, engine: Engine, rows: np.ndarray) -> np.ndarray:
    """Seconds that no variant of each core is under."""
    return piped_many(job, lightest(space, rows), machine, engine)


def _partly(
    job: Job, space: Space, degrees: Degrees, prices: Prices, memory_bytes: float, limit: float
) -> Degrees | None:
    """Where nothing recomputed doesn't fit and all of it does: the fewest layers that have to be; None for nowhere.

    Time rises and memory falls in proportion to the layers that recompute, so the fewest that fit are the fastest. The
    time of what doesn't fit isn't known; where it is 0, nothing is dropped by it.
    """
    modes, layers = len(space.recomputes), len(job.shape.blocks)
    if space.recomputes[0] != "none" or modes < 2:
        return None
    peak, step = prices.peak.reshape(-1, modes), prices.step_s.reshape(-1, modes)
    rows, shares = [], []
    for mode in range(1, modes):
        open_ = (peak[:, 0] > memory_bytes) & (peak[:, mode] <= memory_bytes) & (step[:, 0] <= limit)
        at = np.flatnonzero(open_)
        spared = np.maximum(peak[at, 0] - peak[at, mode], 1.0)
        # What is recomputed at a time is held either way, so in between a little more is held than on the line.
        count = np.ceil((peak[at, 0] - memory_bytes) / spared * layers) + 1
        some = count < layers
        rows.append(at[some] * modes + mode)
        shares.append(count[some] / layers)
    index = np.concatenate(rows)
    if not len(index):
        return None
    return dataclasses.replace(degrees.take(index), recompute_share=np.concatenate(shares))


def _picked(degrees: Degrees, prices: Prices, index: np.ndarray) -> tuple[Degrees, Prices]:
    return degrees.take(index), prices.part(index)


def _each(pieces: list[Prices], made: Callable[[list[np.ndarray]], np.ndarray]) -> Prices:
    """Makes each array of prices out of those of several."""
    fields: dict[str, Any] = {}
    for name in Prices.__dataclass_fields__:
        first = getattr(pieces[0], name)
        if isinstance(first, Mapping):
            fields[name] = {key: made([getattr(one, name)[key] for one in pieces]) for key in first}
        else:
            fields[name] = made([getattr(one, name) for one in pieces])
    return Prices(**fields)


def _best(kept: list[tuple[Degrees, Prices]], keep: int) -> tuple[Degrees, Prices] | None:
    if not kept:
        return None
    names = [name for name in Degrees.__dataclass_fields__ if name != "splits"]
    arrays: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one, _ in kept]) for name in names}
    prices = _each([prices for _, prices in kept], np.concatenate)
    order = np.argsort(prices.step_s, kind="stable")[:keep]
    return _picked(Degrees(**arrays), prices, order)


def _count(job: Job, space: Space, rows: np.ndarray) -> int:
    """Number of layouts of the space."""
    firsts, lengths = families(rows)
    return sum(len(variants(job, space, core)) * int(length) for core, length in zip(firsts, lengths))
