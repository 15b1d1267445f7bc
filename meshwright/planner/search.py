"""Searches a space for the fastest layouts that fit, best bound first (branch and bound); the result is exact.

Every core is priced once without recompute and without traffic between data ranks: a lower bound on the time of all
of its variants. Cores are expanded by rising bound, until the next bound is above the slowest layout that is kept.

State in host memory slows a layout down, so it pays only where the layout doesn't fit without, and everything that
fits is slower. A second pass searches these variants: its bounds include the least time of an update in host memory,
and it starts from the best time of the first pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob, array_fields, splits_backward
from meshwright.planner.cost.offload import HOST_USABLE, host_update_bound_s
from meshwright.planner.cost.pipeline_simulation import simulated_steps_s
from meshwright.planner.cost.price import bound_step_s, memory_by_recompute, price_many
from meshwright.planner.cost.prices import Prices
from meshwright.planner.fewest_recomputed import fewest_recomputed
from meshwright.planner.space import Space, cores, count, expand, leanest, lightest, variants_of_cores

FEASIBILITY_BATCH = 4000
"""Cores whose feasibility is checked at once."""
EXPANSION_BATCH = 200
"""Cores that are expanded and priced at first, before the limit is known; each batch has twice as many as the last."""
MOST_EXPANDED = 3200
"""Most cores of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best layouts of a search, and how many it considered, priced and refused."""

    best: tuple[LayoutBatch, Prices] | None
    """Layouts that fit, fastest first, with their prices; None where none fits."""
    considered: int
    """Layouts of the space."""
    priced: int
    """Of these, how many were priced; the others were pruned by their bound."""
    too_large: int
    """Of the priced, how many don't fit."""
    leanest: tuple[LayoutBatch, Prices] | None
    """Of those that don't fit, the one with the lowest peak memory; None where none was refused."""
    search_s: float
    """Seconds of the search."""


def search(
    job: PricedJob,
    space: Space,
    machine: Machine,
    engine: FrameworkProfile,
    memory_bytes: float,
    keep: int = 200,
    under: float = np.inf,
) -> SearchResult:
    """Returns the fastest layouts that fit: no other layout of the space is faster.

    Layouts that offload are among them only where they beat the best that doesn't.

    Args:
        job: model and batch.
        space: the bounds.
        machine: devices and links.
        engine: the runtime's profile.
        memory_bytes: that a layout may fill on each device.
        keep: number of layouts to return.
        under: seconds a step that the layouts may not exceed.

    Raises:
        PlanError: when the space is empty.
    """
    started_s = time.perf_counter()
    all_cores = cores(job, space)
    pool = _BestLayouts(keep, under)
    bounds = bound_step_s(job, lightest(space, all_cores), machine, engine)
    modes = offloads(space, machine)
    if not modes:
        raise PlanError(f"offload={space.offloads[0]}: the devices have no host memory for it; leave offload out")
    for group_index, group in enumerate(_offload_groups(modes)):
        is_first = group_index == 0
        if not is_first:
            pool.keep_only_faster_than(fastest_simulated_s(job, pool.best_batches, machine, engine))
        search_pass = _SearchPass(job, space, machine, engine, memory_bytes, pool, group, is_first)
        search_pass.run(all_cores, bounds)
    return SearchResult(
        best=_merge_best(pool.best_batches, keep),
        considered=count(job, space, all_cores) * len(modes),
        priced=pool.priced,
        too_large=pool.refused,
        leanest=pool.leanest_refused or min(pool.leanest_forms, key=lambda form: float(form[1].peak[0]), default=None),
        search_s=time.perf_counter() - started_s,
    )


def offloads(space: Space, machine: Machine) -> list[str]:
    """Returns the offload modes that a machine allows, "none" first."""
    return [mode for mode in space.offloads if mode == "none" or machine.host is not None]


def _offload_groups(modes: list[str]) -> list[tuple[str, ...]]:
    """Returns the offload modes of each search pass: "none" alone, then all others together."""
    offloading = tuple(mode for mode in modes if mode != "none")
    return [group for group in (("none",) * ("none" in modes), offloading) if group]


