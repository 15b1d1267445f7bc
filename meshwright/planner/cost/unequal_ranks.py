"""Prices pipelines whose stages lie on several kinds of device: one `RankTimes` a kind, of which each stage has one.

The kind of device is an axis of the same arrays: all stages are priced on every kind, (kinds, N, P), and each stage's
column is taken from the kind that it lies on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.ranks import RankTimes
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
        update_s = sum(self.update_parts().values())
        step_s = self._pipeline_s() + update_s + self._by_kind[0].engine.runtime.host_step_s
        return np.asarray(step_s * (1.0 + self._by_kind[0].straggler_share()))

    def parts(self) -> dict[str, Array]:
        """Returns seconds by part of `PARTS`, (N,) each."""
        busiest = np.argmax(self.forward + self.backward, axis=1)
        parts = self._of_kind([times.busy_parts(busiest) for times in self._by_kind], self._stage_kinds[busiest])
        parts["bubble"] = np.maximum(self._pipeline_s() - sum(parts.values()), 0.0)
        step = np.full(self.layouts.count, self._by_kind[0].engine.runtime.host_step_s)
        parts = parts | self.update_parts() | {"step": step}
        return parts | {"stragglers": self._by_kind[0].straggler_share() * sum(parts.values())}

    def _pipeline_s(self) -> Array:
        """Returns seconds of all micro-batches, (N,): the makespan, and no less than the busiest stage computes."""
        # The closed form of 1F1B is exact for unequal stages, others' may fall short of the busiest one.
        weight = self._by_stage([times.weight for times in self._by_kind])
        busiest_s = self.layouts.microbatches * (self.forward + self.backward).max(axis=1)
        return np.maximum(makespan(self.layouts, self.forward, self.backward, weight), busiest_s)

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
        by_kind = [times.memory() for times in self._by_kind]
        return {name: self._by_stage([memory[name] for memory in by_kind]) for name in by_kind[0]}


PricedRanks = RankTimes | UnequalRankTimes
"""Times and memory of ranks on one kind of device or on several."""
