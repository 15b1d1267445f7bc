"""Splits work over devices of several kinds: layers by a stage's speed and memory, rows by a reader's speed.

Layouts with equally many stages are split together, as arrays.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.planner.cost.axis_columns import named_degrees
from meshwright.planner.cost.embedding_and_head import price_head
from meshwright.planner.cost.layer_cost import LayerCost
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layers import price_layer
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.stages import block_kinds
from meshwright.planner.device_kinds import DeviceKinds
from meshwright.planner.question import Question
from meshwright.planner.space import divisors
from meshwright.schedules.file import find_choice
from meshwright.spec.axis import Mechanics
from meshwright.spec.balanced_cuts import Cuts
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, Recompute, StageSplit
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE

MAX_ROUNDS = 4
"""Most attempts to split the layers again after a stage didn't fit."""
MAX_CUT_SUMS = 1 << 20
"""Most sums of runs of layers in an array, so that it stays in a core's cache."""
MAX_MICROBATCHES_PER_STAGE = 16
"""Most micro-batches for each stage: the bubble is under 6 % then."""
MAX_ROWS_PER_READER = 64
"""Most rows of a micro-batch for each reader: finer shares would need batches of special sizes."""
MAX_TIMED_ROWS = 512
"""Most rows of a reader whose seconds are priced; those of more grow in proportion."""