class _SearchPass:
    """One pass through the space, with some offload modes.

    Args:
        job: model and batch.
        space: the bounds.
        machine: devices and links.
        engine: the runtime's profile.
        memory_bytes: that a layout may fill on each device.
        pool: collects the best layouts of all passes.
        offloads: modes of this pass.
        is_first: False skips layouts that fit without offload: the pass before covered them.
    """

    def __init__(
        self,
        job: PricedJob,
        space: Space,
        machine: Machine,
        engine: FrameworkProfile,
        memory_bytes: float,
        pool: _BestLayouts,
        offloads: tuple[str, ...],
        is_first: bool,
    ) -> None:
        self._job, self._space, self._machine, self._engine = job, space, machine, engine
        self._memory_bytes, self._pool = memory_bytes, pool
        self._offloads, self._is_first = offloads, is_first
        self._host_bytes = HOST_USABLE * machine.host.memory_bytes if machine.host is not None else 0.0

    def run(self, all_cores: np.ndarray, bounds: Array) -> None:
        """Prices all layouts that may be among the best, and adds them to the pool.

        Args:
            all_cores: (n, 7) float64, rows of `cores`.
            bounds: (n,) float64, a lower bound on each core's seconds a step.
        """
        if self._offloads != ("none",):
            bounds = bounds + self._host_update_s(self._space.devices)
        for batch in self._promising_variants(all_cores, bounds):
            partly_recomputed = self._partial_recompute_variants(batch, self._price_and_offer(batch))
            if partly_recomputed is not None:
                self._price_and_offer(partly_recomputed)

    def _fits(self, batch: LayoutBatch, columns: Mapping[str, Array]) -> Array:
        """Returns (N,) bool: the layouts that fit, and in a second pass wouldn't fit without offload."""
        fits = columns["peak"] <= self._memory_bytes
        if self._offloads != ("none",):
            fits &= columns["host"] <= self._host_bytes
        if not self._is_first:
            fits &= columns["unoffloaded_peak"] > self._memory_bytes
        return np.asarray(fits)

    def _price_and_offer(self, batch: LayoutBatch) -> Prices:
        prices = price_many(self._job, batch, self._machine, self._engine, self._fits, self._pool.limit)
        self._pool.offer(batch, prices, self._is_first)
        return prices

    def _price_memory(self, batch: LayoutBatch) -> Prices:
        """Returns prices without time: no layout counts as feasible."""
        return price_many(self._job, batch, self._machine, self._engine, _fits_nowhere)

    def _promising_variants(self, all_cores: np.ndarray, bounds: Array) -> Iterator[LayoutBatch]:
        """Yields the variants of feasible cores by rising bound, until the next bound is above the pool's limit."""
        pool = self._pool
        order, batch_size = np.argsort(bounds, kind="stable"), EXPANSION_BATCH
        # The limit falls while batches are priced, so it is read again before each of them.
        for start in range(0, len(all_cores), FEASIBILITY_BATCH):
            core_indices = order[start : start + FEASIBILITY_BATCH]
            core_indices = core_indices[bounds[core_indices] <= pool.limit]
            if not len(core_indices):
                return
            core_indices = core_indices[self._select_feasible_cores(all_cores[core_indices])]
            while len(core_indices):
                chunk, core_indices = core_indices[:batch_size], core_indices[batch_size:]
                chunk = chunk[bounds[chunk] <= pool.limit]
                if not len(chunk):
                    return
                batch_size = min(2 * batch_size, MOST_EXPANDED)
                batch = self._expand_below_limit(all_cores[chunk], bounds[chunk])
                if batch.count:
                    yield batch

    def _expand_below_limit(self, core_rows: np.ndarray, bounds: Array) -> LayoutBatch:
        """Returns variants of cores (m, 7) whose bound with their own update in host memory is under the limit."""
        job, space = self._job, self._space
        batch = expand(job, space, core_rows, self._offloads)
        if self._offloads == ("none",):
            return batch
        variant_counts = [len(core_variants) for core_variants in variants_of_cores(job, space, core_rows)]
        # The bounds hold the update of parameters that all devices share; fewer ranks may share those of a variant.
        bounds = bounds - self._host_update_s(space.devices)
        core_bounds_s = np.tile(np.repeat(bounds, variant_counts), len(self._offloads))
        sharing_ranks = batch.pp * batch.tp * batch.cp * batch.shard
        return batch.take(core_bounds_s + self._host_update_s(sharing_ranks) <= self._pool.limit)

    def _host_update_s(self, ranks: Any) -> Any:
        """Returns the least seconds of an update in host memory that ``ranks``, scalar or (N,), share."""
        host = self._machine.host
        assert host is not None
        trained = 0 if self._job.adapters else self._job.shape.parameters
        return host_update_bound_s(trained, ranks, host, master_bytes(self._job.precision))

    def _select_feasible_cores(self, core_rows: np.ndarray) -> np.ndarray:
        """Returns (m,) bool: the cores of which some variant fits, by their leanest forms.

        Records the leanest form of all for the message of a search that finds nothing.
        """
        batch = leanest(self._job, self._space, core_rows, self._offloads)
        prices = self._price_memory(batch)
        if self._is_first:
            self._pool.leanest_forms.append(_select(batch, prices, np.array([int(np.argmin(prices.peak))])))
        fits = (prices.peak <= self._memory_bytes) & (prices.host <= self._host_bytes)
        return np.asarray(fits.reshape(-1, len(core_rows)).any(axis=0))

    def _partial_recompute_variants(self, batch: LayoutBatch, prices: Prices) -> LayoutBatch | None:
        """Returns variants with the fewest layers that recompute in one way; None where there are none.

        All other layers keep more: everything, or what selective recompute keeps. They come from variants that fit
        with every layer recomputed in the first way and don't with all in the second. Time rises with the layers that
        keep less, so the fewest that fit are the fastest.
        """
        modes = len(self._space.recomputes)
        eligible = np.flatnonzero(~splits_backward(batch.schedule))
        if modes < 2 or not len(eligible):
            return None
        # `expand` lists the recompute modes of a variant in a row: (variants, modes).
        peak_bytes = prices.peak[eligible].reshape(-1, modes)
        is_too_large = peak_bytes > self._memory_bytes
        # Of two modes the first doesn't fit and the second does: (variants, first, second).
        pairs = is_too_large[:, :, None] & ~is_too_large[:, None, :]
        # Codes rise with what layers recompute. One that recomputes more may need more while it does, and then all that
        # recompute less may fit alone: that is no pair.
        codes = batch.recompute[eligible[:modes]]
        rows, first, second = np.nonzero(pairs & (codes[:, None] < codes))
        if not len(rows):
            return None
        whole = batch.take(eligible[rows * modes + second])
        whole = dataclasses.replace(whole, recompute_rest=batch.recompute[eligible[rows * modes + first]])
        memory = memory_by_recompute(self._job, whole, self._machine, self._engine)
        layers, peaks = len(self._job.shape.blocks), (peak_bytes[rows, first], peak_bytes[rows, second])
        fewest = fewest_recomputed(memory, self._memory_bytes, layers, *peaks)
        is_partial = fewest < layers
        if not is_partial.any():
            return None
        return dataclasses.replace(whole.take(is_partial), recompute_share=fewest[is_partial] / layers)


