"""Lists the collectives of one rank in a step, by kind, group and bytes.

The list is exact for a model's weights and sharding table; a router is taken to send equally many tokens to each rank
of ``ep``. Tests compare it with the bytes that runs count, and with the real program on fake ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from meshwright.planner.cost.element_bytes import compute_bytes, master_bytes
from meshwright.planner.error_feedback import FeedbackBytes, count_feedback_bytes
from meshwright.planner.model_parts import ModelParts, WeightPlacement
from meshwright.planner.rank_groups import CollectiveGroup, RankGroups
from meshwright.planner.rank_weights import StageWeights, Tensors, elements, shard_blocks, shard_elements
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import (
    BLOCK_VALUES,
    FORMATS,
    Compression,
    assign_buckets,
    chunk_blocks,
    count_blocks,
)
from meshwright.spec.groups import coordinates, gradient_axes, state_index
from meshwright.spec.layout import SECONDARY, Layout
from meshwright.spec.sharding_table import ShardingTable

ACTIVE_STAGES = 3
"""Stages of a rank that stay gathered in a pipeline. Source: torch 2.13, pipelining, `_add_unshard_reshard`."""


@dataclass(slots=True)
class Collectives:
    """Bytes that one rank hands to collectives in a step, added up by kind and group.

    Of an all-reduce these are the bytes of the tensor; of an all-gather and a reduce-scatter those of the rank's part;
    of an all-to-all and a send those for other ranks.
    """

    bytes: dict[tuple[CollectiveGroup, str], float] = field(default_factory=dict)

    def add(self, group: CollectiveGroup, kind: str, size: float) -> None:
        """Adds a collective; a group of one rank sends nothing."""
        if len(group.ranks) > 1 and size:
            self.bytes[group, kind] = self.bytes.get((group, kind), 0.0) + size

    def add_compressed_sum(
        self, copies: CollectiveGroup, rank: int, blocks: int, compression: Compression, element_bytes: int
    ) -> None:
        """Adds the exchanges of a rounded sum of gradients over copies.

        Args:
            copies: all of them.
            rank: whose bytes these are.
            blocks: of the message's weights.
            compression: of the layout.
            element_bytes: of an exact gradient, which travels between the copies of a node.
        """
        count = len(copies.ranks)
        if count == 1 or not blocks:
            return
        run, chunk = compression.exact_copies(count), chunk_blocks(blocks, count)
        index = copies.ranks.index(rank)
        start = index // run * run
        inside = CollectiveGroup(copies.axis, copies.ranks[start : start + run])
        across = CollectiveGroup(copies.axis, copies.ranks[index % run :: run])
        part = chunk * len(across.ranks) * BLOCK_VALUES * element_bytes
        self.add(inside, "reduce_scatter", part)
        self.add(inside, "all_gather", part)
        chunk_bytes = chunk * compression.format.block_bytes
        self.add(across, "all_to_all", chunk_bytes * (len(across.ranks) - 1))
        self.add(across, "all_gather", chunk_bytes)

    def add_rounded_gather(self, shards: CollectiveGroup, size: int, count: int) -> None:
        """Adds ``count`` gathers of a rank's part of a unit's weights, ``size`` bytes in rounded numbers."""
        self.add(shards, "all_gather", size * count)

    def sent(self) -> dict[str, int]:
        """Returns the bytes that this rank sends, by axis, as `parallel.axis_group.AxisGroup` counts them."""
        sent_bytes: dict[str, float] = {}
        for (group, kind), size in self.bytes.items():
            peers = len(group.ranks) - 1
            # 2 (n-1)/n of the bytes: an all-reduce is a reduce-scatter and an all-gather: Rabenseifner (2004).
            factors = {"all_reduce": 2 * peers / (peers + 1), "all_gather": peers, "reduce_scatter": peers}
            sent_bytes[group.axis] = sent_bytes.get(group.axis, 0.0) + size * factors.get(kind, 1)
        return {axis: round(size) for axis, size in sent_bytes.items()}


C = TypeVar("C", bound=Collectives)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of an element."""

    compute: int
    """Of activations and gathered parameters."""
    master: int
    """Of reduced gradients."""

    @classmethod
    def of(cls, layout: Layout) -> Bytes:
        """Returns the sizes for a layout's precision."""
        return cls(compute_bytes(layout.precision), master_bytes(layout.precision))


