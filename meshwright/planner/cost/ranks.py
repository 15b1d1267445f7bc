# long: what a rank computes, sends and holds is one table
"""Prices the pipeline ranks of N layouts with P ranks along pp each: time and memory as arrays (N, P)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from functools import reduce as fold
from operator import attrgetter
from typing import Any

import numpy as np

from meshwright.cluster.host import HostShare
from meshwright.errors import PlanError
from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.element_bytes import compute_bytes, master_bytes
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layer_cost import LayerCost
from meshwright.planner.cost.layer_sums import LayerCosts, LayerSums
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.offload import PARAMETERS, move_state_to_host, price_offload
from meshwright.planner.cost.pipeline_floor import bound_s, floor_parts, sends_of_cut
from meshwright.planner.cost.prices import LAYER_TRAFFIC, MEMORY
from meshwright.planner.cost.stages import StageCut, block_kinds, cut_stages, recomputed_layers
from meshwright.planner.cost.state_bytes import StateElements, owned_parameters, state_bytes
from meshwright.planner.cost.step_memory import ActivationParts, StateRules, UnitElements, peak_parts
from meshwright.planner.cost.timing import in_flight_microbatches, makespan
from meshwright.schedules.spec import ScheduleSpec

PASS_PARTS = ("matmul", "attention", "elementwise", "recompute", *LAYER_TRAFFIC)
"""Parts of a layer's pass that are parts of a step too."""
OFFLOADABLE = ("parameters", "gradients", "optimizer")
"""Parts of a rank's memory that may lie in host memory."""


