"""Which layouts there are to choose from: every degree, schedule and micro-batch that model, batch and runtime allow.

A layout is enumerated in two steps, so that a bound can drop most of the second: a *core* says how the model is cut
and scheduled; its *variants* say how the ranks that read other rows share the state, and what is recomputed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.cost.axis_columns import (
    COPIES,
    SHARDS,
    column_degrees,
    column_of,
    named_degrees,
    priced_columns,
)
from meshwright.planner.cost.layout_batch import RECOMPUTES, LayoutBatch, PricedJob, schedule_names, splits
from meshwright.schedules.spec import known_schedules, searched_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.layout import OFFLOADS, Layout
from meshwright.spec.layout_choices import Recompute

CORE = ("pp", "cp", "tp", "ep", "microbatches", "schedule", "stages")
"""Columns of a core."""
VARIANT = (COPIES, SHARDS, "zero", "recompute")
"""Columns that its variants add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be chosen; every field is a bound that can be told to a user."""

    devices: int
    """Ranks, all of them used."""
    domain: int
    """Devices within which tp stays: a node, or a fast domain of several."""
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Degrees that are given, by axis."""
    levels: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels."""
    schedules: tuple[str, ...] = dataclasses.field(default_factory=searched_schedules)
    """Of pipelines."""
    chunks: int = 8
    """Most stages of a rank."""
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """What layers recompute."""
    sequence: bool = True
    """Whether tp splits the tokens between the parts that it divides, which holds less for the same traffic."""
    axes: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(known_axes()))
    """Axes that may be used. Of several that cost the same the first is, and the others where they are given."""
    offloads: tuple[str, ...] = OFFLOADS
    """What may lie in host memory; looked at are those that could be faster than all without."""

    def given(self, column: str) -> int | None:
        """Returns the product of the degrees that are given of a column's axes; None where none is."""
        found = [self.fixed[name] for name in self.fixed if name in known_axes() and column_of(name) == column]
        return math.prod(found) if found else None

    def allows(self, column: str) -> bool:
        """Whether some axis of a column may be used."""
        columns = priced_columns()
        return any(columns.get(name) == column for name in self.axes)

    def recomputes_under(self, schedule: str) -> tuple[str, ...]:
        """Returns what layers may recompute under a schedule: nothing where it splits the backward.

        Layers that recompute run their backward whole (`Layout.unsplit`), and the schedule would gain nothing.
        """
        if known_schedules()[schedule].splits_backward:
            return tuple(mode for mode in self.recomputes if mode == "none")
        return self.recomputes


