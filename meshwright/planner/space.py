# long: cores, their variants and what is left out are one enumeration
"""Enumerates the layouts to choose from: every degree, schedule and micro-batch that model, batch and runtime allow.

The enumeration has two steps, so that a bound can prune most of the second: a *core* fixes how the model is cut and
scheduled, its *variants* how the data ranks share the state and what is recomputed.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from meshwright.planner.cost.layout_batch import RECOMPUTES, LayoutBatch, PricedJob, schedule_names, splits_backward
from meshwright.schedules.spec import known_schedules, searched_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.layer_graph import END_STAGES
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.layout_fields import OFFLOADS

CORE = ("pp", "cp", "tp", "ep", "microbatches", "schedule", "stages")
"""Columns of a core, in the order of a row of `cores`."""
VARIANT = (COPIES, SHARDS, "zero", "recompute")
"""Columns that a core's variants add."""

MOST_UNEVEN = 1.25
"""Most layers that a pipeline of more than two stages a rank would have if all stages were its largest, over those that
it has: 126 layers in 64 stages have 128."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The bounds of a search; every field can be reported to a user."""

    devices: int
    """Ranks, all of them used."""
    domain: int
    """Devices within which tp stays: a node, or a fast domain of several."""
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Degrees that the user fixed, by axis."""
    levels: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels."""
    schedules: tuple[str, ...] = dataclasses.field(default_factory=searched_schedules)
    """Names of the pipeline schedules."""
    chunks: int = 8
    """Most stages of a rank, where the schedule sets no limit."""
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """What layers recompute."""
    sequence: bool = True
    """Whether tp also splits tokens outside its linears (sequence parallelism): less memory for the same traffic."""
    axes: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(known_axes()))
    """Axes that may be used. Of several with the same cost only the first is searched, the others where fixed."""
    offloads: tuple[str, ...] = OFFLOADS
    """State that may lie in host memory; searched only where it could beat every layout without."""
    expert_nodes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """`Layout.ep_node` of each degree of ep; 0 of others."""

    def fixed_degree(self, column: str) -> int | None:
        """Returns the product of the fixed degrees of a column's axes; None where no axis of it is fixed."""
        fixed_degrees = [self.fixed[name] for name in self.fixed if name in known_axes() and column_of(name) == column]
        return math.prod(fixed_degrees) if fixed_degrees else None

    def allows(self, column: str) -> bool:
        """Whether some axis of a column may be used."""
        columns = priced_columns()
        return any(columns.get(name) == column for name in self.axes)

    def recomputes_under(self, schedule: str) -> tuple[str, ...]:
        """Returns the recompute modes that a schedule allows: only "none" where it splits the backward."""
        # Layers that recompute run their backward in one piece (`Layout.unsplit_backward_reason`): no gain.
        if known_schedules()[schedule].splits_backward:
            return tuple(mode for mode in self.recomputes if mode == "none")
        return self.recomputes

    def expert_node(self, ep: np.ndarray) -> np.ndarray:
        """Returns `Layout.ep_node` of layouts with degrees ``ep``, both (N,)."""
        runs = np.zeros(len(ep))
        for degree, run in self.expert_nodes.items():
            runs[ep == degree] = run
        return runs


