# long: what a rank computes and sends is one table
"""Prices the pipeline ranks of N layouts with P ranks along pp each: time and memory as arrays (N, P)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from functools import reduce as fold
from operator import attrgetter
from typing import Any

import numpy as np

from meshwright.cluster.host import HostShare
from meshwright.errors import PlanError
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layer_sums import LayerSums
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.offload import price_offload
from meshwright.planner.cost.pipeline_floor import bound_s, floor_parts, sends_of_cut
from meshwright.planner.cost.prices import LAYER_TRAFFIC
from meshwright.planner.cost.rank_bytes import RankBytes
from meshwright.planner.cost.stages import StageCut, block_kinds
from meshwright.planner.cost.timing import makespan

PASS_PARTS = ("matmul", "attention", "elementwise", "recompute", *LAYER_TRAFFIC)
"""Parts of a layer's pass that are parts of a step too."""


def slowest_of(parts: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the parts, (N, P) each, of the rank that takes longest, (N,) each: the others wait for it."""
    slowest_rank = np.argmax(fold(np.add, parts.values()), axis=1)[:, None]
    return {name: np.take_along_axis(seconds, slowest_rank, 1)[:, 0] for name, seconds in parts.items()}


class RankTimes(RankBytes):
    """Times and memory of the ranks of N layouts with P ranks along pp each; their cuts may differ.

    Args:
        costs: of the layers on these layouts.
    """

    @cached_property
    def regathered(self) -> tuple[Array, Array]:
        """(dense, expert) parameters of each rank that ZeRO-3 gathers for backward too, (N, P) each.

        Backward reads no embedding, and finds the head and what else is outside of the layers gathered.
        """
        if self.engine.runtime.regathers_ends():
            return self.parameters
        return self.sum_layers(lambda cost: cost.parameters), self.sum_layers(lambda cost: cost.experts)

    @cached_property
    def exposed_send_s(self) -> Array:
        """Exposed seconds of a send to the next stage, (N,)."""
        piped = self.ranks > 1
        exposed = self.engine.runtime.exposed_send_s(self.communication.send_s()) if piped else 0.0
        return np.broadcast_to(exposed, self.count)

    @cached_property
    def engine_action_s(self) -> Any:
        """Seconds of pipeline overhead on a forward or backward of all stages of a rank, (N,)."""
        return self.engine.runtime.action_s * (self.ranks > 1) * self.layouts.stages

    @cached_property
    def compute_forward(self) -> Array:
        """Seconds of each rank on a micro-batch's forward, without waiting for sends, (N, P)."""
        action_s = np.broadcast_to(self.engine_action_s, self.count)[:, None]
        return self.with_host_s(self.forward_busy, self.forward_host) + action_s + self.send_work_s

    @cached_property
    def compute_backward(self) -> Array:
        """Seconds of each rank on a micro-batch's backward, without waiting for sends, (N, P)."""
        action_s = np.broadcast_to(self.engine_action_s, self.count)[:, None]
        backward_s = self.with_host_s(self.backward_busy + self.accumulation_s, self.backward_host)
        return backward_s + action_s + self.send_work_s

    @cached_property
    def send_work_s(self) -> Array:
        """Seconds of each rank itself for the sends and receives of a micro-batch's forward or backward, (N, P)."""
        sends = [sends_of_cut(self, cut) for cut in self.cuts]
        inside, outside = (np.stack([getattr(item, name) for item in sends]) for name in ("inside", "outside"))
        return self._work_of_sends_s(inside[self.cut_index], outside[self.cut_index])

    def _work_of_sends_s(self, inside: Array, outside: Array, index: Any = slice(None)) -> Array:
        """Returns the ranks' own seconds in one pass for sends of both passes together, (n, P) or (n, S)."""
        inside_s, outside_s = (seconds[index, None] for seconds in self.communication.send_work_s())
        # Of a send and a receive each has half, and each result is one rank's send and the other's receive.
        return (inside * inside_s + outside * outside_s) / 2.0

    @cached_property
    def first_stages(self) -> tuple[Array, Array, Array]:
        """Of each rank's lowest stage: forward, backward, and its part of the rank's parameters; (N, P) each."""
        counts = self.of_cuts([cut.first_counts for cut in self.cuts])
        # The head is on a rank's lowest stage where every rank has one stage.
        has_head = np.array([len(cut.owners) == self.ranks for cut in self.cuts])[self.cut_index]

        def sum_first(figure: Any) -> Array:
            total = np.zeros((self.count, self.ranks))
            for cost, number in zip(self.costs.layers, counts):
                total += np.broadcast_to(figure(cost), self.count)[:, None] * number
            self._add_to_rank(total, self.first_rank, figure(self.costs.embedding))
            self._add_to_rank(total, self.last_rank, figure(self.costs.head) * has_head)
            return total

        def elements(cost: Any) -> Any:
            return cost.parameters + cost.experts

        share = sum_first(elements) / np.maximum(self.sum_layers_and_ends(elements), 1.0)
        firsts = [[cut.owners.index(rank) for rank in range(self.ranks)] for cut in self.cuts]
        sends = [(sends_of_cut(self, cut), first) for cut, first in zip(self.cuts, firsts)]
        inside = np.stack([item.stage_inside[first] for item, first in sends])[self.cut_index]
        outside = np.stack([item.stage_outside[first] for item, first in sends])[self.cut_index]
        action_s = self.engine.runtime.action_s + self._work_of_sends_s(inside, outside)
        forward = self.with_host_s(sum_first(lambda cost: cost.forward.busy), sum_first(lambda cost: cost.forward.host))
        backward = self.with_host_s(
            sum_first(lambda cost: cost.backward.busy) + self.accumulation_s * share,
            sum_first(lambda cost: cost.backward.host),
        )
        return forward + action_s, backward + action_s, share

    def stage_sends_s(self) -> tuple[Array, Array]:
        """Returns seconds of one send of an activation (inside a node, between nodes), (N,) each."""
        return self.communication.stage_sends_s()

    def hops_s(self) -> tuple[Array, Array]:
        """Returns what is left of `stage_sends_s` beside the work of sender and receiver, (N,) each."""
        inside_work_s, outside_work_s = self.communication.send_work_s()
        inside_s, outside_s = self.stage_sends_s()
        return inside_s - inside_work_s, outside_s - outside_work_s

    def stage_passes(self, cut: StageCut, index: Array) -> tuple[Array, Array, Array, Array]:
        """Returns forward, backward, weight gradients and part of its rank's parameters of each stage, (n, S) each.

        Args:
            cut: that the layouts share; with one stage a rank they share its owners alone.
            index: of n layouts, (n,) int64.
        """
        owners = np.array(cut.owners)
        if len(owners) == self.ranks:
            passes = (self.compute_forward, self.compute_backward, np.minimum(self.weight, self.compute_backward))
            forward, backward, weight = (seconds[index][:, owners] for seconds in passes)
            return forward, backward, weight, np.ones_like(forward)
        costs = self.costs.take(index)
        sums = LayerSums(costs, [cut.of_stages(block_kinds(self.job.shape)[0])], np.zeros(len(index), int))
        elements = sums.sum_layers_and_ends(lambda cost: cost.parameters + cost.experts)
        of_ranks = np.stack([elements[:, owners == rank].sum(axis=1) for rank in range(self.ranks)], axis=1)
        share = elements / np.maximum(of_ranks, 1.0)[:, owners]
        sends = sends_of_cut(self, cut)
        action_s = self.engine.runtime.action_s + self._work_of_sends_s(sends.stage_inside, sends.stage_outside, index)
        forward = sums.with_host_s(sums.forward_busy, sums.forward_host) + action_s
        accumulation_s = self.accumulation_s[index][:, owners] * share
        backward = sums.with_host_s(sums.backward_busy + accumulation_s, sums.backward_host) + action_s
        return forward, backward, np.minimum(sums.weight, backward), share

    def last_stage_s(self, splits: Array) -> Array:
        """Returns seconds of the last stage on a micro-batch, (N,), without weight gradients where ``splits``, (N,)."""
        counts = np.stack([cut.last_counts for cut in self.cuts], axis=1)[:, self.cut_index]

        def sum_last(figure: Any) -> Array:
            total = np.zeros(self.count) + figure(self.costs.head)
            for cost, number in zip(self.costs.layers, counts):
                total = total + figure(cost) * number
            return total

        forward = self.with_host_s(sum_last(lambda cost: cost.forward.busy), sum_last(lambda cost: cost.forward.host))
        backward = self.with_host_s(
            sum_last(lambda cost: cost.backward.busy), sum_last(lambda cost: cost.backward.host)
        )
        weight = np.minimum(sum_last(lambda cost: cost.backward.matmul) / 2.0, backward)
        return np.asarray(forward + backward - np.where(splits, weight, 0.0))

    @cached_property
    def accumulation_s(self) -> Array:
        """Seconds to add a micro-batch's gradients to the accumulated ones, (N, P)."""
        runtime, (dense, experts) = self.engine.runtime, self.trained()
        if not runtime.accumulate_bytes:
            return np.zeros_like(dense)
        # Where every micro-batch's gradients are scattered, a rank adds up its own part of them.
        scatters_each = (self.layouts.zero >= 2) & ~self.engine.states.gathers_once(self.layouts.pp)
        added = np.where(
            (scatters_each & runtime.reduces_each())[:, None], self.owned_parameters(dense, experts), dense + experts
        )
        added = added * runtime.accumulated_share(self.layouts.microbatches)[:, None]
        return move_s(added * runtime.accumulate_bytes, self.model.machine.device)

    @cached_property
    def forward(self) -> Array:
        """Seconds of each rank on a micro-batch's forward, exposed traffic included, (N, P)."""
        extra = (self.exposed_send_s * self.layouts.stages + self.engine_action_s)[:, None]
        return self.with_host_s(self.forward_busy, self.forward_host) + extra

    @cached_property
    def backward(self) -> Array:
        """Seconds of each rank on a micro-batch's backward, exposed traffic included, (N, P)."""
        extra = (self.exposed_send_s * self.layouts.stages + self.engine_action_s)[:, None]
        return self.with_host_s(self.backward_busy + self.accumulation_s, self.backward_host) + extra

    def compute_s(self) -> Array:
        """Returns a lower bound on `step_s`, (N,): the busiest rank's passes, without sums, sends and waiting."""
        forward_s = self.with_host_s(self.forward_busy, self.forward_host)
        backward_s = self.with_host_s(self.backward_busy, self.backward_host)
        busiest_s = (forward_s + backward_s).max(axis=1) * self.layouts.microbatches
        return np.asarray(busiest_s * (1.0 + self.straggler_share()))

    def step_s(self) -> Array:
        """Returns seconds of a step, (N,): the sum of `parts`."""
        return np.asarray(sum(self.parts().values()))

    def parts(self) -> dict[str, Array]:
        """Returns seconds by part of `PARTS`, (N,) each."""
        step = np.full(self.count, self.engine.runtime.host_step_s)
        if self.is_simulated:
            parts = floor_parts(self) | slowest_of(self.optimizer_parts()) | {"step": step}
        else:
            parts = self.pipeline_parts() | self.update_parts() | {"step": step}
        return parts | {"stragglers": self.straggler_share() * sum(parts.values())}

    def straggler_share(self) -> Array:
        """Returns what a step waits for the slowest of its nodes, over the step, (N,)."""
        nodes = np.maximum(self.layouts.world / self.model.machine.node_devices, 1.0)
        return self.engine.runtime.straggler_share(nodes)

    @property
    def is_simulated(self) -> bool:
        """Whether a pipeline's time is that of its actions, and here their lower bound."""
        return self.ranks > 1 and self.engine.runtime.simulated

    @cached_property
    def pipeline_traffic(self) -> tuple[WireTime, WireTime]:
        """Of a simulated pipeline: gathers at the start of a step, and sums of gradients at its end, (N, P) each."""
        return self.communication.pipeline_gathers(self), self.communication.pipeline_sums(self)

    def bound_s(self) -> Array:
        """Returns seconds of all micro-batches, (N,), without traffic of data axes: at most those of any sharing."""
        return bound_s(self) if self.is_simulated else np.asarray(sum(self.pipeline_parts().values()))

    def pipeline_parts(self) -> dict[str, Array]:
        """Returns seconds by part, (N,), of all micro-batches: the slowest rank's work, and the bubble."""
        makespan_s = makespan(self.layouts, self.forward, self.backward, self.weight)
        if self.ranks > 1:
            makespan_s = np.maximum(makespan_s, self.communication.crossing_sends_s())
        # In the steady phase every rank waits for the slowest: its work fills the step, the remainder is bubble.
        parts = self.busy_parts(np.argmax(self.forward + self.backward, axis=1))
        parts["bubble"] = np.maximum(makespan_s - sum(parts.values()), 0.0)
        return parts

    def busy_parts(self, rank: Array) -> dict[str, Array]:
        """Returns seconds by part, (N,), of all micro-batches on one rank of each layout; ``rank`` is (N,) int64."""
        microbatches, rank_column = self.layouts.microbatches, rank[:, None]
        parts = {}
        for name in PASS_PARTS:
            both_passes = attrgetter(f"forward.{name}", f"backward.{name}")
            both_s = self.sum_on_rank(lambda cost, read=both_passes: sum(read(cost)), rank)  # type: ignore[misc]
            parts[name] = both_s * microbatches
        parts["elementwise"] = (
            parts["elementwise"] + np.take_along_axis(self.accumulation_s, rank_column, 1)[:, 0] * microbatches
        )
        # The device idles where the host takes longer to launch a pass than the device to run it.
        backward_busy = self.backward_busy + self.accumulation_s
        idle_s = self.with_host_s(self.forward_busy, self.forward_host) - self.forward_busy
        idle_s = idle_s + self.with_host_s(backward_busy, self.backward_host) - backward_busy
        parts["host"] = np.take_along_axis(idle_s, rank_column, 1)[:, 0] * microbatches
        parts["engine"] = 2 * self.engine_action_s * microbatches
        parts["send"] = 2 * self.exposed_send_s * self.layouts.stages * microbatches
        return parts

    def update_parts(self) -> dict[str, Array]:
        """Returns seconds by part, (N,), of the data axes' gathers and reductions, and of the update."""
        reduce_s = self.communication.reduce_s(self, *self.trained())
        slowest_parts = slowest_of({"reduce": reduce_s} | self.optimizer_parts())
        return {"gather": self.communication.gather_s(self)} | slowest_parts

    def optimizer_parts(self) -> dict[str, Array]:
        """Returns seconds by part of the update and of copies to and from host memory, (N, P) each."""
        owned, size = self.owned_parameters(*self.trained()), float(master_bytes(self.job.precision))
        update_s = move_s(owned * self.engine.runtime.update_bytes * size / 4.0, self.model.machine.device)
        if not self.layouts.offload.any():
            return {"optimizer": update_s, "offload": np.zeros_like(update_s)}
        host_update_s, copy_s = price_offload(self, owned, self._host_share(), size)
        return {"optimizer": np.where(self.layouts.offload[:, None] > 0, host_update_s, update_s), "offload": copy_s}

    def _host_share(self) -> HostShare:
        """Returns a rank's share of its host; raises where none is known."""
        host = self.model.machine.host
        if host is None:
            raise PlanError("nothing can be offloaded: no host memory, its bandwidth or the link to it is known")
        return host