def divisors(number: int) -> list[int]:
    """Returns all divisors, smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def cores(job: PricedJob, space: Space) -> np.ndarray:
    """Returns every core as a row of (pp, cp, tp, ep, micro-batches, schedule, stages of a rank).

    Raises:
        PlanError: when there is none; says which rule leaves none.
    """
    found: list[tuple[int, ...]] = []
    orders: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for pp, cp, tp in _degrees(job, space):
        data = space.devices // (pp * cp * tp)
        tails = []
        for micro in _microbatches(job, space, data):
            if (pp, micro) not in orders:
                orders[pp, micro] = [(micro, *order) for order in _orders(job, space, pp, micro)]
            tails += orders[pp, micro]
        for ep in _experts(job, space, data, cp, tp):
            found += [(pp, cp, tp, ep, *tail) for tail in tails]
    if not found:
        raise PlanError(_why_none(job, space))
    return np.array(found, dtype=float)


def _degrees(job: PricedJob, space: Space) -> Iterator[tuple[int, int, int]]:
    shape, every = job.shape, divisors(space.devices)
    heads = min(block.heads for block in shape.blocks if block.heads) if any(b.heads for b in shape.blocks) else 0
    for tp in _allowed("tp", every, space):
        if tp > space.domain or (tp > 1 and space.given("tp") is None and heads and heads % tp):
            continue
        for cp in _allowed("cp", every, space):
            parts = tp * cp * (2 if cp > 1 else 1)
            if (tp * cp > 1 and job.sequence % parts) or space.devices % (tp * cp):
                continue
            for pp in _allowed("pp", every, space):
                if pp <= len(shape.blocks) and space.devices % (tp * cp * pp) == 0:
                    yield pp, cp, tp


def _allowed(column: str, every: Sequence[int], space: Space) -> list[int]:
    given = space.given(column)
    if given is not None:
        return [given]
    return list(every) if space.allows(column) else [1]


def _experts(job: PricedJob, space: Space, data: int, cp: int, tp: int) -> list[int]:
    """Degrees of ep: it spreads the experts over ranks of shard, cp and tp, of which shard may be all of data."""
    experts = job.shape.experts
    if not experts:
        return [1]
    room = data * cp * tp
    options = _allowed("ep", divisors(experts), space)
    return [ep for ep in options if room % ep == 0 and experts % ep == 0]


def _microbatches(job: PricedJob, space: Space, data: int) -> list[int]:
    copies, every_copy, shards, every_shard = _given_rows(tuple(space.fixed.items()))
    if job.rows % data or data % (every_copy * every_shard) or (copies and shards and data != copies * shards):
        return []
    if "microbatches" in space.fixed:
        micro = space.fixed["microbatches"]
        return [micro] if (job.rows // data) % micro == 0 else []
    return divisors(job.rows // data)


def _orders(job: PricedJob, space: Space, pp: int, micro: int) -> Iterator[tuple[int, int]]:
    """(code of the schedule, stages of a rank)."""
    if pp == 1:
        yield 0, 1
        return
    codes = {name: code for code, name in enumerate(schedule_names())}
    for name in space.schedules:
        if not space.recomputes_under(name):
            continue
        spec = known_schedules()[name]
        most = spec.most_stages or space.chunks
        for chunks in range(spec.least_stages, most + 1):
            if pp * chunks > len(job.shape.blocks) or (chunks > 1 and spec.least_stages == 1):
                break
            if len(job.shape.blocks) % (pp * chunks) and chunks > 2:
                continue
            try:
                spec.check(pp, chunks, micro)
            except PlanError:
                continue
            yield codes[name], chunks


def variants(job: PricedJob, space: Space, core: Sequence[float]) -> tuple[tuple[int, int, int, int], ...]:
    """Returns (replicate, shard, ZeRO level, recompute) of every variant of a core."""
    pp, cp, tp, ep = (int(value) for value in core[:4])
    data = space.devices // (pp * cp * tp)
    given = _given_rows(tuple(space.fixed.items()))
    if given[2:] == (0, 1) and not space.allows(SHARDS):
        given = (*given[:2], 1, 1)
    names = space.recomputes_under(schedule_names()[int(core[5])])
    modes = tuple(RECOMPUTES.index(mode) for mode in names)
    return _variants(data, cp * tp, ep, job.shape.experts, given, space.levels, modes)


@lru_cache(maxsize=64)
def _given_rows(fixed: tuple[tuple[str, int], ...]) -> tuple[int, int, int, int]:
    """What is given of copies, 0 where their first axis is free, and what divides them; the same of shards."""
    found: list[int] = []
    for column in (COPIES, SHARDS):
        names = [name for name, other in priced_columns().items() if other == column]
        product = math.prod(degree for name, degree in fixed if name in names)
        found += [product if names[0] in dict(fixed) else 0, product]
    return found[0], found[1], found[2], found[3]


@lru_cache(maxsize=1 << 14)
def _variants(
    data: int,
    block: int,
    ep: int,
    experts: int,
    given: tuple[int, int, int, int],
    levels: tuple[int, ...],
    modes: tuple[int, ...],
) -> tuple[tuple[int, int, int, int], ...]:
    """Variants of cores with ``data`` readers of ``block`` ranks each; ``given`` is of `_given_rows`."""
    copies, every_copy, shards, every_shard = given
    found: list[tuple[int, int, int, int]] = []
    for shard in divisors(data):
        if shards not in (0, shard) or copies not in (0, data // shard) or (shard * block) % ep:
            continue
        if shard % every_shard or data // shard % every_copy:
            continue
        if experts and not _experts_shard(experts, shard, block, ep):
            continue
        found += [
            (data // shard, shard, level, mode) for level in levels if (level > 0) == (shard > 1) for mode in modes
        ]
    return tuple(found)


def _experts_shard(experts: int, shard: int, block: int, ep: int) -> bool:
    """Whether the experts of a rank can be dealt out over the ranks of their shards, at least one each.

    Shards are rows of a weight, and an experts' weight has a row for each: with more ranks than rows most would hold
    nothing, and gather as if all held as much as the fullest.
    """
    ranks = shard * block // ep if ep > 1 else shard
    return shard == 1 or ranks <= max(1, experts // ep)


def families(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns runs of cores with the same degrees, whose variants share the state alike: a core of each, their lengths.

    Args:
        chosen: (n, 7) rows of `cores`.
    """
    starts = np.flatnonzero(np.append(True, (chosen[1:, :4] != chosen[:-1, :4]).any(axis=1))[: len(chosen)])
    return chosen[starts], np.diff(np.append(starts, len(chosen)))