def divisors(number: int) -> list[int]:
    """Returns all divisors, smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def cores(job: PricedJob, space: Space) -> np.ndarray:
    """Returns every core as a row of `CORE`, (n, 7) float64.

    Raises:
        PlanError: when no core exists; the message names the rule that excludes all.
    """
    core_rows = _core_rows(job, space)
    if not core_rows:
        raise PlanError(_no_layout_message(job, space))
    return np.array(core_rows, dtype=float)


def _core_rows(job: PricedJob, space: Space) -> list[tuple[int, ...]]:
    """Returns every core as a row of `CORE`; none where the bounds leave none."""
    core_rows: list[tuple[int, ...]] = []
    tails_of: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for pp, cp, tp in _core_degrees(job, space):
        readers = space.devices // (pp * cp * tp)
        tails = []
        for microbatches in _microbatch_counts(job, space, readers):
            if (pp, microbatches) not in tails_of:
                tails_of[pp, microbatches] = [
                    (microbatches, *pair) for pair in _schedule_stages(job, space, pp, microbatches)
                ]
            tails += tails_of[pp, microbatches]
        for ep in _expert_degrees(job, space, readers, cp, tp):
            core_rows += [(pp, cp, tp, ep, *tail) for tail in tails]
    return core_rows


def _core_degrees(job: PricedJob, space: Space) -> Iterator[tuple[int, int, int]]:
    """Yields every (pp, cp, tp) that divides devices, heads, tokens and layers."""
    shape, all_sizes = job.shape, divisors(space.devices)
    heads = min(block.heads for block in shape.blocks if block.heads) if any(b.heads for b in shape.blocks) else 0
    for tp in _allowed_degrees("tp", all_sizes, space):
        if tp > space.domain or (tp > 1 and space.fixed_degree("tp") is None and heads and heads % tp):
            continue
        for cp in _allowed_degrees("cp", all_sizes, space):
            # `attention=gather` balances causal attention by two chunks of tokens a rank, an early and a late one.
            chunks = tp * cp * (2 if cp > 1 else 1)
            if (tp * cp > 1 and job.sequence % chunks) or space.devices % (tp * cp):
                continue
            for pp in _allowed_degrees("pp", all_sizes, space):
                if pp <= len(shape.blocks) + END_STAGES and space.devices % (tp * cp * pp) == 0:
                    yield pp, cp, tp


def _allowed_degrees(column: str, all_sizes: Sequence[int], space: Space) -> list[int]:
    fixed_degree = space.fixed_degree(column)
    if fixed_degree is not None:
        return [fixed_degree]
    return list(all_sizes) if space.allows(column) else [1]


def _expert_degrees(job: PricedJob, space: Space, readers: int, cp: int, tp: int) -> list[int]:
    """Degrees of ep, which spreads the experts over shard x cp x tp; shard may be all of the readers."""
    experts = job.shape.experts
    if not experts:
        return [1]
    ranks = readers * cp * tp
    candidates = _allowed_degrees("ep", divisors(experts), space)
    candidates = [ep for ep in candidates if ranks % ep == 0 and experts % ep == 0]
    # A degree of which no shard degree takes up the experts has no layout.
    return [ep for ep in candidates if _data_variants(job, space, readers, cp * tp, ep, ("none",))]


def _microbatch_counts(job: PricedJob, space: Space, readers: int) -> list[int]:
    copies, copy_unit, shards, shard_unit = _fixed_copies_and_shards(tuple(space.fixed.items()))
    if job.rows % readers or readers % (copy_unit * shard_unit) or (copies and shards and readers != copies * shards):
        return []
    if "microbatches" in space.fixed:
        microbatches = space.fixed["microbatches"]
        return [microbatches] if (job.rows // readers) % microbatches == 0 else []
    return divisors(job.rows // readers)


def _schedule_stages(job: PricedJob, space: Space, pp: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yields (index into `schedule_names`, stages of a rank)."""
    if pp == 1:
        yield 0, 1
        return
    codes = {name: code for code, name in enumerate(schedule_names())}
    for name in space.schedules:
        if not space.recomputes_under(name):
            continue
        spec = known_schedules()[name]
        max_stages = spec.most_stages or space.chunks
        for stages_per_rank in range(spec.least_stages, max_stages + 1):
            layers, stages = len(job.shape.blocks), pp * stages_per_rank
            # The first stage and the last one need no layer.
            if stages > layers + END_STAGES or (stages_per_rank > 1 and spec.least_stages == 1):
                break
            # With many small stages of unequal sizes the largest ones set the pace.
            if stages_per_rank > 2 and stages * math.ceil(layers / stages) > MOST_UNEVEN * layers:
                continue
            try:
                spec.check(pp, stages_per_rank, microbatches)
            except PlanError:
                continue
            yield codes[name], stages_per_rank


def variants(job: PricedJob, space: Space, core: Sequence[float]) -> tuple[tuple[int, int, int, int], ...]:
    """Returns (replicate, shard, ZeRO level, index into `RECOMPUTES`) of every variant of a core, a row of `cores`."""
    pp, cp, tp, ep = (int(value) for value in core[:4])
    readers = space.devices // (pp * cp * tp)
    return _data_variants(job, space, readers, cp * tp, ep, space.recomputes_under(schedule_names()[int(core[5])]))


def variants_of_cores(
    job: PricedJob, space: Space, core_rows: np.ndarray
) -> list[tuple[tuple[int, int, int, int], ...]]:
    """Returns `variants` of each of some cores, (n, 7); those with the same degrees and schedule have the same ones."""
    known: dict[tuple[float, ...], tuple[tuple[int, int, int, int], ...]] = {}
    (experts, fixed_rows), modes = _variant_rules(job, space), _recompute_codes(space)
    of_cores = []
    for pp, cp, tp, ep, _, schedule, _ in core_rows.tolist():
        key = (pp, cp, tp, ep, schedule)
        if key not in known:
            readers = space.devices // int(pp * cp * tp)
            codes = modes[int(schedule)]
            known[key] = _cached_variants(readers, int(cp * tp), int(ep), experts, fixed_rows, space.levels, codes)
        of_cores.append(known[key])
    return of_cores


