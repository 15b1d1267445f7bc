"""Sums the costs of layers over the ranks, or the stages, of N layouts' pipelines: arrays (N, P).

A micro-batch costs a rank the sum of its layers (`LayerCost`, (N,) each) times their counts on the rank, (N, P).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.array_types import Index
from meshwright.planner.cost.embedding_and_head import price_embedding, price_head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine, WireTime
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layer_cost import LayerCost, PassTime
from meshwright.planner.cost.layers import price_layer
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.stages import StageCut, block_kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Costs of each kind of layer and of the model's ends on N layouts, independent of the pipeline's cuts."""

    model: PricedModel
    """Job, machine and profile that the layouts share."""
    layers: tuple[LayerCost, ...]
    """Cost of each kind of layer; figures are (N,) float64 or scalars."""
    embedding: LayerCost
    """Cost of the embedding, on the first stage."""
    head: LayerCost
    """Cost of last norm, head and loss, on the last stage."""

    @classmethod
    def of(
        cls, job: PricedJob, layouts: LayoutBatch, machine: Machine, engine: FrameworkProfile, timed: bool = True
    ) -> LayerCosts:
        """Prices the layers and ends of a model on N layouts.

        Args:
            job: model and batch.
            layouts: N layouts.
            machine: the hardware.
            engine: the runtime's profile.
            timed: price time and traffic too; else they are 0.
        """
        model = PricedModel(job, layouts, machine, engine)
        first, kind_of = layouts.layer_kinds()
        of_kinds = model.take(first) if len(first) < layouts.count else model
        price = price_layer if timed else price_bytes
        costs = [price(of_kinds, job.shape.blocks[block]) for block in block_kinds(job.shape)[1]]
        costs += [price_embedding(of_kinds, timed), price_head(of_kinds, timed)]
        if of_kinds is not model:
            costs = [_take_layouts(cost, kind_of, len(first)) for cost in costs]
        *layers, embedding, head = costs
        return cls(model=model, layers=tuple(layers), embedding=embedding, head=head)

    def take(self, index: Index) -> LayerCosts:
        """Returns the costs of the layouts at an index, slice or mask."""
        count = self.model.layouts.count
        return LayerCosts(
            model=self.model.take(index),
            layers=tuple(_take_layouts(cost, index, count) for cost in self.layers),
            embedding=_take_layouts(self.embedding, index, count),
            head=_take_layouts(self.head, index, count),
        )


def _take_layouts(cost: Any, index: Index, count: int) -> Any:
    """Returns a cost's figures of some layouts; a scalar that all layouts share stays as it is."""
    fields: dict[str, Any] = {}
    for name in cost.__dataclass_fields__:
        value = getattr(cost, name)
        if isinstance(value, dict):
            fields[name] = {key: _take_values(item, index, count) for key, item in value.items()}
        else:
            fields[name] = (
                _take_layouts(value, index, count) if isinstance(value, PassTime) else _take_values(value, index, count)
            )
    return type(cost)(**fields)


def _take_values(value: Any, index: Index, count: int) -> Any:
    """Returns the values of some of ``count`` layouts; a scalar stays as it is."""
    return value[index] if isinstance(value, np.ndarray) and value.shape == (count,) else value


