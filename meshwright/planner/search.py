"""Finds the fastest layouts that fit: all of the space, in order of a bound that never drops the best.

Every core is priced once in its fastest form, which is a bound on all of its variants: nothing recomputed, and no
traffic between data ranks. Cores are then expanded from the lowest bound on, until the bound of the next one is above
the time of the last that is kept. What was skipped can't be among those.

State in host memory makes a layout slower, so it pays only where the layout doesn't fit without and all that do are
slower. It is looked for afterwards: among cores whose bound, with the least that an update in host memory takes, is
under the best time so far, and there among the variants that don't fit otherwise.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.activation_bytes import ActivationBytes, adjusted, extra_bytes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob, array_fields, splits
from meshwright.planner.cost.offload import HOST_USABLE, least_seconds, wide_bytes
from meshwright.planner.cost.price import piped_many, price_many
from meshwright.planner.cost.prices import Prices
from meshwright.planner.space import Space, cores, count, expand, leanest, lightest, variants

CHECKED = 4000
"""Cores of which it is looked at a time whether anything fits."""
BATCH = 200
"""Cores that are expanded at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search found."""

    best: tuple[LayoutBatch, Prices] | None
    """Layouts that were priced and fit, fastest first, with their prices; None where none fits."""
    considered: int
    """Layouts of the space."""
    priced: int
    """Of these, how many were priced; the others' bound was above the last that is kept."""
    too_large: int
    """Of the priced, how many don't fit."""
    leanest: tuple[LayoutBatch, Prices] | None
    """Of those that don't fit, the one that takes least; None where none was refused."""
    took_s: float
    """Seconds of the search."""