def _data_variants(
    job: PricedJob, space: Space, readers: int, block: int, ep: int, modes: Sequence[str]
) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the variants of cores with ``readers`` readers of ``block`` ranks (cp x tp) each."""
    experts, fixed_rows = _variant_rules(job, space)
    codes = tuple(RECOMPUTES.index(mode) for mode in modes)
    return _cached_variants(readers, block, ep, experts, fixed_rows, space.levels, codes)


def _variant_rules(job: PricedJob, space: Space) -> tuple[int, tuple[int, int, int, int]]:
    """Returns the experts whose number limits their shards, 0 for none, and `_fixed_copies_and_shards`."""
    fixed_rows = _fixed_copies_and_shards(tuple(space.fixed.items()))
    if fixed_rows[2:] == (0, 1) and not space.allows(SHARDS):
        fixed_rows = (*fixed_rows[:2], 1, 1)
    # More ranks than experts to shard are a waste that nobody would search for, and run where both degrees are given.
    is_given = space.fixed_degree("ep") is not None and space.fixed_degree(SHARDS) is not None
    return 0 if is_given else job.shape.experts, fixed_rows


def _recompute_codes(space: Space) -> list[tuple[int, ...]]:
    """Returns the indices into `RECOMPUTES` that each schedule allows, by its code."""
    return [tuple(RECOMPUTES.index(mode) for mode in space.recomputes_under(name)) for name in schedule_names()]


@lru_cache(maxsize=64)
def _fixed_copies_and_shards(fixed: tuple[tuple[str, int], ...]) -> tuple[int, int, int, int]:
    """Returns (copies, copy unit, shards, shard unit) by the fixed axes.

    A count is 0 where the column's first axis is free; then it is any multiple of the unit.
    """
    degrees: list[int] = []
    for column in (COPIES, SHARDS):
        names = [name for name, priced_column in priced_columns().items() if priced_column == column]
        product = math.prod(degree for name, degree in fixed if name in names)
        degrees += [product if names[0] in dict(fixed) else 0, product]
    return degrees[0], degrees[1], degrees[2], degrees[3]


@lru_cache(maxsize=1 << 14)
def _cached_variants(
    readers: int,
    block: int,
    ep: int,
    experts: int,
    fixed_rows: tuple[int, int, int, int],
    levels: tuple[int, ...],
    modes: tuple[int, ...],
) -> tuple[tuple[int, int, int, int], ...]:
    """Variants of cores with ``readers`` readers; ``fixed_rows`` is of `_fixed_copies_and_shards`."""
    copies, copy_unit, shards, shard_unit = fixed_rows
    variant_rows: list[tuple[int, int, int, int]] = []
    for shard in divisors(readers):
        if shards not in (0, shard) or copies not in (0, readers // shard) or (shard * block) % ep:
            continue
        if shard % shard_unit or readers // shard % copy_unit:
            continue
        if experts and not _experts_can_shard(experts, shard, block, ep):
            continue
        variant_rows += [
            (readers // shard, shard, level, mode) for level in levels if (level > 0) == (shard > 1) for mode in modes
        ]
    return tuple(variant_rows)


def _experts_can_shard(experts: int, shard: int, block: int, ep: int) -> bool:
    """Whether each rank that shards a rank's experts gets at least one.

    An experts' weight has one row an expert; with more ranks than rows most shards would be padding.
    """
    sharing_ranks = shard * block // ep if ep > 1 else shard
    return shard == 1 or sharing_ranks <= max(1, experts // ep)


def families(core_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups consecutive cores of ``core_rows`` (n, 7) by degrees: ((m, 7) first core, (m,) length) of each run."""
    starts = np.flatnonzero(np.append(True, (core_rows[1:, :4] != core_rows[:-1, :4]).any(axis=1))[: len(core_rows)])
    return core_rows[starts], np.diff(np.append(starts, len(core_rows)))


