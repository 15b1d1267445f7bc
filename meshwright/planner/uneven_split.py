"""Layouts of devices of several kinds: layers by speed and memory of each stage, or rows by speed of each reader.

Layouts with equally many stages are dealt out together, as arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.planner.choose import Question
from meshwright.planner.cost.axis_columns import named_degrees
from meshwright.planner.cost.embedding_and_head import head
from meshwright.planner.cost.layers import LayerCost, PricedModel
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.planner.cost.price import price
from meshwright.planner.cost.ranks import LayerCosts, RankTimes
from meshwright.planner.cost.stages import kinds as block_kinds
from meshwright.planner.device_kinds import Kind, places_of
from meshwright.planner.space import divisors
from meshwright.spec.balanced_cuts import Cuts
from meshwright.spec.layout import DEFAULT_SCHEDULE, Layout
from meshwright.spec.layout_choices import BatchShares, Recompute, StageSplit

ROUNDS = 4
"""How often layers are dealt out again after a stage turned out too full."""
TOGETHER = 1 << 20
"""Most sums of runs of layers that are compared at once: the arrays stay in the cache of a core."""
MOST_TURNS = 16
"""Micro-batches for each stage up to which they are tried: the bubble is under 6 % then."""
MOST_SHARE = 64
"""Largest share of rows: finer ones would ask for batches of too special sizes."""


def pipelines(question: Question, kinds: Sequence[Kind]) -> Iterator[list[Layout]]:
    """Pipelines over all kinds, those of equally many stages together, each with its layers dealt out."""
    job, world = question.job, question.cluster.devices
    for pp in divisors(world):
        places = places_of(kinds, world // pp)
        if pp > 1 and places is not None and pp <= len(job.shape.blocks):
            yield _dealt(question, kinds, places, list(_inner(question, pp)))


def _inner(question: Question, pp: int) -> Iterator[Layout]:
    """Layouts of a pipeline's stages: tp, data, micro-batches, ZeRO, recompute."""
    job, world, space = question.job, question.cluster.devices, question.space
    heads = max((block.heads for block in job.shape.blocks), default=1) or 1
    for tp in (size for size in divisors(world // pp) if size <= space.domain and heads % size == 0):
        data = world // pp // tp
        if job.rows % data:
            continue
        for micro in (size for size in divisors(job.rows // data) if pp <= size <= MOST_TURNS * pp):
            for recompute in space.recomputes:
                for shard, zero in ((1, 0), (data, 1)) if data > 1 else ((1, 0),):
                    yield dataclasses.replace(
                        question.base,
                        degrees=named_degrees(pp=pp, tp=tp, shard=shard, replicate=data // shard),
                        zero=zero,
                        microbatches=micro,
                        recompute=Recompute(recompute),
                        schedule=DEFAULT_SCHEDULE,
                        sequence=tp > 1 and space.sequence,
                    )


def _dealt(question: Question, kinds: Sequence[Kind], places: Sequence[int], layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts with the slowest stage as fast as can be, within each kind's memory; not those that fit nowhere."""
    if not layouts:
        return []
    job, stages, count = question.job, len(places), len(question.job.shape.blocks)
    degrees = LayoutBatch.from_layouts(layouts, count)
    seconds = _seconds(question, kinds, degrees)
    rooms = np.array([question.usable * kinds[place][0].memory_bytes for place in places])
    limits = np.full((len(layouts), stages), count)
    splits: dict[int, StageSplit] = {}
    left = np.arange(len(layouts))
    for _ in range(ROUNDS):
        sizes = _sizes(seconds[left], places, limits[left])
        left, sizes = left[sizes[:, 0] > 0], sizes[sizes[:, 0] > 0]
        if not len(left):
            break
        named = tuple(tuple(float(size) for size in row) for row in sizes)
        some = dataclasses.replace(degrees.take(left), splits=named)
        # Bytes are those of the layout, whatever it runs on.
        peak = RankTimes(LayerCosts.of(job, some, kinds[0][1], question.runtime, timed=False)).memory()["peak"]
        full = peak > rooms
        splits |= {int(left[at]): StageSplit(tuple(map(int, sizes[at]))) for at in np.flatnonzero(~full.any(axis=1))}
        allowed = np.minimum(sizes - 1, np.floor(sizes * rooms / peak).astype(int))
        limits[left] = np.where(full, np.minimum(limits[left], allowed), limits[left])
        left = left[full.any(axis=1) & (limits[left].min(axis=1) >= 1)]
    return [dataclasses.replace(layouts[at], split=splits[at]) for at in sorted(splits)]


def _seconds(question: Question, kinds: Sequence[Kind], degrees: LayoutBatch) -> Array:
    """Seconds of each layer on a micro-batch, (N, kinds, L), the head counted with the last."""
    job = question.job
    numbers, firsts = block_kinds(job.shape)
    found = np.empty((degrees.count, len(kinds), len(numbers)))
    for number, (_, machine, _) in enumerate(kinds):
        model = PricedModel(job, degrees, machine, question.runtime.for_layout(question.base))
        each = [np.broadcast_to(_busy(model.layer(job.shape.blocks[at])), degrees.count) for at in firsts]
        found[:, number] = np.stack(each, axis=1)[:, list(numbers)]
        found[:, number, -1] += _busy(head(model))
    return found


def _busy(cost: LayerCost) -> Any:
    return cost.forward.busy + cost.backward.busy


def _sizes(seconds: Array, places: Sequence[int], limits: Array) -> Array:
    """Layers of each stage, (N, stages); 0 where they can't be dealt out within the limits."""
    step = max(1, TOGETHER // (seconds.shape[2] + 1) ** 2)
    found = [np.zeros((0, len(places)), dtype=int)]
    for start in range(0, len(seconds), step):
        part = slice(start, start + step)
        bounds, possible = Cuts(seconds[part], places, limits[part]).bounds(len(places))
        found.append(np.where(possible[:, None], np.diff(bounds), 0))
    return np.concatenate(found)


def shared(question: Question, kinds: Sequence[Kind]) -> Iterator[Layout]:
    """Data layouts over all kinds, each with the rows shared out by speed."""
    job, world, space = question.job, question.cluster.devices, question.space
    heads = max((block.heads for block in job.shape.blocks), default=1) or 1
    for tp in (size for size in divisors(world) if size <= space.domain and heads % size == 0):
        places = places_of(kinds, tp)
        if places is None:
            continue
        readers, speeds = world // tp, _speeds(question, kinds, tp)
        for micro in divisors(job.rows):
            shares = _shares([speeds[place] for place in places], job.rows // micro)
            if shares is None:
                continue
            rows = BatchShares.of(shares)
            for recompute in space.recomputes:
                for shard, zero in ((1, 0), *((readers, level) for level in (1, 2, 3) if readers > 1)):
                    yield dataclasses.replace(
                        question.base,
                        degrees=named_degrees(tp=tp, shard=shard, replicate=readers // shard),
                        zero=zero,
                        microbatches=micro,
                        recompute=Recompute(recompute),
                        sequence=tp > 1 and space.sequence,
                        rows=rows,
                    )


def _speeds(question: Question, kinds: Sequence[Kind], tp: int) -> list[float]:
    """Rows a second of a reader of each kind."""
    job = dataclasses.replace(question.job, rows=1)
    layout = dataclasses.replace(
        question.base, degrees=named_degrees(tp=tp), sequence=tp > 1 and question.space.sequence
    )
    costs = [price(job, layout, machine, question.runtime).stages[0] for _, machine, _ in kinds]
    return [1.0 / (cost.forward_s + cost.backward_s) for cost in costs]


def _shares(speeds: Sequence[float], rows: int) -> list[int] | None:
    """Rows of each reader in a micro-batch, in proportion to its speed, by largest remainder; None where one has none.

    Readers of one kind have equally many, so what is left over goes to as many readers as it takes, fastest kind first.
    """
    if rows < len(speeds) or rows > MOST_SHARE * len(speeds):
        return None
    whole = sum(speeds)
    wish = [rows * speed / whole for speed in speeds]
    shares = [max(1, int(value)) for value in wish]
    order = sorted(range(len(speeds)), key=lambda at: (shares[at] - wish[at], at))
    for at in order[: max(0, rows - sum(shares))]:
        shares[at] += 1
    return shares if sum(shares) == rows else None