class StateTraffic:
    """Collectives of a rank on weights and gradients: gathers, reductions, and sums of shared weights.

    Args:
        model: as names and sizes.
        layout: of the job.
        rank: which rank.
    """

    def __init__(self, model: ModelParts, layout: Layout, rank: int) -> None:
        self._model, self._layout, self._rank = model, layout, rank
        self._weights_by_rank, self._groups, self._width = (
            WeightPlacement(model, layout),
            RankGroups(layout, rank),
            Bytes.of(layout),
        )
        axis_indices = coordinates(rank, layout.degrees)
        self._pp_axis, self._tp_axis = layout.axis(Mechanics.STAGES), layout.axis(Mechanics.MATRICES)
        self._ep_axis = layout.axis(Mechanics.EXPERTS)
        self._pp_index, self._tp_index = axis_indices[self._pp_axis], axis_indices[self._tp_axis]
        self._ep_index = self._groups.carved(self._ep_axis).ranks.index(rank)
        is_gathered = layout.is_mixed_precision and not layout.has_compute_copies
        self.is_sharded = bool(layout.zero) or is_gathered or layout.offload == "parameters"
        """Whether FSDP units hold the weights."""

    @property
    def stages(self) -> list[list[str]]:
        """Trained names of each stage of the rank."""
        return self._weights_by_rank.stages(self._pp_index)

    def add_to(self, collectives: Collectives) -> None:
        """Adds the collectives of a step."""
        for stage_index, names in enumerate(self._weights_by_rank.stages(self._pp_index)):
            self._add_stage(collectives, stage_index, names)
            self._add_partial_gradients(collectives, names)
        self._add_tied_gradients(collectives)

    def stage_collectives(self, make: Callable[[], C]) -> Iterator[C]:
        """Yields the gathers and sums over data axes of each stage of the rank, in collectives that ``make`` makes."""
        for stage_index, names in enumerate(self._weights_by_rank.stages(self._pp_index)):
            collectives = make()
            self._add_stage(collectives, stage_index, names)
            yield collectives

    def _add_stage(self, collectives: Collectives, stage_index: int, names: Sequence[str]) -> None:
        """Adds a stage's gathers of weights and sums of gradients over the data axes."""
        stage = self._weights_by_rank.stage_weights(names, self._tp_index, self._ep_index)
        if self._layout.compress.keeps_errors:
            sent, copies = self.feedback_bytes(names), self._groups.across(gradient_axes(self._layout.state_axes))
            collectives.add(copies, "all_reduce", sent.summed)
            collectives.add(copies, "all_gather", sent.gathered)
        if self.is_sharded:
            self._add_fsdp_units(collectives, stage, stage_index)
        elif self._layout.compress and not self._layout.compress.keeps_errors:
            self._add_compressed_gradients(collectives, names)
        elif not self._layout.compress:
            self._add_replica_gradients(collectives, stage)

    def feedback_bytes(self, names: Sequence[str]) -> FeedbackBytes:
        """Returns the bytes of some weights' gradients, summed over copies with error feedback."""
        table, degree = self._model.split_table(self._layout), self._layout.degree(Mechanics.MATRICES)
        exact_names = set[str]()
        if degree > 1 and table is not None:
            repeated = (
                f"{layer}.{split.name}"
                for layer, split, _, _ in table.splits(degree)
                if any(block.count < degree for block in split.blocks)
            )
            exact_names = {*self._partial_names(table, names), *repeated}
        shapes = self._weights_by_rank.shapes(self._tp_index, self._ep_index)
        layout = self._layout
        shard = state_index(self._rank, layout.degrees, layout.zero), layout.state_shards
        return count_feedback_bytes(
            names, self._model.shapes, shapes, exact_names, layout.compress, self._width.master, shard
        )

    def gradient_messages(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the names of a stage's weights by message of their sum, in the order of the runtime."""
        if self.is_sharded:
            # Of FSDP units, which are summed as backward ends them: head, layers, and last the other ends.
            return list(reversed(self._weights_by_rank.units(names)))
        shapes = self._weights_by_rank.shapes(self._tp_index, self._ep_index)
        sizes = [math.prod(shapes[name]) * self._width.master for name in names]
        return [[names[position] for position in bucket] for bucket in assign_buckets(sizes)]

    def _add_fsdp_units(self, collectives: Collectives, stage: StageWeights, stage_index: int) -> None:
        """Adds those of a stage's FSDP units, the first summed last: ends, layers, modules of experts, the head."""
        layout, groups = self._layout, self._groups
        shards, copies = groups.across(layout.state_axes), groups.across(gradient_axes(layout.state_axes))
        expert_copies, expert_shards = groups.carved(f"{self._ep_axis}_copies"), groups.carved(f"{self._ep_axis}_shard")
        if layout.zero:
            expert_copies = groups.across(gradient_axes(known_axes()[self._ep_axis].carves))
        else:
            expert_shards = CollectiveGroup(f"{self._ep_axis}_shard", (self._rank,))
        gathers = self._gather_counts(stage_index)
        for tensors in (stage.embedding, stage.outside_layers):
            self._add_fsdp_unit(collectives, tensors, shards, copies, gathers[0])
        # Backward's half of the gathers is of the secondary copy, where there is one.
        layer_gathers = gathers[1] // 2 if layout.secondary else gathers[1]
        for layer in stage.layers:
            self._add_fsdp_unit(collectives, layer.own, shards, copies, layer_gathers)
            self._add_secondary_gathers(collectives, layer.own, shards, gathers[1] - layer_gathers)
            self._add_fsdp_unit(collectives, layer.experts, expert_shards, expert_copies, gathers[1])
        self._add_fsdp_unit(collectives, stage.head, shards, copies, gathers[0])

    def _add_fsdp_unit(
        self, collectives: Collectives, tensors: Tensors, shards: CollectiveGroup, copies: CollectiveGroup, gathers: int
    ) -> None:
        """Adds the gathers and reductions of one FSDP unit."""
        layout, microbatches = self._layout, self._layout.microbatches
        shard_size = shard_elements(tensors, len(shards.ranks))  # padded: every shard is as long as the first
        blocks = shard_blocks(tensors, len(shards.ranks))
        if layout.compress_weights == "none":
            collectives.add(shards, "all_gather", shard_size * self._width.compute * gathers)
        else:
            collectives.add_rounded_gather(shards, blocks * FORMATS[layout.compress_weights].block_bytes, gathers)
        # A pipeline reduce-scatters once, after its last backward; below ZeRO-2 full gradients add up until then.
        scatters = microbatches if layout.zero >= 2 and layout.degree(Mechanics.STAGES) == 1 else 1
        collectives.add(shards, "reduce_scatter", shard_size * self._width.master * scatters)
        if layout.compress.keeps_errors:
            return
        if layout.compress:
            collectives.add_compressed_sum(copies, self._rank, blocks, layout.compress, self._width.master)
        else:
            collectives.add(copies, "all_reduce", shard_size * self._width.master)

    def _add_secondary_gathers(
        self, collectives: Collectives, tensors: Tensors, shards: CollectiveGroup, gathers: int
    ) -> None:
        """Adds a layer's gathers from the neighbours that share it between forward and backward, as it was gathered."""
        if not gathers:
            return
        size, count = self._layout.secondary, len(shards.ranks)
        start = shards.ranks.index(self._rank) // size * size
        neighbours = CollectiveGroup(SECONDARY, shards.ranks[start : start + size])
        part_bytes = shard_elements(tensors, count) * count // size * self._width.compute
        collectives.add(neighbours, "all_gather", part_bytes * gathers)

    def _gather_counts(self, stage_index: int) -> tuple[int, int]:
        """Returns how often a stage's weights outside layers, and its layers, are gathered in a step."""
        layout, microbatches = self._layout, self._layout.microbatches
        if layout.degree(Mechanics.STAGES) > 1:
            count = list(self._gathered_stages()).count(stage_index)
            return count, count
        # ZeRO-3: layers are gathered for forward and for backward. The embedding's backward reads no weights, and what
        # else is outside of the layers stays gathered in between.
        return (microbatches, 2 * microbatches) if layout.zero == 3 else (1, 1)

    def _gathered_stages(self) -> Iterator[int]:
        """Yields this rank's stages in the order in which the schedule gathers them."""
        schedule = self._layout.pipeline()
        stages = schedule.rank_stages(self._pp_index)
        stage_order = [chunk.stage for action in schedule.actions[self._pp_index] for chunk in action.parts]
        active: set[int] = set()
        for position in range(len(stage_order)):
            # torch keeps the next ACTIVE_STAGES stages gathered: a stage that left this window is gathered again.
            upcoming = list(dict.fromkeys(stage_order[position:]))[:ACTIVE_STAGES]
            active &= set(upcoming)
            for stage in (stage for stage in upcoming if stage not in active):
                active.add(stage)
                yield stages.index(stage)

    def _add_replica_gradients(self, collectives: Collectives, stage: StageWeights) -> None:
        """Adds the gradients of weights that every reader holds in full."""
        dense_elements = elements(stage.ends) + sum(elements(layer.own) for layer in stage.layers)
        expert_elements = sum(elements(layer.experts) for layer in stage.layers)
        collectives.add(self._groups.across(gradient_axes(())), "all_reduce", dense_elements * self._width.master)
        collectives.add(
            self._groups.carved(f"{self._ep_axis}_copies"), "all_reduce", expert_elements * self._width.master
        )

    def _add_compressed_gradients(self, collectives: Collectives, names: Sequence[str]) -> None:
        """Adds the same in rounded numbers: each message has blocks of its own, in the order of the runtime."""
        shapes = self._weights_by_rank.shapes(self._tp_index, self._ep_index)
        expert_names = self._weights_by_rank.expert_parameters
        for copies, group_names in (
            (self._groups.across(gradient_axes(())), [name for name in names if name not in expert_names]),
            (self._groups.carved(f"{self._ep_axis}_copies"), [name for name in names if name in expert_names]),
        ):
            counts = [math.prod(shapes[name]) for name in group_names]
            for bucket in assign_buckets([count * self._width.master for count in counts]):
                blocks = sum(count_blocks(counts[position]) for position in bucket)
                collectives.add_compressed_sum(copies, self._rank, blocks, self._layout.compress, self._width.master)

    def _local_elements(self, tensors: Tensors) -> int:
        """Returns the elements of weights that this rank holds once they are sharded."""
        layout = self._layout
        return shard_elements(tensors, layout.state_shards, state_index(self._rank, layout.degrees, layout.zero))

    def _add_partial_gradients(self, collectives: Collectives, names: Sequence[str]) -> None:
        """Adds the gradients that are partial over ``tp``: of weights that every rank of a sharding group holds."""
        table = self._model.split_table(self._layout)
        if self._layout.degree(Mechanics.MATRICES) == 1 or table is None:
            return
        shapes = self._weights_by_rank.shapes(self._tp_index, self._ep_index)
        partial_names = self._partial_names(table, names)
        size = sum(self._local_elements(((shapes[name][0], _row_elements(shapes[name])),)) for name in partial_names)
        collectives.add(self._groups.across((self._tp_axis,)), "all_reduce", size * self._width.master)
        for holders, count in self._repeated_elements(table, names).items():
            collectives.add(self._groups.neighbours(self._tp_axis, holders), "all_reduce", count * self._width.master)

    def _partial_names(self, table: ShardingTable, names: Sequence[str]) -> list[str]:
        """Returns the names of weights that every rank of ``tp`` holds, and has a term of the gradient of."""
        degree, shared_names = self._layout.degree(Mechanics.MATRICES), set[str]()
        for layer, rows in table.layers.items():
            groups = [group for group in rows.groups if group.shares(degree)]
            split_names = {f"{layer}.{item.name}" for group in groups for item in group.splits}
            if self._layout.sequence:
                shared_names |= {name for name in names if name.startswith(f"{layer}.") and name not in split_names}
            else:
                shared_names |= {f"{layer}.{name}" for group in groups for name in group.shared}
        shared_names -= self._weights_by_rank.expert_parameters
        return [name for name in names if name in shared_names]

    def _repeated_elements(self, table: ShardingTable, names: Sequence[str]) -> Mapping[int, int]:
        """Returns the elements that neighbours along ``tp`` hold alike, by number of neighbours.

        They belong to blocks with fewer units than ranks, such as key heads.
        """
        degree, elements_by_holders = self._layout.degree(Mechanics.MATRICES), dict[int, int]()
        shapes = self._weights_by_rank.shapes(self._tp_index, self._ep_index)
        for layer, split, shares, group in table.splits(degree):
            name, offset = f"{layer}.{split.name}", 0
            if name not in names:
                continue
            for block in split.blocks:
                start, stop = block.span(*shares[self._tp_index], group.units)
                if block.count < degree:
                    size = self._local_run_elements(shapes[name], split.dim, offset, offset + stop - start)
                    elements_by_holders[degree // block.count] = (
                        elements_by_holders.get(degree // block.count, 0) + size
                    )
                offset += stop - start
        return elements_by_holders

    def _local_run_elements(self, shape: tuple[int, ...], dim: int, start: int, stop: int) -> int:
        """Returns the elements of a run of one dim that this rank holds once dim 0 is sharded."""
        layout = self._layout
        if dim:
            return (stop - start) * self._local_elements(((shape[0], _row_elements(shape)),)) // shape[dim]
        index = state_index(self._rank, layout.degrees, layout.zero)
        rows_per_shard = -(-shape[0] // layout.state_shards)
        return max(0, min(stop, (index + 1) * rows_per_shard) - max(start, index * rows_per_shard)) * _row_elements(
            shape
        )

    def _add_tied_gradients(self, collectives: Collectives) -> None:
        """Adds the gradients of tied weights that stages on several ranks hold."""
        degree, canonical_names = self._layout.degree(Mechanics.STAGES), self._model.first_names()
        if degree == 1:
            return
        stages_by_name: dict[str, set[int]] = {}
        for pp_index in range(degree):
            for name in (name for stage in self._weights_by_rank.stages(pp_index) for name in stage):
                stages_by_name.setdefault(canonical_names.get(name, name), set()).add(pp_index)
        shapes, stage_ranks = (
            self._weights_by_rank.shapes(self._tp_index, self._ep_index),
            self._groups.across((self._pp_axis,)).ranks,
        )
        for name, pp_indices in stages_by_name.items():
            if len(pp_indices) > 1 and self._pp_index in pp_indices:
                size = self._local_elements(((shapes[name][0], _row_elements(shapes[name])),))
                group = CollectiveGroup(self._pp_axis, tuple(stage_ranks[pp_index] for pp_index in sorted(pp_indices)))
                collectives.add(group, "all_reduce", size * self._width.master)


def _row_elements(shape: tuple[int, ...]) -> int:
    size = 1
    for count in shape[1:]:
        size *= count
    return size