def _fits_nowhere(batch: LayoutBatch, _memory: Mapping[str, Array]) -> Array:
    return np.zeros(batch.count, dtype=bool)


class _BestLayouts:
    """The best layouts of a search so far.

    Args:
        keep: how many layouts are kept.
        under: seconds above which no layout is kept.
    """

    def __init__(self, keep: int, under: float) -> None:
        self._keep, self._under = keep, under
        self._times = np.empty(0)
        self.best_batches: list[tuple[LayoutBatch, Prices]] = []
        self.priced = self.refused = 0
        self.leanest_refused: tuple[LayoutBatch, Prices] | None = None
        self.leanest_forms: list[tuple[LayoutBatch, Prices]] = []

    @property
    def limit(self) -> float:
        """Seconds above which no further layout is kept."""
        return float(self._times[self._keep - 1]) if len(self._times) >= self._keep else self._under

    def keep_only_faster_than(self, step_s: float) -> None:
        """Limits further layouts to those faster than the best so far."""
        self._under = min(self._under, step_s)
        self._times = self._times[:0]

    def offer(self, batch: LayoutBatch, prices: Prices, is_first: bool) -> None:
        """Keeps the layouts that fit and are among the best; the others' times are 0, or infinite above the limit.

        Args:
            batch: N layouts.
            prices: of the N layouts.
            is_first: layouts that don't fit count as refused; in a second pass they fit without offload.
        """
        fits = prices.step_s > 0
        self.priced += batch.count if is_first else int(fits.sum())
        self.refused += int((~fits).sum()) if is_first else 0
        lowest = int(np.argmin(prices.peak))
        if is_first and (self.leanest_refused is None or prices.peak[lowest] < self.leanest_refused[1].peak[0]):
            self.leanest_refused = _select(batch, prices, np.array([lowest]))
        kept_rows = np.flatnonzero(fits & (prices.step_s <= self.limit))
        kept_rows = kept_rows[np.argsort(prices.step_s[kept_rows], kind="stable")[: self._keep]]
        if len(kept_rows):
            self.best_batches.append(_select(batch, prices, kept_rows))
            self._times = np.sort(np.concatenate([self._times, prices.step_s[kept_rows]]))[: self._keep]


