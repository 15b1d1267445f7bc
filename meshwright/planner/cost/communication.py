"""Times of traffic outside of layers: sends between stages, parameter gathers, gradient reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import traffic
from meshwright.planner.cost.groups import GroupSpan, WireTime
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.offload import accumulates_on_host
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.rounding import RoundingTimes
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, METHODS

LOW_RANK_BYTES = 48.0
"""The same of a value that is summed in low rank: with the error to 3 x 4 bytes, two products read it, a third changes
it, a fourth makes the sum, and the errors of the step take their place, 4 x 4 with the choice whether they do."""

INDEX_BYTES = 4.0
"""Bytes of the index that travels with a value of top-k."""

TOP_K_BYTES = 100.0
"""The same of a value of which the largest travel: with the error to 3 x 4 bytes, its magnitude made, searched and
compared, 48, two squares, 8, and the errors of the step take their place, 7 x 4."""
TOP_K_RECEIVED_BYTES = 80.0
"""The same of a value that was received: it, its index, and a line of 64 bytes of the sum, which lies anywhere."""


class CommunicationTimes:
    """Seconds of the data axes' collectives and the pipeline's sends, for N layouts.

    Args:
        model: the layouts on their machine.
    """

    def __init__(self, model: PricedModel) -> None:
        self._model = model
        # The profile's bytes are for compute in 2 bytes an element; float32 is gathered in 4.
        self._gather_bytes: Values = model.engine.runtime.gather_bytes * model.element / 2.0
        # Gradients are reduced in float32 for every precision but float64.
        self._reduce_bytes = model.engine.runtime.reduce_bytes * (2.0 if model.job.precision == "float64" else 1.0)
        self._rounding = model.machine.rounding or RoundingTimes.of(model.machine.device, None)
        if (model.layouts.compress_weights > 0).any():
            self._gather_bytes = self.rounded_value_bytes(model.layouts.compress_weights, self._gather_bytes)

    def send_s(self) -> Array:
        """Returns seconds of one send of an activation to the next stage, (N,)."""
        return self._model.groups.send(self.send_bytes())

    def stage_sends_s(self) -> tuple[Array, Array]:
        """Returns seconds of one send of an activation (inside a node, between nodes), (N,) each."""
        return self._stage_sends

    @cached_property
    def _stage_sends(self) -> tuple[Array, Array]:
        groups, size = self._model.groups, self.send_bytes()
        return groups.local_send(size), groups.crossing_send(size)

    def send_work_s(self) -> tuple[Array, Array]:
        """Returns the seconds of a rank itself for one send and one receive (inside a node, between nodes), (N,) each.

        Processor cores do for them what they do for as many bytes of a sum of gradients: copy from memory to memory
        inside a node, and over a network what calibration measured, or what of a sum nothing is known to hide.
        """
        runtime, core_byte_s = self._model.engine.runtime, self._model.machine.core_byte_s
        inside_s, outside_s = self.stage_sends_s()
        if not core_byte_s:
            return inside_s * runtime.reduce_floor, outside_s * runtime.reduce_floor
        return inside_s, np.minimum(self.send_bytes() * core_byte_s, outside_s)

    def crossing_sends_s(self) -> Array:
        """Returns the seconds in which a step's sends fill the network of a node's last stage, one way, (N,).

        Where several stages share a node, only those at its end send over the network.
        """
        layouts = self._model.layouts
        each_s = self._model.groups.crossing_send(self.send_bytes())
        return np.asarray(each_s * layouts.microbatches * layouts.stages)

    def send_bytes(self) -> Array:
        """Returns bytes of one send of an activation to the next stage, (N,)."""
        model = self._model
        senders = model.engine.runtime.send_shards(model.layouts.tp, model.token_shards)
        return np.asarray(model.tokens * model.job.shape.width * model.element / senders)

    def pipeline_gathers(self, ranks: Any) -> WireTime:
        """Returns a pipeline's gathers of sharded weights at the start of a step, (N, P): nothing hides the first.

        A stage stays gathered to its last backward, at every ZeRO level: what differs is when it was last scattered.
        """
        zero = self._model.layouts.zero[:, None]
        gathers = self._gathers(ranks, self._model.engine.runtime.gather_count(ranks.layers))
        gathers = gathers.scaled(np.where(zero == 3, 1.0, self._model.engine.runtime.scattered_share()) * (zero > 0))
        if not self._model.layouts.compress_weights.any():
            return gathers
        return gathers + WireTime(self._gather_rounding_s(ranks, *ranks.parameters) * (zero == 3))

    def pipeline_sums(self, ranks: Any) -> WireTime:
        """Returns a pipeline's sums of gradients after the last backward of a stage, (N, P), with what rounds them."""
        return self._gradient_sums(ranks, *ranks.trained()) + WireTime(self._sum_work_s(ranks, *ranks.trained()))

    def gather_s(self, ranks: Any) -> Array:
        """Returns exposed seconds of ZeRO-3's parameter gathers in a step, (N,), on the slowest rank."""
        runtime, layouts = self._model.engine.runtime, self._model.layouts
        gathers = np.where(self._gathers_once, 1.0, layouts.microbatches[:, None])
        forward = self._gathers(ranks)
        exposed_s = self._exposed_gather_s(forward, ranks.forward_busy, ranks.carried(is_backward=False))
        # A pipeline that keeps its stages gathered gathers them only before their first forward.
        again = self._backward_gathers(ranks)
        again_s = np.where(self._gathers_once, 0.0, again.seconds)
        exposed_again_s = self._exposed_gather_s(again, ranks.backward_busy, ranks.carried(is_backward=True))
        exposed_s = exposed_s + np.where(self._gathers_once, 0.0, exposed_again_s)
        exposed_s = exposed_s + runtime.slowed_s(forward.seconds + again_s - exposed_s)
        if layouts.compress_weights.any():
            rounds_again = ~self._gathers_once & (layouts.secondary[:, None] == 0)
            exposed_s = exposed_s + self._gather_rounding_s(ranks, *ranks.parameters)
            exposed_s = exposed_s + self._gather_rounding_s(ranks, *ranks.regathered) * rounds_again
        return np.asarray((exposed_s * gathers * (layouts.zero[:, None] == 3)).max(axis=1))

    @property
    def _gathers_once(self) -> Array:
        """Whether a pipeline gathers parameters and reduce-scatters gradients once a step, (N, 1) bool."""
        model = self._model
        return model.engine.states.gathers_once(model.layouts.pp)[:, None]

    def _gather_rounding_s(self, ranks: Any, dense: Array, experts: Array) -> Array:
        """Returns seconds in which a rank rounds its part of parameters, (N, P), and decodes all parts, (N, P)."""
        codes, owned = self._model.layouts.compress_weights, ranks.owned_parameters(dense, experts)
        return self._rounding.gather_s(codes, owned, dense + experts)

    def _gathers(self, ranks: Any, collectives: Any = None) -> WireTime:
        """Returns the gathers of all parameters of a rank once, (N, P)."""
        dense, experts = ranks.parameters
        return self._gathers_of(dense, experts, collectives)

    def _gathers_of(self, dense: Array, experts: Array, collectives: Any = None) -> WireTime:
        """Returns the gathers of ``dense`` and ``experts`` parameters, (N, P) each."""
        groups = self._model.groups
        gathers = self._wire(traffic.all_gather_s, dense * self._gather_bytes, groups.shard_cp, collectives)
        return gathers + self._wire(traffic.all_gather_s, experts * self._gather_bytes, groups.expert_shard)

    def _backward_gathers(self, ranks: Any) -> WireTime:
        """Returns the gathers of a rank's parameters for backward, (N, P)."""
        layouts, groups, (dense, experts) = self._model.layouts, self._model.groups, ranks.regathered
        gathers = self._gathers_of(dense, experts)
        if not layouts.secondary.any():
            return gathers
        # The secondary copy holds the weights as forward gathered them, decoded; experts over ep have none.
        exact_bytes = self._model.engine.runtime.gather_bytes * self._model.element / 2.0
        over_ep = layouts.ep[:, None] > 1
        shared = (dense + np.where(over_ep, 0.0, experts)) * exact_bytes
        others = np.where(over_ep, experts, 0.0) * self._gather_bytes
        secondary = self._wire(traffic.all_gather_s, shared, groups.secondary)
        secondary = secondary + self._wire(traffic.all_gather_s, others, groups.expert_shard)
        return secondary.where(layouts.secondary[:, None] > 0, gathers)

    def _exposed_gather_s(self, gathers: WireTime, busy_s: Array, carried: WireTime) -> Array:
        """Returns the exposed seconds, (N, P), of gathers that are prefetched under ``busy_s`` seconds of compute."""
        overlap = self._model.engine.runtime.gather_overlap
        return np.maximum(gathers.exposed_s(busy_s, carried, overlap), (1 - overlap) * gathers.seconds)

    def _hidden_gathers(self, ranks: Any) -> WireTime:
        """Returns ZeRO-3's gathers that hide under one micro-batch's backward, (N, P); 0 for other layouts."""
        gathers_each = (self._model.layouts.zero[:, None] == 3) & ~self._gathers_once
        if not gathers_each.any():
            return WireTime()
        gathers = self._backward_gathers(ranks)
        exposed_s = self._exposed_gather_s(gathers, ranks.backward_busy, ranks.carried(is_backward=True))
        hidden = WireTime(
            gathers.seconds - exposed_s,
            np.maximum(gathers.inside - exposed_s, 0.0),
            np.maximum(gathers.outside - exposed_s, 0.0),
        )
        return hidden.scaled(1.0 * gathers_each)

    def reduce_s(self, ranks: Any, dense: Array, experts: Array) -> Array:
        """Returns exposed seconds of a step's gradient reduction and of ZeRO-1's and 2's gather after it, (N, P)."""
        runtime, layouts = self._model.engine.runtime, self._model.layouts
        zero, once = layouts.zero[:, None], self._gathers_once
        sums = self._gradient_sums(ranks, dense, experts)
        reduces_each = runtime.reduces_each() & (zero >= 2) & ~once
        reductions = np.where(reduces_each, layouts.microbatches[:, None], 1.0)
        window = np.where(once, 0.0, self._overlap_microbatches()[:, None])
        overlap = np.where(zero > 0, runtime.sharded_overlap(), runtime.dp_overlap)
        # With accumulation in host memory only one micro-batch's reduction overlaps: the host waits for the others.
        share = np.where(accumulates_on_host(layouts)[:, None], window / layouts.microbatches[:, None], window)
        # ZeRO-3's gathers go first in backward, and hide beside the layers' own traffic.
        gathers = self._hidden_gathers(ranks)
        busy_s = np.maximum(ranks.backward_busy * share - gathers.seconds / np.maximum(overlap, 1e-9), 0.0)
        carried = ranks.carried(is_backward=True).scaled(share)
        exposed_s = sums.exposed_s(busy_s, carried, overlap)
        exposed_s = np.maximum(exposed_s, runtime.reduce_floor * sums.seconds)
        exposed_s = exposed_s + runtime.slowed_s(sums.seconds - exposed_s)
        # The device that computes also rounds, and the wire hides none of it.
        exposed_s = exposed_s + self._sum_work_s(ranks, dense, experts)
        # ZeRO-1 and 2 gather the updated parameters once a step, under the next forward.
        late = self._gathers(ranks, runtime.gather_count(ranks.layers))
        late = late.scaled(runtime.scattered_share() * ((zero == 1) | (zero == 2)))
        carried = ranks.carried(is_backward=False).scaled(window)
        late_s = late.exposed_s(ranks.forward_busy * window, carried, runtime.sharded_overlap())
        late_s = np.maximum(late_s, runtime.reduce_floor * late.seconds)
        return np.asarray(exposed_s * reductions + late_s)

    def rank_work_s(self, ranks: Any) -> tuple[Array, Array]:
        """Returns what of `gather_s` and of `reduce_s` the rank itself works instead of waiting, (N,) each.

        It rounds and decodes, and processor cores copy and sum what they send over a network.

        Args:
            ranks: of layouts without a pipeline.
        """
        runtime, layouts = self._model.engine.runtime, self._model.layouts
        zero, (dense, experts) = layouts.zero[:, None], ranks.trained()
        gather_s = _network_core_s(self._gathers(ranks)) + _network_core_s(self._backward_gathers(ranks))
        if layouts.compress_weights.any():
            gather_s = gather_s + self._gather_rounding_s(ranks, *ranks.parameters)
            gather_s = gather_s + self._gather_rounding_s(ranks, *ranks.regathered) * (layouts.secondary[:, None] == 0)
        gather_s = gather_s * layouts.microbatches[:, None] * (zero == 3)
        sum_s = _network_core_s(self._gradient_sums(ranks, dense, experts)) + self._sum_work_s(ranks, dense, experts)
        late = self._gathers(ranks, runtime.gather_count(ranks.layers))
        late_s = _network_core_s(late) * runtime.scattered_share() * ((zero == 1) | (zero == 2))
        reductions = np.where(runtime.reduces_each() & (zero >= 2), layouts.microbatches[:, None], 1.0)
        return np.asarray(gather_s.max(axis=1)), np.asarray((sum_s * reductions + late_s).max(axis=1))

    def _gradient_sums(self, ranks: Any, dense: Array, experts: Array) -> WireTime:
        """Returns the sums of one reduction of gradients over the data axes, (N, P)."""
        runtime, groups, element_bytes = self._model.engine.runtime, self._model.groups, self._reduce_bytes
        collectives, buckets = runtime.reduce_counts(ranks.layers, dense * element_bytes)
        all_reduce = self._copies_sum(dense, groups.readers, buckets)
        all_reduce = all_reduce + self._copies_sum(experts, groups.expert_readers)
        scatter = self._wire(traffic.reduce_scatter_s, dense * element_bytes, groups.shard_cp, collectives)
        scatter = scatter + self._wire(traffic.reduce_scatter_s, experts * element_bytes, groups.expert_shard)
        scatter = scatter + self._copies_sum(ranks.owned_parameters(dense, experts), groups.replicate)
        # ZeRO-0 all-reduces over all readers; above, a reduce-scatter over the shards and an all-reduce of the shards.
        return scatter.scaled(runtime.scattered_share()).where(self._model.layouts.zero[:, None] > 0, all_reduce)

    def _copies_sum(self, elements: Array, span: GroupSpan, collectives: Values | None = None) -> WireTime:
        """Returns the sum of gradients over copies, (N, P): exactly, or in fewer bytes where the layout compresses.

        Args:
            elements: (N, P).
            span: of the copies.
            collectives: messages; 1 when None.
        """
        layouts, exact_bytes = self._model.layouts, elements * self._reduce_bytes
        exact = self._exchanges([(traffic.all_reduce_s, exact_bytes, span)], span, collectives)
        compressed = layouts.compress > 0
        if not compressed.any():
            return exact
        # Neighbours reduce-scatter and gather exact values; between runs of them each rank has its part of these.
        run, inside, across = self._runs(span)
        wire_bytes = elements / run[:, None] * self.rounded_value_bytes(layouts.compress, 0.0)
        exchanges = [(traffic.reduce_scatter_s, exact_bytes, inside), (traffic.all_gather_s, exact_bytes, inside)]
        exchanges += [(traffic.all_to_all_s, wire_bytes, across), (traffic.all_gather_s, wire_bytes, across)]
        # Of compressed sums all is booked on the links that the copies cross.
        total = self._exchanges(exchanges, span, collectives)
        if layouts.low_rank.any():
            low_rank = self._low_rank_sum(elements, span, collectives)
            total = low_rank.where(layouts.low_rank[:, None] > 0, total)
        if layouts.inverse_density.any():
            top_k = self._top_k_sum(elements, span, collectives)
            total = top_k.where(layouts.inverse_density[:, None] > 0, total)
        return total.where(compressed[:, None] & (span.ranks > 1)[:, None], exact)

    def _runs(self, span: GroupSpan) -> tuple[Array, GroupSpan, GroupSpan]:
        """Returns the neighbouring copies that sum exactly, (N,), their span, and that across runs of them."""
        layouts = self._model.layouts
        fits = (layouts.compress > 0) & (span.ranks % layouts.node_copies == 0) & (span.ranks > layouts.node_copies)
        run = np.where(fits, layouts.node_copies, 1.0)
        return run, *span.split_runs(run)

    def _sum_work_s(self, ranks: Any, dense: Array, experts: Array) -> Array:
        """Returns seconds in which a rank computes what one reduction sends and what it got, (N, P); 0 if exact."""
        layouts, groups = self._model.layouts, self._model.groups
        if not layouts.compress.any():
            return np.zeros_like(dense)
        readers_s = self._work_s(dense, groups.readers) + self._work_s(experts, groups.expert_readers)
        shards_s = self._work_s(ranks.owned_parameters(dense, experts), groups.replicate)
        return np.where(layouts.zero[:, None] > 0, shards_s, readers_s)

    def _work_s(self, elements: Array, span: GroupSpan) -> Array:
        """Returns seconds of a copy's own work for a compressed sum, (N, P).

        Args:
            elements: (N, P).
            span: of the copies.
        """
        layouts, device = self._model.layouts, self._model.machine.device
        run, _, across = self._runs(span)
        seconds = self._rounding.sum_s(layouts.compress, elements / run[:, None], across.ranks)
        if layouts.low_rank.any():
            # Four products of r columns: M Q, M^T P, P Q^T of this copy and of the sum.
            flops = 8.0 * layouts.low_rank[:, None] * elements
            product_s = flops / (device.peak("float32") * device.share("float32"))
            low_rank_s = product_s + move_s(LOW_RANK_BYTES * elements, device)
            seconds = np.where(layouts.low_rank[:, None] > 0, low_rank_s, seconds)
        if layouts.inverse_density.any():
            received = self._top_k_values(elements, span)
            top_k_s = move_s(TOP_K_BYTES * elements + TOP_K_RECEIVED_BYTES * received, device)
            seconds = np.where(layouts.inverse_density[:, None] > 0, top_k_s, seconds)
        return np.asarray(seconds * (span.ranks > 1)[:, None])

    def _wire(self, kind: Any, size: Array, span: GroupSpan, collectives: Any = None) -> WireTime:
        """Returns a collective of ``size`` bytes, (N, P), on each pipeline rank, in ``collectives`` equal pieces."""
        return self._exchanges([(kind, size, span)], span, collectives)

    def _exchanges(
        self, exchanges: Sequence[tuple[Any, Array, GroupSpan]], span: GroupSpan, collectives: Any = None
    ) -> WireTime:
        """Returns collectives that follow each other, (N, P), booked on the links that ``span`` crosses.

        Args:
            exchanges: (kind, bytes (N, P), span) of each.
            span: of the links.
            collectives: equal pieces in which each is sent; 1 when None.
        """
        seconds = sum((self._collective_s(*exchange, collectives) for exchange in exchanges), np.zeros(()))
        sent_bytes = np.zeros(())
        for kind, size, group in exchanges:
            # An all-reduce is a reduce-scatter and an all-gather, and each of these sends (n-1)/n of the bytes.
            passes = 2.0 if kind is traffic.all_reduce_s else 1.0
            sent_bytes = sent_bytes + passes * size * (1.0 - 1.0 / group.ranks)[:, None]
        return self._model.groups.booked(seconds, span, sent_bytes)

    def rounded_value_bytes(self, codes: Array, exact: Values) -> Array:
        """Returns bytes of a value on the wire, (N, 1), by its numbers' code; ``exact`` where it isn't rounded."""
        by_code = [0.0, *(number_format.block_bytes / BLOCK_VALUES for number_format in FORMATS.values())]
        # The others are of sums with error feedback, which round none.
        by_code += [0.0] * (len(METHODS) - len(FORMATS))
        return np.where(codes > 0, np.asarray(by_code)[codes.astype(int)], exact)[:, None]

    def _low_rank_sum(self, elements: Array, span: GroupSpan, collectives: Values | None = None) -> WireTime:
        """Returns the sum of gradients over copies in low rank, (N, P); the arguments are those of a sum.

        Of a matrix of n x m values r (n + m) travel, as if n and m were the model's width, of which tp and ZeRO's
        shards split one.
        """
        layouts = self._model.layouts
        width, rank = self._model.job.shape.width, layouts.low_rank[:, None]
        parts = (layouts.tp * layouts.state_shards)[:, None]
        share = np.minimum(1.0, rank * (1.0 + parts) / width)
        # Each message is two, one after the other, of half the bytes each.
        half_bytes = elements * share * self._reduce_bytes / 2.0
        return self._exchanges([(traffic.all_reduce_s, half_bytes, span)] * 2, span, collectives)

    def _top_k_sum(self, elements: Array, span: GroupSpan, collectives: Values | None = None) -> WireTime:
        """Returns the sum of the largest values over copies, (N, P); the arguments are those of a sum.

        Each copy gets a value and its index of every other one, and adds them up.
        """
        received_bytes = self._top_k_values(elements, span) * (self._reduce_bytes + INDEX_BYTES)
        return self._exchanges([(traffic.all_gather_s, received_bytes, span)], span, collectives)

    def _top_k_values(self, elements: Array, span: GroupSpan) -> Array:
        """Returns the values that a copy gets of all copies, (N, P), where each sends the largest of ``elements``."""
        return elements / np.maximum(1.0, self._model.layouts.inverse_density)[:, None] * span.ranks[:, None]

    def _overlap_microbatches(self) -> Array:
        """Returns the number of micro-batches whose backward can hide the reduction, (N,): 1 with a stage a rank.

        With several stages on a rank, the stages that end first overlap the last micro-batches of the others.
        """
        layouts = self._model.layouts
        other_rounds = np.minimum(layouts.microbatches, layouts.pp) - 1.0
        return np.asarray(1.0 + other_rounds * (layouts.stages - 1.0) / layouts.stages)

    def _collective_s(self, kind: Any, size: Array, span: GroupSpan, collectives: Any = None) -> Array:
        """Returns seconds of a collective on each pipeline rank, (N, P), sent in ``collectives`` equal pieces."""
        if not size.any():
            return np.zeros_like(size)
        count = 1.0 if collectives is None else np.broadcast_to(collectives, size.shape)
        return np.asarray(count * self._model.groups.seconds(kind, size / count, span))


def _network_core_s(wire: WireTime) -> Array:
    """Returns a core's own seconds for traffic over a network; inside a node it stands still for what it copies."""
    return np.where(np.asarray(wire.outside) > 0, wire.core, 0.0)