def search(
    job: PricedJob,
    space: Space,
    machine: Machine,
    engine: FrameworkProfile,
    memory_bytes: float,
    keep: int = 200,
    kept: ActivationBytes | None = None,
    under: float = np.inf,
) -> SearchResult:
    """Returns the best layouts that fit, exactly: no layout of the space that isn't among them is faster.

    Layouts that offload are among them only where they are faster than the best that doesn't.

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
    pool = _Pool(keep, under)
    bounds = piped_many(job, lightest(space, every), machine, engine)
    modes = offloads(space, machine)
    if not modes:
        raise PlanError(f"offload={space.offloads[0]}: the devices have no host memory for it; leave offload out")
    for at, group in enumerate(_groups(modes)):
        pool.limit_to_faster(at > 0)
        _Look(job, space, machine, engine, memory_bytes, kept, pool, group, first=at == 0).through(every, bounds)
    return SearchResult(
        best=_best(pool.found, keep),
        considered=count(job, space, every) * len(modes),
        priced=pool.priced,
        too_large=pool.refused,
        leanest=pool.lean or min(pool.forms, key=lambda lean: float(lean[1].peak[0]), default=None),
        took_s=time.perf_counter() - began,
    )


def offloads(space: Space, machine: Machine) -> list[str]:
    """Returns what may lie in host memory on a machine, nothing first."""
    return [mode for mode in space.offloads if mode == "none" or machine.host is not None]


def _groups(modes: list[str]) -> list[tuple[str, ...]]:
    """What is looked for at once: nothing in host memory first, then everything that may be."""
    rest = tuple(mode for mode in modes if mode != "none")
    return [group for group in (("none",) * ("none" in modes), rest) if group]


class _Look:
    """A look through the space with parts of the state in host memory, or none.

    Args:
        job: model and batch.
        space: what may be chosen.
        machine: devices and wires.
        engine: the runtime's options.
        memory_bytes: that each device has.
        kept: activations as the modules keep them.
        pool: takes what is found.
        offloads: which part: one of these.
        first: nothing was looked for before; else what fits without is known, and goes before.
    """

    def __init__(
        self,
        job: PricedJob,
        space: Space,
        machine: Machine,
        engine: FrameworkProfile,
        memory_bytes: float,
        kept: ActivationBytes | None,
        pool: _Pool,
        offloads: tuple[str, ...],
        first: bool,
    ) -> None:
        self._job, self._space, self._machine, self._engine = job, space, machine, engine
        self._memory_bytes, self._kept, self._pool, self._offloads = memory_bytes, kept, pool, offloads
        self._first = first
        self._host_bytes = HOST_USABLE * machine.host.memory_bytes if machine.host is not None else 0.0

    def through(self, every: np.ndarray, bounds: Array) -> None:
        """Offers the pool all layouts that may be among the best.

        Args:
            every: (n, 7) rows of `cores`.
            bounds: seconds that no variant of each is under.
        """
        pool = self._pool
        if self._offloads != ("none",):
            bounds = bounds + self._updated_s(self._space.devices)
        for degrees in self._nearest(every, bounds):
            limit = pool.limit
            some = self._partly(degrees, self._offer(degrees), limit)
            if some is not None:
                self._offer(some)

    def _fits(self, degrees: LayoutBatch, columns: Mapping[str, Array]) -> Array:
        """Which layouts fit, and wouldn't without what they offload."""
        more = extra_bytes(columns["activations"], degrees, self._kept, self._engine)
        fits = columns["peak"] + more <= self._memory_bytes
        if self._offloads != ("none",):
            fits &= columns["host"] <= self._host_bytes
        if not self._first:
            fits &= columns["whole"] + more > self._memory_bytes
        return np.asarray(fits)

    def _offer(self, degrees: LayoutBatch) -> Prices:
        job, machine, engine, kept = self._job, self._machine, self._engine, self._kept
        prices = price_many(job, degrees, machine, engine, self._fits)
        prices = adjusted(prices, degrees, kept, engine)
        self._pool.take(degrees, prices, self._first)
        return prices

    def _nearest(self, every: np.ndarray, bounds: Array) -> Iterator[LayoutBatch]:
        """Yields variants of the cores that may fit, lowest bounds first, until the next is above the pool's limit."""
        pool = self._pool
        order = np.argsort(bounds, kind="stable")
        for start in range(0, len(every), CHECKED):
            near = order[start : start + CHECKED]
            near = near[bounds[near] <= pool.limit]
            if not len(near):
                return
            near = near[self._hopeful(every[near])]
            for at in range(0, len(near), BATCH):
                if bounds[near[at]] > pool.limit:
                    return
                degrees = self._expanded(every[near[at : at + BATCH]], bounds[near[at : at + BATCH]])
                if degrees.count:
                    yield degrees

    def _expanded(self, rows: np.ndarray, bounds: Array) -> LayoutBatch:
        """Variants of some cores; of those that offload, the ones that their update doesn't put above the limit."""
        job, space = self._job, self._space
        degrees = expand(job, space, rows, self._offloads)
        if self._offloads == ("none",):
            return degrees
        counts = [len(variants(job, space, core)) for core in rows]
        cores_s = np.tile(np.repeat(bounds, counts), len(self._offloads)) - self._updated_s(space.devices)
        sharing = degrees.pp * degrees.tp * degrees.cp * degrees.shard
        return degrees.take(cores_s + self._updated_s(sharing) <= self._pool.limit)

    def _updated_s(self, ranks: Any) -> Any:
        """Seconds that an update in host memory takes at least, where so many ranks share the parameters."""
        host = self._machine.host
        assert host is not None
        trained = 0 if self._job.adapters else self._job.shape.parameters
        return least_seconds(trained, ranks, host, wide_bytes(self._job.precision))

    def _hopeful(self, rows: np.ndarray) -> np.ndarray:
        """Returns of which cores some variant may fit, by their leanest forms; keeps the leanest of all."""
        degrees = leanest(self._job, self._space, rows, self._offloads)

        def never(some: LayoutBatch, columns: Mapping[str, Array]) -> Array:
            return np.zeros(some.count, dtype=bool)

        prices = price_many(self._job, degrees, self._machine, self._engine, never)
        if self._first:
            self._pool.forms.append(_picked(degrees, prices, np.array([int(np.argmin(prices.peak))])))
        more = extra_bytes(prices.memory["activations"], degrees, self._kept, self._engine)
        fits = (prices.peak + more <= self._memory_bytes) & (prices.host <= self._host_bytes)
        return np.asarray(fits.reshape(-1, len(rows)).any(axis=0))

    def _partly(self, degrees: LayoutBatch, prices: Prices, limit: float) -> LayoutBatch | None:
        """Where nothing recomputed doesn't fit and all of it does: the fewest layers that have to, and one more.

        None for nowhere.

        Time rises and memory falls in proportion to the layers that recompute, so the fewest that fit are the fastest.
        The time of what doesn't fit isn't known; where it is 0, nothing is dropped by it.
        """
        space, memory_bytes = self._space, self._memory_bytes
        modes, layers = len(space.recomputes), len(self._job.shape.blocks)
        if space.recomputes[0] != "none" or modes < 2:
            return None
        several = np.flatnonzero(~splits(degrees.schedule))
        peak, step = prices.peak[several].reshape(-1, modes), prices.step_s[several].reshape(-1, modes)
        rows, shares = [], []
        for mode in range(1, modes):
            open_ = (peak[:, 0] > memory_bytes) & (peak[:, mode] <= memory_bytes) & (step[:, 0] <= limit)
            at = np.flatnonzero(open_)
            spared = np.maximum(peak[at, 0] - peak[at, mode], 1.0)
            least = np.ceil((peak[at, 0] - memory_bytes) / spared * layers)
            # What is recomputed at a time is held either way, so in between a little more may be held than on the line.
            for number in (least, least + 1):
                some = number < layers
                rows.append(several[at[some] * modes + mode])
                shares.append(number[some] / layers)
        index = np.concatenate(rows)
        if not len(index):
            return None
        return dataclasses.replace(degrees.take(index), recompute_share=np.concatenate(shares))