def fastest_simulated_s(
    job: PricedJob, chunks: list[tuple[LayoutBatch, Prices]], machine: Machine, engine: FrameworkProfile
) -> float:
    """Returns the least seconds of a step of layouts with their pipelines simulated; infinite without any.

    Args:
        job: model and batch.
        chunks: batches of layouts, with prices that are lower bounds.
        machine: devices and links.
        engine: the runtime's profile.
    """
    fastest_s = np.inf
    while chunks:
        nearest = min(chunks, key=lambda chunk: float(chunk[1].step_s[0]))
        batch, prices = nearest
        # Those whose bound is within a hundredth of the nearest's, and then further ones while they may be faster.
        limit = min(fastest_s, float(prices.step_s[0]) * 1.01)
        is_near = prices.step_s <= limit
        if not is_near.any():
            return fastest_s
        near = _select(batch, prices, np.flatnonzero(is_near))
        fastest_s = min(fastest_s, float(simulated_steps_s(job, near[0], near[1].step_s, machine, engine).min()))
        rest = np.flatnonzero(~is_near)
        chunks = [chunk for chunk in chunks if chunk is not nearest]
        chunks += [_select(batch, prices, rest)] if len(rest) else []
    return fastest_s


def _select(batch: LayoutBatch, prices: Prices, index: np.ndarray) -> tuple[LayoutBatch, Prices]:
    return batch.take(index), prices.take(index)


def _concatenate_prices(price_chunks: list[Prices], concatenate: Callable[[list[np.ndarray]], np.ndarray]) -> Prices:
    """Concatenates every array of several prices."""
    fields: dict[str, Any] = {}
    for name in Prices.__dataclass_fields__:
        sample = getattr(price_chunks[0], name)
        if isinstance(sample, Mapping):
            fields[name] = {key: concatenate([getattr(chunk, name)[key] for chunk in price_chunks]) for key in sample}
        else:
            fields[name] = concatenate([getattr(chunk, name) for chunk in price_chunks])
    return Prices(**fields)


def _merge_best(chunks: list[tuple[LayoutBatch, Prices]], limit: int) -> tuple[LayoutBatch, Prices] | None:
    if not chunks:
        return None
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(batch, name) for batch, _ in chunks]) for name in array_fields()
    }
    prices = _concatenate_prices([prices for _, prices in chunks], np.concatenate)
    order = np.argsort(prices.step_s, kind="stable")[:limit]
    return _select(LayoutBatch(**arrays), prices, order)
