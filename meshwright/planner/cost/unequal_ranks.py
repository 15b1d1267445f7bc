"""Prices pipelines whose stages lie on several kinds of device: one `RankTimes` a kind, of which each stage has one.

The kind of device is an axis of the same arrays: all stages are priced on every kind, (kinds, N, P), and each stage's
column is taken from the kind that it lies on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.pipeline_floor import floor_parts
from meshwright.planner.cost.ranks import RankTimes, slowest_of
from meshwright.planner.cost.stages import StageCut
from meshwright.planner.cost.timing import makespan


class UnequalRankTimes:
    """Times and memory of the ranks of N layouts with P ranks along pp each, on several kinds of device.

    Args:
        by_kind: the N layouts priced on each kind.
        stage_kinds: index into ``by_kind`` of each rank of pp, P of them.
    """

    def __init__(self, by_kind: Sequence[RankTimes], stage_kinds: Sequence[int]) -> None:
        self._by_kind, self._stage_kinds = by_kind, np.array(stage_kinds)
        self.layouts, self.ranks, self.in_flight = by_kind[0].layouts, by_kind[0].ranks, by_kind[0].in_flight
        self.job, self.engine, self.model = by_kind[0].job, by_kind[0].engine, by_kind[0].model
        self.count, self.cuts, self.cut_index = by_kind[0].count, by_kind[0].cuts, by_kind[0].cut_index
        self.forward = self._by_stage([times.forward for times in by_kind])
        self.backward = self._by_stage([times.backward for times in by_kind])

    def _by_stage(self, figures: Sequence[Array]) -> Array:
        """Returns each stage's figure on its own kind, (N, P); ``figures`` has (N, P) for each kind."""
        return np.stack(figures)[self._stage_kinds, :, np.arange(self.ranks)].T

    def cut_of(self, layout_index: int) -> StageCut:
        """Returns the cut of one layout."""
        return self._by_kind[0].cut_of(layout_index)

    def step_s(self) -> Array:
        """Returns seconds of a step, (N,): the sum of `parts`."""
        return np.asarray(sum(self.parts().values()))

    def parts(self) -> dict[str, Array]:
        """Returns seconds by part of `PARTS`, (N,) each."""
        if self.is_simulated:
            by_kind = [times.optimizer_parts() for times in self._by_kind]
            update = {name: self._by_stage([parts[name] for parts in by_kind]) for name in by_kind[0]}
            parts = floor_parts(self) | slowest_of(update)
        else:
            parts = self.busy_parts(np.argmax(self.forward + self.backward, axis=1))
            parts["bubble"] = np.maximum(self._pipeline_s() - sum(parts.values()), 0.0)
            parts = parts | self.update_parts()
        parts |= {"step": np.full(self.layouts.count, self.engine.runtime.host_step_s)}
        return parts | {"stragglers": self.straggler_share() * sum(parts.values())}

    def busy_parts(self, rank: Array) -> dict[str, Array]:
        """Returns seconds by part, (N,), of all micro-batches on one rank of each layout; ``rank`` is (N,) int64."""
        return self._of_kind([times.busy_parts(rank) for times in self._by_kind], self._stage_kinds[rank])

    def straggler_share(self) -> Array:
        """Returns what a step waits for the slowest of its nodes, over the step, (N,)."""
        return self._by_kind[0].straggler_share()

    # ---------------------------------------------------------------- for the simulation

    @property
    def is_simulated(self) -> bool:
        """Whether a pipeline's time is that of its actions, and here their lower bound."""
        return self._by_kind[0].is_simulated

    @cached_property
    def compute_forward(self) -> Array:
        """Seconds of each rank on a micro-batch's forward, without waiting for sends, (N, P)."""
        return self._by_stage([times.compute_forward for times in self._by_kind])

    @cached_property
    def compute_backward(self) -> Array:
        """Seconds of each rank on a micro-batch's backward, without waiting for sends, (N, P)."""
        return self._by_stage([times.compute_backward for times in self._by_kind])

    @cached_property
    def send_work_s(self) -> Array:
        """Seconds of each rank itself for the sends and receives of a micro-batch's forward or backward, (N, P)."""
        return self._by_stage([times.send_work_s for times in self._by_kind])

    @cached_property
    def weight(self) -> Array:
        """Seconds of a micro-batch's weight gradients, which a schedule may delay, (N, P)."""
        return self._by_stage([times.weight for times in self._by_kind])

    @cached_property
    def first_stages(self) -> tuple[Array, Array, Array]:
        """Of each rank's lowest stage: forward, backward, and its part of the rank's parameters; (N, P) each."""
        forward, backward, share = (
            self._by_stage(list(item)) for item in zip(*(t.first_stages for t in self._by_kind))
        )
        return forward, backward, share

    @cached_property
    def pipeline_traffic(self) -> tuple[WireTime, WireTime]:
        """Gathers at the start of a step, and sums of gradients at its end, (N, P) each."""
        by_kind = zip(*(times.pipeline_traffic for times in self._by_kind))
        gather, reduce = (self._wire_by_stage(list(item)) for item in by_kind)
        return gather, reduce

    def carried(self, *, is_backward: bool) -> WireTime:
        """Returns the layers' own traffic in a micro-batch's forward or backward, hidden or not, (N, P) each."""
        return self._wire_by_stage([times.carried(is_backward=is_backward) for times in self._by_kind])

    def stage_sends_s(self) -> tuple[Array, Array]:
        """Returns seconds of one send of an activation (inside a node, between nodes), (N,): of the slowest links."""
        inside_s, outside_s = zip(*(times.stage_sends_s() for times in self._by_kind))
        return np.max(inside_s, axis=0), np.max(outside_s, axis=0)

    def hops_s(self) -> tuple[Array, Array]:
        """Returns what is left of `stage_sends_s` beside the work of sender and receiver, (N,) each."""
        inside_s, outside_s = zip(*(times.hops_s() for times in self._by_kind))
        return np.max(inside_s, axis=0), np.max(outside_s, axis=0)

    def last_stage_s(self, splits: Array) -> Array:
        """Returns seconds of the last stage on a micro-batch, (N,), without weight gradients where ``splits``, (N,)."""
        last_rank = np.array([cut.last_rank for cut in self.cuts])[self.cut_index]
        by_kind = np.stack([times.last_stage_s(splits) for times in self._by_kind])
        return np.asarray(by_kind[self._stage_kinds[last_rank], np.arange(self.count)])

    def stage_passes(self, cut: StageCut, index: Array) -> tuple[Array, Array, Array, Array]:
        """Returns what `RankTimes.stage_passes` does, of each stage on its own kind."""
        kinds = self._stage_kinds[np.array(cut.owners)]
        by_kind = zip(*(times.stage_passes(cut, index) for times in self._by_kind))
        forward, backward, weight, share = (np.stack(item)[kinds, :, np.arange(len(kinds))].T for item in by_kind)
        return forward, backward, weight, share

    def _wire_by_stage(self, wires: Sequence[WireTime]) -> WireTime:
        shape, names = (self.count, self.ranks), (field.name for field in dataclasses.fields(WireTime))
        return WireTime(
            *(self._by_stage([np.broadcast_to(getattr(wire, name), shape) for wire in wires]) for name in names)
        )

    def _pipeline_s(self) -> Array:
        """Returns seconds of all micro-batches, (N,): the makespan, and no less than the busiest stage computes."""
        # The closed form of 1F1B is exact for unequal stages, others' may fall short of the busiest one.
        busiest_s = self.layouts.microbatches * (self.forward + self.backward).max(axis=1)
        return np.maximum(makespan(self.layouts, self.forward, self.backward, self.weight), busiest_s)

    def update_parts(self) -> dict[str, Array]:
        """Returns seconds by part, (N,) each, after the last backward: those of the kind that takes longest."""
        by_kind = [times.update_parts() for times in self._by_kind]
        update_s = np.stack([np.sum(list(parts.values()), axis=0) for parts in by_kind])
        return self._of_kind(by_kind, np.argmax(update_s, axis=0))

    def _of_kind(self, by_kind: Sequence[Mapping[str, Array]], kind: Array) -> dict[str, Array]:
        """Returns figures, (N,) each, of one kind for each layout; ``kind`` is (N,) int64."""
        layouts = np.arange(self.layouts.count)
        return {name: np.stack([parts[name] for parts in by_kind])[kind, layouts] for name in by_kind[0]}

    def memory(self) -> dict[str, Array]:
        """Returns bytes by part, (N, P) each, as `RankTimes.memory`."""
        return self._bytes_by_stage([times.memory() for times in self._by_kind])

    @property
    def most_bytes(self) -> dict[str, Array]:
        """Bytes by part, each when it is most, (N, P) each, as `RankTimes.most_bytes`."""
        return self._bytes_by_stage([times.most_bytes for times in self._by_kind])

    def _bytes_by_stage(self, by_kind: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        return {name: self._by_stage([memory[name] for memory in by_kind]) for name in by_kind[0]}


PricedRanks = RankTimes | UnequalRankTimes
"""Times and memory of ranks on one kind of device or on several."""