def uneven_pipelines(question: Question, kinds: DeviceKinds) -> Iterator[list[Layout]]:
    """Yields the pipelines over all kinds, with their layers split; each list has one number of stages."""
    job, world = question.job, question.cluster.devices
    for pp in divisors(world):
        stage_kinds = kinds.of_runs(world // pp)
        if pp > 1 and stage_kinds is not None and pp <= len(job.shape.blocks) + 1:
            layouts = list(_stage_layouts(question, pp))
            splitter = _Splitter(question, kinds, stage_kinds, layouts)
            numbered_splits: set[tuple[int, StageSplit]] = set()
            # The slowest stage isn't all: of splits with equal ones that is faster whose first stages have more layers,
            # or that whose last have; and with few micro-batches a last stage of one layer may better have none.
            for fills_first in (False, True):
                splits = splitter.split(range(len(layouts)), fills_first)
                single = [number for number, split in splits.items() if split.layers[-1] == 1]
                numbered_splits |= {*splits.items(), *splitter.split(single, fills_first, is_head_alone=True).items()}
            ordered = sorted(numbered_splits, key=lambda item: (item[0], item[1].layers))
            yield [dataclasses.replace(layouts[number], split=split) for number, split in ordered]


def _stage_layouts(question: Question, pp: int) -> Iterator[Layout]:
    """Yields every layout with ``pp`` stages: tp, data axes, micro-batches, ZeRO level, recompute."""
    job, world, space = question.job, question.cluster.devices, question.space
    heads = max((block.heads for block in job.shape.blocks), default=1) or 1
    for tp in (size for size in divisors(world // pp) if size <= space.domain and heads % size == 0):
        readers = world // pp // tp
        if job.rows % readers:
            continue
        for microbatches in (
            size for size in divisors(job.rows // readers) if pp <= size <= MAX_MICROBATCHES_PER_STAGE * pp
        ):
            for recompute in space.recomputes:
                for shard, zero in ((1, 0), (readers, 1)) if readers > 1 else ((1, 0),):
                    yield dataclasses.replace(
                        question.base,
                        degrees=named_degrees(pp=pp, tp=tp, shard=shard, replicate=readers // shard),
                        zero=zero,
                        microbatches=microbatches,
                        recompute=Recompute(recompute),
                        schedule=DEFAULT_SCHEDULE,
                        sequence=tp > 1 and space.sequence,
                    )


class _Splitter:
    """Splits the layers of pipelines so that the slowest stage is as fast as can be within each kind's memory.

    Args:
        question: whose batch the layouts divide.
        kinds: of the devices.
        stage_kinds: index of each stage's kind.
        layouts: with equally many stages, one a rank.
    """

    def __init__(
        self, question: Question, kinds: DeviceKinds, stage_kinds: Sequence[int], layouts: Sequence[Layout]
    ) -> None:
        self._question, self._kinds, self._stage_kinds = question, kinds, stage_kinds
        self._batch = LayoutBatch.from_layouts(layouts, len(question.job.shape.blocks)) if layouts else None
        self._seconds = layer_seconds(question, kinds, self._batch) if self._batch is not None else np.empty(0)

    def split(
        self, numbers: Sequence[int], fills_first: bool = False, is_head_alone: bool = False
    ) -> dict[int, StageSplit]:
        """Returns the split of each layout by its number; those without one are left out.

        Args:
            numbers: of the layouts to split.
            fills_first: of splits whose slowest stages are equal, that whose last stage has the fewest layers.
            is_head_alone: the last stage has no layer.
        """
        splits: dict[int, StageSplit] = {}
        if self._batch is None or not len(numbers):
            return splits
        question, stages, count = self._question, len(self._stage_kinds), len(self._question.job.shape.blocks)
        stage_limits_bytes = np.array(self._kinds.limits_bytes(question.usable_share))[self._stage_kinds]
        max_layers = np.full((self._batch.count, stages), count)
        max_layers[:, -1] *= not is_head_alone
        open_indices = np.array(numbers)
        for _ in range(MAX_ROUNDS):
            sizes = stage_sizes(self._seconds[open_indices], self._stage_kinds, max_layers[open_indices], fills_first)
            open_indices, sizes = open_indices[sizes[:, 0] > 0], sizes[sizes[:, 0] > 0]
            if not len(open_indices):
                break
            peak = self._peaks(open_indices, sizes)
            is_too_full = peak > stage_limits_bytes
            splits |= {
                int(open_indices[i]): StageSplit(tuple(map(int, sizes[i])))
                for i in np.flatnonzero(~is_too_full.any(axis=1))
            }
            # Next attempt: at least one layer less on a stage that is too full, in proportion to its excess.
            layers_that_fit = np.minimum(sizes - 1, np.floor(sizes * stage_limits_bytes / peak).astype(int))
            limits = max_layers[open_indices]
            max_layers[open_indices] = np.where(is_too_full, np.minimum(limits, layers_that_fit), limits)
            # The last stage may have the head alone.
            least_layers = max_layers[open_indices] + (np.arange(stages) == stages - 1)
            open_indices = open_indices[is_too_full.any(axis=1) & (least_layers.min(axis=1) >= 1)]
        return splits

    def _peaks(self, indices: Array, sizes: Array) -> Array:
        """Returns each stage's bytes at its fullest moment, (n, stages), of splits into ``sizes``, (n, stages)."""
        assert self._batch is not None
        named_splits = tuple(tuple(float(size) for size in row) for row in sizes)
        batch = dataclasses.replace(self._batch.take(indices), splits=named_splits)
        question = self._question
        # Bytes don't depend on the device, so any kind's machine gives them.
        costs = LayerCosts.of(question.job, batch, self._kinds.machines[0], question.runtime, timed=False)
        return RankTimes(costs).memory()["peak"]


def split_over_ranks(question: Question, kinds: DeviceKinds, layout: Layout) -> StageSplit | None:
    """Returns a pipeline's split of the layers that minimizes its slowest stage; None where no split fits the memory.

    Args:
        question: whose batch the layout divides.
        kinds: of its ranks.
        layout: a pipeline, of one stage a rank or several.
    """
    degree, count = layout.degree(Mechanics.STAGES), len(question.job.shape.blocks)
    rank_kinds, stages = kinds.of_runs(layout.world // degree), degree * layout.stages_per_rank
    if rank_kinds is None or stages > count + 1:
        return None
    if layout.stages_per_rank == 1:
        return _Splitter(question, kinds, rank_kinds, [layout]).split([0]).get(0)
    spec = find_choice(layout.schedule)
    stage_kinds = [rank_kinds[spec.rank_of(stage, degree)] for stage in range(stages)]
    seconds = layer_seconds(question, kinds, LayoutBatch.from_layouts([layout], count))
    sizes = stage_sizes(seconds, stage_kinds, np.full((1, stages), count))[0]
    return StageSplit(tuple(map(int, sizes))) if sizes[0] > 0 else None


def layer_seconds(question: Question, kinds: DeviceKinds, batch: LayoutBatch) -> Array:
    """Returns seconds of each layer and of the head on a micro-batch, (N, kinds, L + 1) float64."""
    job = question.job
    block_kind_of, kind_blocks = block_kinds(job.shape)
    seconds = np.empty((batch.count, len(kinds.machines), len(block_kind_of) + 1))
    for kind, machine in enumerate(kinds.machines):
        model = PricedModel(job, batch, machine, question.runtime.for_layout(question.base))
        seconds_by_block_kind = [
            np.broadcast_to(_device_s(price_layer(model, job.shape.blocks[block])), batch.count)
            for block in kind_blocks
        ]
        seconds[:, kind, :-1] = np.stack(seconds_by_block_kind, axis=1)[:, list(block_kind_of)]
        seconds[:, kind, -1] = _device_s(price_head(model))
    return seconds


def _device_s(cost: LayerCost) -> Any:
    """Returns device seconds of forward and backward, (N,) or a scalar."""
    return cost.forward.busy + cost.backward.busy


def stage_sizes(seconds: Array, stage_kinds: Sequence[int], max_layers: Array, fills_first: bool = False) -> Array:
    """Returns layers of each stage, (N, stages) int64; all 0 where no split meets ``max_layers``, (N, stages).

    ``seconds``, (N, kinds, L + 1), are of `layer_seconds`; ``fills_first`` is of `Cuts`.
    """
    chunk_size = max(1, MAX_CUT_SUMS // (seconds.shape[2] + 1) ** 2)
    size_chunks = [np.zeros((0, len(stage_kinds)), dtype=int)]
    for start in range(0, len(seconds), chunk_size):
        chunk = slice(start, start + chunk_size)
        layers, head = seconds[chunk, :, :-1], seconds[chunk, :, -1]
        bounds, possible = Cuts(layers, head, stage_kinds, max_layers[chunk], fills_first=fills_first).bounds(
            len(stage_kinds)
        )
        size_chunks.append(np.where(possible[:, None], np.diff(bounds), 0))
    return np.concatenate(size_chunks)


def uneven_data_layouts(question: Question, kinds: DeviceKinds) -> Iterator[Layout]:
    """Yields the data layouts over all kinds, with rows in proportion to the readers' speeds."""
    job, world, space = question.job, question.cluster.devices, question.space
    heads = max((block.heads for block in job.shape.blocks), default=1) or 1
    for tp in (size for size in divisors(world) if size <= space.domain and heads % size == 0):
        reader_kinds = kinds.of_runs(tp)
        if reader_kinds is None:
            continue
        readers, row_seconds = world // tp, _row_seconds(question, kinds, tp)
        for microbatches in divisors(job.rows):
            shares = _row_shares([row_seconds[kind] for kind in reader_kinds], job.rows // microbatches)
            if shares is None:
                continue
            rows = BatchShares.of(shares)
            for recompute in space.recomputes:
                for shard, zero in ((1, 0), *((readers, level) for level in (1, 2, 3) if readers > 1)):
                    yield dataclasses.replace(
                        question.base,
                        degrees=named_degrees(tp=tp, shard=shard, replicate=readers // shard),
                        zero=zero,
                        microbatches=microbatches,
                        recompute=Recompute(recompute),
                        sequence=tp > 1 and space.sequence,
                        rows=rows,
                    )


def _row_seconds(question: Question, kinds: DeviceKinds, tp: int) -> list[Array]:
    """Returns seconds of forward and backward of 1, 2, ... rows on a reader of each kind, (rows,) float64 a kind."""
    counts = np.arange(1.0, min(question.job.rows, MAX_TIMED_ROWS) + 1)
    layout = dataclasses.replace(
        question.base, degrees=named_degrees(tp=tp), sequence=tp > 1 and question.space.sequence
    )
    batch = LayoutBatch.from_layouts([layout] * len(counts), len(question.job.shape.blocks))
    batch = dataclasses.replace(batch, rows=counts)
    engine = question.runtime.for_layout(layout)
    ranks = [RankTimes(LayerCosts.of(question.job, batch, machine, engine)) for machine in kinds.machines]
    return [np.asarray(times.forward[:, 0] + times.backward[:, 0]) for times in ranks]


def _row_shares(row_seconds: Sequence[Array], rows: int) -> list[int] | None:
    """Returns rows of each reader in a micro-batch; None where a reader would get none, or too many.

    Rows are dealt out one by one to the reader that would end first with it. As a reader never ends earlier with more
    rows, no other deal lets the slowest end earlier. Few rows take as long as one where launches bound a device, so
    seconds of every number count, not those of one row.

    Args:
        row_seconds: of each reader, seconds of 1, 2, ... rows; beyond the last they grow with the rows.
        rows: to deal out.
    """
    readers = len(row_seconds)
    if rows < readers or rows > MAX_ROWS_PER_READER * readers:
        return None
    shares = [1] * readers
    ends = [(_end_s(seconds, 2), reader) for reader, seconds in enumerate(row_seconds)]
    heapq.heapify(ends)
    for _ in range(rows - readers):
        _, reader = ends[0]
        shares[reader] += 1
        heapq.heapreplace(ends, (_end_s(row_seconds[reader], shares[reader] + 1), reader))
    return shares


def _end_s(seconds: Array, rows: int) -> float:
    timed = len(seconds)
    return float(seconds[rows - 1]) if rows <= timed else float(seconds[-1]) * rows / timed