def count(job: PricedJob, space: Space, core_rows: np.ndarray) -> int:
    """Returns the number of layouts of some cores.

    Args:
        job: model and batch.
        space: the bounds.
        core_rows: (n, 7) float64, rows of `cores`.
    """
    family_cores, lengths = families(core_rows)
    is_split = splits_backward(core_rows[:, CORE.index("schedule")])
    halved = np.add.reduceat(is_split, np.cumsum(lengths) - lengths, dtype=int)
    # A core whose schedule splits the backward has one recompute mode, the others of its family have all.
    total, none_modes = 0, int("none" in space.recomputes)
    for core, length, halved_count in zip(family_cores, lengths.tolist(), halved.tolist()):
        modes = len(space.recomputes_under(schedule_names()[int(core[CORE.index("schedule")])]))
        cores_by_modes = halved_count * none_modes + (length - halved_count) * len(space.recomputes)
        total += len(variants(job, space, core)) // modes * cores_by_modes
    return total


def expand(job: PricedJob, space: Space, core_rows: np.ndarray, offloads: Sequence[str] = ("none",)) -> LayoutBatch:
    """Returns all variants of some cores as a batch of layouts.

    Args:
        job: model and batch.
        space: the bounds.
        core_rows: (n, 7) float64, rows of `cores`.
        offloads: offload modes; the batch holds all variants of the first, then of the second, ...
    """
    of_cores = variants_of_cores(job, space, core_rows)
    variant_rows = list(itertools.chain.from_iterable(of_cores))
    all_rows = np.repeat(core_rows, [len(core_variants) for core_variants in of_cores], axis=0)
    columns = dict(zip(CORE, all_rows.T)) | dict(zip(VARIANT, np.array(variant_rows, dtype=float).reshape(-1, 4).T))
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    columns["ep_node"] = space.expert_node(columns["ep"])
    columns = {name: np.tile(values, len(offloads)) for name, values in columns.items()}
    columns["offload"] = np.repeat([float(OFFLOADS.index(mode)) for mode in offloads], len(all_rows))
    return LayoutBatch.of(columns)


def lightest(space: Space, core_rows: np.ndarray) -> LayoutBatch:
    """Returns each core of ``core_rows`` (n, 7) with replicas only: a lower bound on the time of its variants."""
    columns = dict(zip(CORE, core_rows.T))
    columns[COPIES] = space.devices / (columns["pp"] * columns["cp"] * columns["tp"])
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    columns["ep_node"] = space.expert_node(columns["ep"])
    return LayoutBatch.of(columns)


def leanest(job: PricedJob, space: Space, core_rows: np.ndarray, offloads: Sequence[str] = ("none",)) -> LayoutBatch:
    """Returns each core in a few forms, one of which needs the least memory.

    (forms * n,) layouts, form by form, of ``core_rows: (n,)``: all is recomputed and the state fully sharded, at the
    lowest and the highest ZeRO level. With parameters in host memory replicas may hold less than shards: a third form.
    """
    levels = [level for level in space.levels if level] or [0]
    ends = (min(levels), max(levels))
    forms = [(OFFLOADS.index(mode), level) for mode in offloads for level in (*ends, *((0,) * (mode == "parameters")))]
    columns = {name: np.tile(values, len(forms)) for name, values in zip(CORE, core_rows.T)}
    readers = space.devices / (columns["pp"] * columns["cp"] * columns["tp"])
    # Variants come by rising degrees of shard.
    largest = [
        core_variants[-1][1] if core_variants else 1 for core_variants in variants_of_cores(job, space, core_rows)
    ]
    shard = np.tile(np.array(largest, float), len(forms))
    level = np.repeat([level for _, level in forms], len(core_rows))
    is_unsharded = (shard == 1) | (level == 0)
    columns[SHARDS] = np.where(is_unsharded, 1, shard)
    columns[COPIES] = readers / columns[SHARDS]
    columns["zero"] = np.where(is_unsharded, 0, level)
    fullest_mode = max(RECOMPUTES.index(mode) for mode in space.recomputes)
    columns["recompute"] = np.where(splits_backward(columns["schedule"]), 0, fullest_mode)
    columns["sequence"] = (columns["tp"] > 1) * float(space.sequence)
    columns["ep_node"] = space.expert_node(columns["ep"])
    columns["offload"] = np.repeat([float(mode) for mode, _ in forms], len(core_rows))
    return LayoutBatch.of(columns)