def count(job: PricedJob, space: Space, every: np.ndarray) -> int:
    """Returns the number of layouts that have one of some cores.

    Args:
        job: model and batch.
        space: what may be chosen.
        every: (n, 7) rows of `cores`.
    """
    firsts, lengths = families(every)
    halved = np.add.reduceat(splits(every[:, CORE.index("schedule")]), np.cumsum(lengths) - lengths, dtype=int)
    found, nothing = 0, int("none" in space.recomputes)
    for core, length, some in zip(firsts, lengths.tolist(), halved.tolist()):
        modes = len(space.recomputes_under(schedule_names()[int(core[CORE.index("schedule")])]))
        found += len(variants(job, space, core)) // modes * (some * nothing + (length - some) * len(space.recomputes))
    return found


def expand(job: PricedJob, space: Space, chosen: np.ndarray, offloads: Sequence[str] = ("none",)) -> LayoutBatch:
    """Returns all variants of some cores as arrays of layouts.

    Args:
        job: model and batch.
        space: what may be chosen.
        chosen: (n, 7) rows of `cores`.
        offloads: each of them with all variants, one after the other.
    """
    rows: list[np.ndarray] = []
    tails: list[tuple[int, int, int, int]] = []
    for core in chosen:
        made = variants(job, space, core)
        rows.append(np.repeat(core[None, :], len(made), axis=0))
        tails += made
    whole = np.concatenate(rows) if rows else np.zeros((0, len(CORE)))
    columns = dict(zip(CORE, whole.T)) | dict(zip(VARIANT, np.array(tails, dtype=float).reshape(-1, 4).T))
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    columns = {name: np.tile(values, len(offloads)) for name, values in columns.items()}
    columns["offload"] = np.repeat([float(OFFLOADS.index(one)) for one in offloads], len(whole))
    return LayoutBatch.of(columns)


def lightest(space: Space, chosen: np.ndarray) -> LayoutBatch:
    """Returns cores as layouts whose data ranks hold copies, for a bound on all of their variants."""
    columns = dict(zip(CORE, chosen.T))
    columns[COPIES] = space.devices / (columns["pp"] * columns["cp"] * columns["tp"])
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    return LayoutBatch.of(columns)


def leanest(job: PricedJob, space: Space, chosen: np.ndarray, offloads: Sequence[str] = ("none",)) -> LayoutBatch:
    """Returns cores in a few forms of which one takes least memory, all of the first form, then all of the second, ...

    Everything is recomputed and the state sharded as far as it goes, at the lowest and at the highest ZeRO level: a
    higher level holds less of the state and may gather more at a time, so the least is at one of the ends. Where
    parameters lie in host memory, copies may hold less than shards that arrive together: they are a third form.
    """
    levels = [level for level in space.levels if level] or [0]
    ends = (min(levels), max(levels))
    forms = [(OFFLOADS.index(one), level) for one in offloads for level in (*ends, *((0,) * (one == "parameters")))]
    columns = {name: np.tile(values, len(forms)) for name, values in zip(CORE, chosen.T)}
    data = space.devices / (columns["pp"] * columns["cp"] * columns["tp"])
    firsts, lengths = families(chosen)
    shard = np.tile(np.repeat([_widest(job, space, core) for core in firsts], lengths), len(forms))
    level = np.repeat([level for _, level in forms], len(chosen))
    alone = (shard == 1) | (level == 0)
    columns[SHARDS] = np.where(alone, 1, shard)
    columns[COPIES] = data / columns[SHARDS]
    columns["zero"] = np.where(alone, 0, level)
    most = max(RECOMPUTES.index(mode) for mode in space.recomputes)
    columns["recompute"] = np.where(splits(columns["schedule"]), 0, most)
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    columns["offload"] = np.repeat([float(one) for one, _ in forms], len(chosen))
    return LayoutBatch.of(columns)