class _Pool:
    """The best layouts so far.

    Args:
        keep: how many are kept.
        under: seconds above which none is taken.
    """

    def __init__(self, keep: int, under: float) -> None:
        self._keep, self._under = keep, under
        self._times = np.empty(0)
        self.found: list[tuple[LayoutBatch, Prices]] = []
        self.priced = self.refused = 0
        self.lean: tuple[LayoutBatch, Prices] | None = None
        self.forms: list[tuple[LayoutBatch, Prices]] = []

    @property
    def limit(self) -> float:
        """Seconds above which nothing is taken any more."""
        return float(self._times[self._keep - 1]) if len(self._times) >= self._keep else self._under

    def limit_to_faster(self, whether: bool) -> None:
        """From here on takes only what is faster than the best so far, if ``whether``."""
        if whether and len(self._times):
            self._under = min(self._under, float(self._times[0]))
            self._times = self._times[:0]

    def take(self, degrees: LayoutBatch, prices: Prices, first: bool) -> None:
        """Keeps those of the layouts that fit, of which alone the time is known, and are among the best.

        Args:
            degrees: the layouts.
            prices: of them.
            first: what doesn't fit counts as refused; else it may fit otherwise.
        """
        fits = prices.step_s > 0
        self.priced += degrees.count if first else int(fits.sum())
        self.refused += int((~fits).sum()) if first else 0
        least = int(np.argmin(prices.peak))
        if first and (self.lean is None or prices.peak[least] < self.lean[1].peak[0]):
            self.lean = _picked(degrees, prices, np.array([least]))
        good = np.flatnonzero(fits & (prices.step_s <= self.limit))
        good = good[np.argsort(prices.step_s[good], kind="stable")[: self._keep]]
        if len(good):
            self.found.append(_picked(degrees, prices, good))
            self._times = np.sort(np.concatenate([self._times, prices.step_s[good]]))[: self._keep]


def _picked(degrees: LayoutBatch, prices: Prices, index: np.ndarray) -> tuple[LayoutBatch, Prices]:
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


def _best(kept: list[tuple[LayoutBatch, Prices]], keep: int) -> tuple[LayoutBatch, Prices] | None:
    if not kept:
        return None
    arrays: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one, _ in kept]) for name in array_fields()}
    prices = _each([prices for _, prices in kept], np.concatenate)
    order = np.argsort(prices.step_s, kind="stable")[:keep]
    return _picked(LayoutBatch(**arrays), prices, order)