def layout_of(
    batch: LayoutBatch, index: int, base: Layout, layers: int, fixed: Mapping[str, int] = MappingProxyType({})
) -> Layout:
    """Returns one layout of a batch as a `Layout`.

    Args:
        batch: N layouts.
        index: of the layout, below N.
        base: the choices that every layout shares.
        layers: number of the model's layers.
        fixed: `Space.fixed`, which names the axes of the degrees.
    """
    sizes = {name: int(getattr(batch, name)[index]) for name in dict.fromkeys(priced_columns().values())}
    mode, rest = (RECOMPUTES[int(codes[index])] for codes in (batch.recompute, batch.recompute_rest))
    share = float(batch.recompute_share[index])
    recompute = Recompute(mode, round(share * layers), rest) if share < 1.0 and mode != "none" else Recompute(mode)
    spec = batch.schedules[int(batch.schedule[index])]
    stages_per_rank = int(batch.stages[index])
    is_pipelined = sizes["pp"] > 1
    return dataclasses.replace(
        base,
        degrees=named_degrees(fixed, **sizes),
        zero=int(batch.zero[index]),
        microbatches=int(batch.microbatches[index]),
        recompute=recompute,
        schedule=spec.name if is_pipelined else "",
        stages=stages_per_rank if is_pipelined and stages_per_rank != spec.least_stages else 0,
        sequence=bool(batch.sequence[index]) and sizes["tp"] > 1,
        ep_node=int(batch.ep_node[index]),
        offload=OFFLOADS[int(batch.offload[index])],
    )


def contains(job: PricedJob, space: Space, core_rows: np.ndarray, base: Layout, layout: Layout) -> bool:
    """Whether a layout is in the space.

    Args:
        job: model and batch.
        space: the bounds.
        core_rows: (n, 7) float64, all rows of `cores`.
        base: the choices that every layout shares.
        layout: any; the number of layers that recompute is free.
    """
    sizes, mode = column_degrees(layout), layout.recompute.mode
    is_pipelined = sizes["pp"] > 1
    schedule = (layout.schedule or schedule_names()[0]) if is_pipelined else schedule_names()[0]
    if schedule not in schedule_names() or layout.offload not in space.offloads:
        return False
    if mode not in space.recomputes or (layout.recompute.count and layout.recompute.rest not in space.recomputes):
        return False
    if layout.degrees != Layout(degrees=named_degrees(space.fixed, **sizes), zero=layout.zero).degrees:
        return False
    core = [sizes[column] for column in CORE if column in sizes]
    core += [layout.microbatches, schedule_names().index(schedule), layout.stages_per_rank if is_pipelined else 1]
    variant = (sizes[COPIES], sizes[SHARDS], layout.zero, RECOMPUTES.index(mode))
    if not (core_rows == np.array(core, dtype=float)).all(axis=1).any() or variant not in variants(job, space, core):
        return False
    free_fields = ("degrees", "zero", "microbatches", "recompute", "schedule", "stages", "offload")
    free_values = {field: getattr(layout, field) for field in free_fields}
    sequence, ep_node = sizes["tp"] > 1 and space.sequence, space.expert_nodes.get(sizes["ep"], 0)
    return layout == dataclasses.replace(base, sequence=sequence, ep_node=ep_node, **free_values)


def _nearest_fixed(job: PricedJob, space: Space) -> str:
    """Returns what works: the given degrees with one of them changed to the nearest that some layout has."""
    sizes = divisors(space.devices)
    changes = [(abs(size - degree), axis, size) for axis, degree in space.fixed.items() for size in sizes]
    for distance, axis, size in sorted(changes):
        nearby = {**space.fixed, axis: size}
        if distance and _core_rows(job, dataclasses.replace(space, fixed=nearby)):
            return "nearest that works: " + ", ".join(f"{name}={degree}" for name, degree in nearby.items())
    return "nearest that works: fewer of them, since changing one doesn't do"


def _no_layout_message(job: PricedJob, space: Space) -> str:
    most_readers = max(size for size in divisors(space.devices) if job.rows % size == 0)
    if space.fixed:
        fixed_text = ", ".join(f"{axis}={degree}" for axis, degree in space.fixed.items())
        return (
            f"no layout of {space.devices} devices has {fixed_text} with a batch of {job.rows} rows: degrees divide "
            f"the devices, tp lies within the {space.domain} that fast links join and pp within the layers, and what "
            f"is left divides the rows; {_nearest_fixed(job, space)}"
        )
    return (
        f"a batch of {job.rows} rows can't be shared by {space.devices} devices: at most {most_readers} of them can "
        f"read other rows, and the model's {len(job.shape.blocks)} layers and heads don't take up the rest; nearest "
        f"that works: a batch of {space.devices} rows, or {most_readers} devices"
    )