class LayerSums:
    """Costs of N layouts' layers, summed over P ranks along pp, or over P stages.

    Args:
        costs: of the layers on these layouts.
        cuts: distinct cuts of the model over P ranks or stages.
        cut_index: each layout's index among them, (N,) int64.
    """

    def __init__(self, costs: LayerCosts, cuts: Sequence[StageCut], cut_index: Array) -> None:
        self.costs, self.model = costs, costs.model
        self.job, self.layouts, self.engine = self.model.job, self.model.layouts, self.model.engine
        self.count, self.ranks = self.layouts.count, cuts[0].counts.shape[1]
        self.cuts, self.cut_index = cuts, cut_index
        self.counts = self.of_cuts([cut.counts for cut in self.cuts])
        index = [0] if len(self.cuts) == 1 else cut_index
        self.first_rank = np.array([cut.first_rank for cut in self.cuts])[index]
        self.last_rank = np.array([cut.last_rank for cut in self.cuts])[index]

    def cut_of(self, layout_index: int) -> StageCut:
        """Returns the cut of one layout."""
        return self.cuts[int(self.cut_index[layout_index])]

    def of_cuts(self, counts: Sequence[Array]) -> list[Array]:
        """Returns each layout's counts, (N or 1, P) for each kind of layer, from those of each cut, (kinds, P)."""
        if len(self.cuts) == 1:
            return [row[None, :] for row in counts[0]]
        return list(np.stack(counts, axis=1)[:, self.cut_index])

    def sum_layers(self, figure: Callable[[LayerCost], Any]) -> Array:
        """Returns the sum of a figure over each rank's layers, (N, P)."""
        total = np.zeros((self.count, self.ranks))
        for cost, counts in zip(self.costs.layers, self.counts):
            total += np.broadcast_to(figure(cost), self.count)[:, None] * counts
        return total

    def sum_layers_and_ends(self, figure: Callable[[LayerCost], Any]) -> Array:
        """Returns the sum of a figure over each rank's layers and ends, (N, P)."""
        total = self.sum_layers(figure)
        self._add_to_rank(total, self.first_rank, figure(self.costs.embedding))
        self._add_to_rank(total, self.last_rank, figure(self.costs.head))
        return total

    def _add_to_rank(self, total: Array, rank: Array, value: Any) -> None:
        """Adds ``value``, (N,), to one rank of each layout in ``total``, (N, P), in place; ``rank`` is (N,) or (1,)."""
        if len(rank) == 1:
            total[:, rank[0]] += value
        else:
            total[np.arange(self.count), rank] += value

    def sum_on_rank(self, figure: Callable[[LayerCost], Any], rank: Array) -> Array:
        """Returns one rank's column of `sum_layers_and_ends` for each layout, (N,); ``rank`` is (N,) int64."""
        total = np.zeros(self.count)
        for cost, counts in zip(self.costs.layers, self.counts):
            total += figure(cost) * (counts[0, rank] if len(counts) == 1 else counts[np.arange(self.count), rank])
        total += np.where(rank == self.first_rank, figure(self.costs.embedding), 0.0)
        return total + np.where(rank == self.last_rank, figure(self.costs.head), 0.0)

    @cached_property
    def forward_busy(self) -> Array:
        """Device seconds of a micro-batch's forward, (N, P)."""
        return self.sum_layers_and_ends(lambda cost: cost.forward.busy)

    @cached_property
    def backward_busy(self) -> Array:
        """Device seconds of a micro-batch's backward, (N, P)."""
        return self.sum_layers_and_ends(lambda cost: cost.backward.busy)

    def carried(self, *, is_backward: bool) -> WireTime:
        """Returns the layers' own traffic in a micro-batch's forward or backward, hidden or not, (N, P) each."""

        def pass_of(cost: LayerCost) -> PassTime:
            return cost.backward if is_backward else cost.forward

        inside_s = self.sum_layers_and_ends(lambda cost: pass_of(cost).inside)
        outside_s = self.sum_layers_and_ends(lambda cost: pass_of(cost).outside)
        return WireTime(np.maximum(inside_s, outside_s), inside_s, outside_s)

    @cached_property
    def forward_host(self) -> Array:
        """Host seconds of a micro-batch's forward, (N, P)."""
        return self.sum_layers_and_ends(lambda cost: cost.forward.host) + self.engine.runtime.host_microbatch_s / 2

    @cached_property
    def backward_host(self) -> Array:
        """Host seconds of a micro-batch's backward, (N, P)."""
        return self.sum_layers_and_ends(lambda cost: cost.backward.host) + self.engine.runtime.host_microbatch_s / 2

    def with_host_s(self, busy_s: Array, host_s: Array) -> Array:
        """Returns seconds of a pass, (N, P), from those of the device and of the host that launches it.

        A host that runs ahead of the device bounds the pass from below; processor cores compute what they launch.
        """
        return np.maximum(busy_s, host_s) if self.engine.runtime.host_runs_ahead else busy_s + host_s

    @property
    def weight(self) -> Array:
        """Seconds of a micro-batch's weight gradients, which a schedule may delay, (N, P)."""
        # Half of backward's products are weight gradients; recompute keeps them together, and so do tp's hidden sums.
        layouts = self.layouts
        can_split = (layouts.recompute == 0) & (layouts.tp_overlap == 0) & (layouts.ep_halves == 0)
        can_split = can_split[:, None] & self.job.splits_backward
        return np.asarray(self.sum_layers_and_ends(lambda cost: cost.backward.matmul) / 2 * can_split)