def slowest_of(parts: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the parts, (N, P) each, of the rank that takes longest, (N,) each: the others wait for it."""
    slowest_rank = np.argmax(fold(np.add, parts.values()), axis=1)[:, None]
    return {name: np.take_along_axis(seconds, slowest_rank, 1)[:, 0] for name, seconds in parts.items()}


def _stage_owners(spec: ScheduleSpec, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the rank along pp of each stage."""
    return tuple(spec.rank_of(stage, ranks) for stage in range(ranks * stages_per_rank))


def _distinct_cuts(model: PricedModel) -> tuple[list[StageCut], Array]:
    """Returns the distinct cuts, and each layout's index among them, (N,) int64."""
    layouts, specs, ranks = model.layouts, model.layouts.schedules, int(model.layouts.pp[0])
    # Schedules that place their stages on the same ranks cut the model in the same way, so they share a key.
    owners = [spec.owners or spec.placement for spec in specs]
    owners_code = np.array([owners.index(owner) for owner in owners])
    keys, cut_index = np.unique(
        layouts.stages * len(specs) + owners_code[layouts.schedule.astype(int)], return_inverse=True
    )
    stages_and_specs = [(int(key) // len(specs), specs[int(key) % len(specs)]) for key in keys]
    stages_specs_splits: list[Any] = [(*key, None) for key in stages_and_specs]
    if layouts.splits:
        index_by_key: dict[Any, int] = {}
        split_keys = [(int(index), split) for index, split in zip(cut_index, layouts.splits)]
        cut_index = np.array([index_by_key.setdefault(key, len(index_by_key)) for key in split_keys])
        stages_specs_splits = [(*stages_and_specs[index], split) for index, split in index_by_key]
    rule = model.engine.split
    # A layout's own split of its layers goes before the framework's rule.
    return [
        cut_stages(model.job.shape, ranks, stages, _stage_owners(spec, ranks, stages), rule, split)
        for stages, spec, split in stages_specs_splits
    ], cut_index


class RankTimes(LayerSums):
    """Times and memory of the ranks of N layouts with P ranks along pp each; their cuts may differ.

    Args:
        costs: of the layers on these layouts.
    """

    def __init__(self, costs: LayerCosts) -> None:
        super().__init__(costs, *_distinct_cuts(costs.model))
        self.in_flight = in_flight_microbatches(self.layouts, self.ranks)
        self.communication = CommunicationTimes(self.model)

    @cached_property
    def parameters(self) -> tuple[Array, Array]:
        """(dense, expert) parameters of each rank before the data axes shard them, (N, P) each."""
        dense = self.sum_layers_and_ends(lambda cost: cost.parameters)
        if self.job.shape.tied:
            # A tied embedding and head on one rank are one weight.
            tied_parameters = self.job.shape.vocab * self.job.shape.width / self.layouts.tp
            self._add_to_rank(
                dense, self.first_rank, -np.where(self.last_rank == self.first_rank, tied_parameters, 0.0)
            )
        return dense, self.sum_layers_and_ends(lambda cost: cost.experts)

    @cached_property
    def regathered(self) -> tuple[Array, Array]:
        """(dense, expert) parameters of each rank that ZeRO-3 gathers for backward too, (N, P) each.

        Backward reads no embedding, and finds the head and what else is outside of the layers gathered.
        """
        if self.engine.runtime.regathers_ends():
            return self.parameters
        return self.sum_layers(lambda cost: cost.parameters), self.sum_layers(lambda cost: cost.experts)

    def trained(self) -> tuple[Array, Array]:
        """Returns (dense, expert) trained parameters, (N, P) each; with adapters 0, as they are too few to count."""
        dense, experts = self.parameters
        return (dense * 0.0, experts * 0.0) if self.job.adapters else (dense, experts)

    def owned_parameters(self, dense: Array, experts: Array) -> Array:
        """Returns the parameters that a rank owns after the data axes shard ``dense`` and ``experts``; all (N, P)."""
        return np.asarray(owned_parameters(self.engine.states, self.layouts, dense, experts, self.job.shape.experts))

    @cached_property
    def layers(self) -> Array:
        """Number of layers of each rank, (N or 1, P)."""
        return np.asarray(sum(self.counts))

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

    def memory(self) -> dict[str, Array]:
        """Returns bytes by part of `MEMORY` at the fullest moment, (N, P) each.

        Also ``allocated``, ``reserved`` and ``peak``; if any layout offloads, ``host``, the bytes in host memory, and
        ``unoffloaded_peak``, as if all stayed.
        """
        layouts, engine, memory = self.layouts, self.engine, dict(self.most_bytes)
        update, moved = memory.pop("update"), memory.pop("moved", None)
        if engine.states.walks_backward:
            memory |= self._peak_parts(memory)
        # Activations and the update's temporaries are never alive together, so the larger counts.
        resident = sum(memory[name] for name in ("parameters", "gradients", "optimizer", "buffers"))
        forward = memory["activations"] + memory["logits"]
        memory["allocated"] = resident + np.maximum(forward, update) + engine.workspace_bytes
        reserved = resident + np.maximum(forward * engine.allocator, update) + engine.allocator_bytes
        memory["reserve"] = reserved - resident - forward + engine.context_bytes
        # Where memory is short the allocator waits for what is freed late, so that only what is reserved counts it.
        elements = self.model.tokens * self.job.shape.width
        late_bytes = engine.saved.late_bytes(layouts, elements, self.job.shape.width, self.layers, self.in_flight)
        memory["reserved"] = reserved + engine.allocator * late_bytes
        memory["peak"] = np.asarray(sum(memory[name] for name in MEMORY))
        if moved is not None:
            memory["unoffloaded_peak"] = memory["peak"] + moved
        return memory

    @cached_property
    def most_bytes(self) -> dict[str, Array]:
        """Bytes by part, each when it is most, (N, P) each, and ``update``, the update's temporaries.

        If any layout offloads, also ``host``, the bytes in host memory, and ``moved``, what leaves the device.
        """
        layouts, engine = self.layouts, self.engine
        dense, experts = self.parameters
        gathered, master_size = self._gathered_parameters(dense), float(master_bytes(self.job.precision))
        memory = self._state(gathered)
        if layouts.offload.any():
            state_before = sum(memory[name] for name in OFFLOADABLE)
            move_state_to_host(
                memory,
                engine.states,
                layouts,
                self.owned_parameters(*self.trained()),
                dense + experts,
                gathered,
                master_size,
            )
            memory["moved"] = np.asarray(state_before - sum(memory[name] for name in OFFLOADABLE))
        activations = self._activations
        memory["activations"] = activations.saved + activations.working
        memory["logits"] = np.zeros_like(dense)
        self._add_to_rank(memory["logits"], self.last_rank, self.costs.head.working)
        return memory

    def _state(self, gathered_at_once: Array) -> dict[str, Array]:
        """Returns bytes of model state by part, and of the update's temporaries, (N, P) each."""
        layouts, states, (dense, experts) = self.layouts, self.engine.states, self.parameters
        zero, total, owned = layouts.zero[:, None], dense + experts, self.owned_parameters(dense, experts)
        gathers_once, accumulates = states.gathers_once(layouts.pp)[:, None], (layouts.microbatches > 1)[:, None]
        gathered = np.where(gathers_once | (zero < 3), total, np.minimum(gathered_at_once, total))
        # Without mixed precision the weights that compute are the masters.
        is_mixed = compute_bytes(self.job.precision) == 2
        memory = state_bytes(
            states,
            StateElements(total=total, owned=owned, gathered=gathered),
            keeps_full_gradients=states.keeps_full_gradients(zero, accumulates, (layouts.pp > 1)[:, None]),
            has_masters=(zero > 0) | is_mixed,
            unmixed_bytes=0.0 if is_mixed else float(compute_bytes(self.job.precision)),
            is_lone=self._is_lone,
        )
        further_gradients, memory["update"] = states.further_bytes(zero, total, owned)
        memory["gradients"] = memory["gradients"] + further_gradients
        if self.job.adapters:
            memory |= {name: np.zeros_like(dense) for name in ("gradients", "optimizer", "update")}
        return memory | {"buffers": self._compression_buffers(dense)}

    def _compression_buffers(self, dense: Array) -> Array:
        """Returns bytes of rounded messages under way, or of errors, (N, P).

        An estimate from the largest weights and FSDP units:
        `planner.compression_buffers` has them exactly, of a model whose weights are known.
        """
        layouts, value_bytes = self.layouts, self.communication.rounded_value_bytes
        if not (layouts.compress.any() or layouts.compress_weights.any()):
            return np.zeros_like(dense)
        layer_sizes = [np.asarray(cost.parameters + cost.experts) for cost in self.costs.layers]
        largest_layer = fold(np.maximum, layer_sizes)[:, None]
        ends = dense - self.sum_layers(lambda cost: cost.parameters)
        unit, shards = np.maximum(ends, largest_layer), layouts.state_shards[:, None]
        # A sharded unit is a message, of which two are under way: one sent and received, one gathered. A plain weight
        # is one too, of a layer's at most a third, of which the next begins before those under way go on.
        is_sharded = layouts.zero[:, None] > 0
        embedding = (self.job.shape.vocab * self.job.shape.width / layouts.tp)[:, None]
        largest_weight = np.maximum(np.minimum(ends, embedding), largest_layer / 3.0)
        summed = np.where(is_sharded, 3.0 * unit / shards, 5.0 * largest_weight)
        gathered = np.where(is_sharded, unit * (1.0 + 1.0 / shards), 0.0)
        # What a copy owes, and what it will owe after this step; bases are small beside them.
        keeps_errors = (layouts.low_rank + layouts.inverse_density)[:, None] > 0
        owed = np.where(keeps_errors, 2.0 * master_bytes(self.job.precision) * dense / shards, 0.0)
        return np.asarray(
            owed + summed * value_bytes(layouts.compress, 0.0) + gathered * value_bytes(layouts.compress_weights, 0.0)
        )

    @cached_property
    def _activations(self) -> ActivationParts:
        """Bytes of activations of each rank, (N, P) each."""
        layers = self.sum_layers(lambda cost: cost.saved)
        saved = self.sum_layers_and_ends(lambda cost: cost.saved)
        mode, share = self.layouts.recompute[:, None], np.repeat(self.layouts.recompute_share[:, None], self.ranks, 1)
        is_partial = share[:, 0] < 1.0
        if is_partial.any() and (self.ranks > 1 or len(self.counts) > 1):
            # Costs are those of the mean layer; a rank has whole ones.
            beyond = self._recomputed_beyond_share(is_partial)
            for cost, more in zip(self.costs.layers, beyond):
                spared = np.broadcast_to(cost.spared, self.count)[is_partial, None] * more
                layers[is_partial] -= spared
                saved[is_partial] -= spared
            share[is_partial] += sum(beyond) / np.maximum(np.broadcast_to(self.layers, share.shape)[is_partial], 1.0)
        measured, ratios = self.job.activations_of(self.engine.saved.compiled), [np.ones((1, 1))] * 2
        if measured is not None:
            # The modules' own bytes over the closed form's, read once on one device, hold for every layout. What exists
            # at once is the most of any layer, so that one recomputed layer has as much as all.
            recomputes = np.ceil(self.layouts.recompute_share)[:, None]
            ratios = [measured.saved.ratio(mode, share), measured.working.ratio(mode, recomputes)]
        return ActivationParts(
            saved=saved * self.in_flight * ratios[0],
            layer=self._largest_layer(lambda cost: cost.saved) * ratios[0],
            ends=(saved - layers) * self.in_flight * ratios[0],
            working=self._largest_layer(lambda cost: cost.working) * ratios[1],
        )

    def _recomputed_beyond_share(self, index: Array) -> list[Array]:
        """Returns layers of each kind that recompute on each rank beyond the model's share of these, (n, P) each.

        Args:
            index: mask of n layouts, (N,) bool.
        """
        kinds, layers = block_kinds(self.job.shape)[0], len(self.job.shape.blocks)
        numbers = np.rint(self.layouts.recompute_share[index] * layers).astype(int)
        keys, key_index = np.unique(numbers * len(self.cuts) + self.cut_index[index], return_inverse=True)
        beyond = np.empty((len(keys), len(self.counts), self.ranks))
        places = [cut.places_in_counts(kinds) for cut in self.cuts]
        for row, key in zip(beyond, keys.tolist()):
            number, cut = divmod(key, len(self.cuts))
            recomputed = places[cut][recomputed_layers(number, layers)]
            row[:] = np.bincount(recomputed, minlength=row.size).reshape(row.shape)
            row -= number / layers * self.cuts[cut].counts
        return list(beyond[key_index].transpose(1, 0, 2))

    def _largest_layer(self, figure: Callable[[LayerCost], Any]) -> Array:
        """Returns a figure of the largest of each rank's layers, (N, P), 0 where a rank has but an end."""
        sizes = [
            np.broadcast_to(figure(cost), self.count)[:, None] * (counts > 0)
            for cost, counts in zip(self.costs.layers, self.counts)
        ]
        return np.asarray(fold(np.maximum, sizes))

    def _peak_parts(self, most_bytes: Mapping[str, Array]) -> dict[str, Array]:
        """Returns bytes by part at the fullest moment of each rank, (N, P) each, from those of `most_bytes`."""
        dense, experts = self.parameters
        layers = self.sum_layers(lambda cost: cost.parameters + cost.experts)
        head = np.zeros_like(dense)
        if not self.job.shape.tied:
            self._add_to_rank(head, self.last_rank, self.costs.head.parameters)
        units = UnitElements(
            layers=layers,
            layer=self._largest_layer(lambda cost: cost.parameters + cost.experts),
            first=self._largest_layer(lambda cost: cost.first_gradient),
            embedding=np.maximum(dense + experts - layers - head, 0.0),
            head=head,
            is_tied=self.job.shape.tied,
        )
        owned_share = self.owned_parameters(dense, experts) / np.maximum(dense + experts, 1.0)
        parameters, gradients, logits = (most_bytes[name] for name in ("parameters", "gradients", "logits"))
        rules = self._state_rules(owned_share)
        return peak_parts(parameters, gradients, logits, units, self._activations, rules)

    def _state_rules(self, owned_share: Array) -> StateRules:
        """Returns how gradients come and weights go; ``owned_share`` is what the data axes leave of them, (N, P)."""
        layouts, states = self.layouts, self.engine.states
        width = float(compute_bytes(self.job.precision))
        is_mixed, trained = width == 2, 0.0 if self.job.adapters else 1.0
        zero, microbatches = layouts.zero[:, None], layouts.microbatches[:, None]
        accumulates, is_piped = microbatches > 1, layouts.pp[:, None] > 1
        on_host = layouts.offload[:, None] == PARAMETERS
        in_units = ((zero > 0) | is_mixed) & ~self._keeps_copies
        by_layer = in_units & ~is_piped
        gradient = trained * (states.gradient if is_mixed else width)
        kept = np.where(self._is_lone, trained * states.lone_gradient, gradient) if is_mixed else gradient
        # Of three micro-batches or more whose gradients are reduced, one keeps the weights beside all gradients.
        freed = (states.parameter if is_mixed else width) * by_layer * (zero < 3) * ((microbatches <= 2) | (zero < 2))
        is_single = in_units & (layouts.state_shards[:, None] == 1)
        # Outside of units a gradient is widened from the type of compute.
        widened = ~in_units & (kept > width)
        return StateRules(
            computed=np.asarray(trained * width),
            reduced=gradient * by_layer,
            reduced_later=gradient * (in_units & is_piped),
            own=kept * owned_share * (in_units | ~accumulates),
            copies=np.where(is_single, 1.0, np.where(widened, width / states.gradient, 0.0)),
            stays=kept * owned_share * ~on_host,
            comes_late=~is_piped & (~accumulates | (on_host & (zero >= 2))),
            comes_whole=by_layer & accumulates & (zero < 2),
            freed=freed,
        )

    @property
    def _keeps_copies(self) -> Array:
        """Whether each rank keeps its weights in the type of compute (`Layout.has_compute_copies`), (N, 1) bool."""
        layouts, is_mixed = self.layouts, compute_bytes(self.job.precision) == 2
        rests = (layouts.zero == 0) & (layouts.offload != PARAMETERS) & (layouts.pp == 1) & (layouts.compress == 0)
        return (rests & (is_mixed and self.engine.states.compute_copies))[:, None]

    @property
    def _is_lone(self) -> Array:
        """Whether nothing is added to a gradient of such a rank, in its micro-batch or by others, (N, 1) bool."""
        layouts = self.layouts
        return self._keeps_copies & ((layouts.readers == 1) & (layouts.microbatches == 1))[:, None]

    def _gathered_parameters(self, dense: Array) -> Array:
        """Returns the parameters that ZeRO-3 has gathered at once, (N, P): two neighbours, and tied or other ends."""
        largest = fold(np.maximum, [cost.parameters + cost.experts for cost in self.costs.layers])
        all_layers = self.sum_layers_and_ends(lambda cost: cost.parameters + cost.experts)
        end_parameters = dense - self.sum_layers(lambda cost: cost.parameters)
        largest = np.broadcast_to(largest, self.count)[:, None]
        gathered = 2 * largest + np.maximum(end_parameters, 0)
        if not self.job.shape.tied:
            # Embedding and head are units of their own, each gathered beside its neighbour alone.
            embedding = (self.job.shape.vocab * self.job.shape.width / self.layouts.tp)[:, None]
            head = np.broadcast_to(self.costs.head.parameters, self.count)[:, None]
            rest = np.maximum(end_parameters - embedding - head, 0.0)
            gathered = largest + np.maximum(np.maximum(embedding, head), largest) + rest
        if self.layouts.secondary.any():
            # A rank has a part of every layer but the one at work; experts over ep have none.
            over_ep, secondary = self.layouts.ep > 1, self.layouts.secondary[:, None]
            shared = self.sum_layers(lambda cost: cost.parameters + np.where(over_ep, 0.0, cost.experts))
            parts = np.maximum(shared - largest, 0.0) / np.maximum(secondary, 1.0)
            gathered = gathered + np.where(secondary > 0, parts, 0.0)
        return np.minimum(gathered, all_layers)