def _widest(job: PricedJob, space: Space, core: Sequence[float]) -> int:
    """The most ranks over which a core's state may be sharded."""
    found = variants(job, space, core)  # by rising degrees of shard
    return found[-1][1] if found else 1


def layout_of(
    degrees: LayoutBatch, at: int, base: Layout, layers: int, fixed: Mapping[str, int] = MappingProxyType({})
) -> Layout:
    """Returns one of many layouts as a `Layout`.

    Args:
        degrees: arrays of layouts.
        at: which one.
        base: what every layout shares.
        layers: of the model.
        fixed: `Space.fixed`: which axes the degrees are of.
    """
    sizes = {name: int(getattr(degrees, name)[at]) for name in dict.fromkeys(priced_columns().values())}
    mode, share = RECOMPUTES[int(degrees.recompute[at])], float(degrees.recompute_share[at])
    count = round(share * layers) if share < 1.0 and mode != "none" else 0
    spec = degrees.schedules[int(degrees.schedule[at])]
    chunks = int(degrees.stages[at])
    piped = sizes["pp"] > 1
    return dataclasses.replace(
        base,
        degrees=named_degrees(fixed, **sizes),
        zero=int(degrees.zero[at]),
        microbatches=int(degrees.microbatches[at]),
        recompute=Recompute(mode, count),
        schedule=spec.name if piped else "",
        stages=chunks if piped and chunks != spec.least_stages else 0,
        sequence=bool(degrees.sequence[at]) and sizes["tp"] > 1,
        offload=OFFLOADS[int(degrees.offload[at])],
    )


def contains(job: PricedJob, space: Space, every: np.ndarray, base: Layout, layout: Layout) -> bool:
    """Whether a layout is one of the space.

    Args:
        job: model and batch.
        space: what may be chosen.
        every: (n, 7) rows of `cores`.
        base: what every layout shares.
        layout: any; how many of its layers recompute is free.
    """
    sizes, mode = column_degrees(layout), layout.recompute.mode
    piped = sizes["pp"] > 1
    name = (layout.schedule or schedule_names()[0]) if piped else schedule_names()[0]
    if name not in schedule_names() or mode not in space.recomputes or layout.offload not in space.offloads:
        return False
    if layout.degrees != Layout(degrees=named_degrees(space.fixed, **sizes), zero=layout.zero).degrees:
        return False
    core = [sizes[column] for column in CORE if column in sizes]
    core += [layout.microbatches, schedule_names().index(name), layout.stages_per_rank if piped else 1]
    variant = (sizes[COPIES], sizes[SHARDS], layout.zero, RECOMPUTES.index(mode))
    if not (every == np.array(core, dtype=float)).all(axis=1).any() or variant not in variants(job, space, core):
        return False
    chosen = ("degrees", "zero", "microbatches", "recompute", "schedule", "stages", "offload")
    free = {name: getattr(layout, name) for name in chosen}
    return layout == dataclasses.replace(base, sequence=sizes["tp"] > 1 and space.sequence, **free)


def _why_none(job: PricedJob, space: Space) -> str:
    most = max(size for size in divisors(space.devices) if job.rows % size == 0)
    if space.fixed:
        told = ", ".join(f"{axis}={degree}" for axis, degree in space.fixed.items())
        return (
            f"no layout of {space.devices} devices has {told} with a batch of {job.rows} rows: degrees must divide the "
            f"devices, and what is left of them the rows; nearest that works: drop one of them"
        )
    return (
        f"a batch of {job.rows} rows can't be shared by {space.devices} devices: at most {most} of them can read "
        f"other rows, and the model's {len(job.shape.blocks)} layers and heads don't take up the rest; nearest that "
        f"works: a batch of {space.devices} rows, or {most} devices"
    )
