# long: what a layer computes, sends and holds is one table
"""Prices one layer on one micro-batch of N layouts: seconds by part, saved bytes, traffic; arrays (N,).

Every formula broadcasts degrees (N,) with the sizes of a layer, which are scalars.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cached_property

import numpy as np

from meshwright.array_types import Index, Values
from meshwright.cluster import traffic
from meshwright.planner.cost.element_bytes import compute_bytes
from meshwright.planner.cost.expert_dispatch import (
    EXCHANGE_OPERATIONS,
    TURN_S,
    ExpertExchange,
    overlapped_s,
    paired_ep_s,
    turns_s,
)
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import CollectiveTimes, Machine, WireTime
from meshwright.planner.cost.kernels import attention_s, matmul_s, move_s, plain_attention_s
from meshwright.planner.cost.layer_cost import LayerCost, PassTime
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MOST_SCORES, drop_bytes, drops_bytes, score_bytes
from meshwright.planner.cost.prices import LAYER_TRAFFIC
from meshwright.planner.cost.tp_overlap import LAYER_OPERATORS, OverlappedTraffic
from meshwright.spec.model_shape import LayerShape, Product

FULL, BLOCK, SELECTIVE = 2, 3, 1


class PricedModel:
    """Job, layouts, machine and profile that the prices of all layers share.

    Args:
        job: model and batch.
        layouts: N layouts.
        machine: the hardware.
        engine: the runtime's profile.
    """

    def __init__(self, job: PricedJob, layouts: LayoutBatch, machine: Machine, engine: FrameworkProfile) -> None:
        self.job, self.layouts, self.machine, self.engine = job, layouts, machine, engine
        self.groups = CollectiveTimes(layouts, machine)
        self.element = float(compute_bytes(job.precision))

    @cached_property
    def rows(self) -> Array:
        """Rows of a micro-batch."""
        rows = np.where(self.layouts.rows > 0, self.layouts.rows, self.job.rows)
        return np.asarray(rows / (self.layouts.data * self.layouts.microbatches))

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch on a rank of cp, (N,); with ``sequence`` tp divides them further."""
        return self.rows * self.job.sequence / self.layouts.cp

    @cached_property
    def token_shards(self) -> Array:
        """Shards of the tokens outside tp's linears, (N,): tp with sequence parallelism, else 1."""
        return np.where(self.layouts.sequence > 0, self.layouts.tp, 1.0)

    @property
    def _exchange(self) -> ExpertExchange:
        """The exchange of a micro-batch's tokens with experts; with ``ep`` ranks of tp send a part each."""
        tokens = self.tokens / self.layouts.tp
        is_compiled = self.engine.saved.compiled
        return ExpertExchange(self.layouts, self.groups, self.machine.device, tokens, self.element, is_compiled)

    def token_copies_s(self, collectives: Values) -> Values:
        """Returns seconds, (N,) or 0, in which tokens of several rows are put in order for tp's collectives of them.

        Args:
            collectives: gathers and scatters, each of which reads and writes the hidden state once more.
        """
        layouts = self.layouts
        is_copied = (layouts.tp > 1) & (layouts.sequence > 0) & (self.rows > 1)
        if not (self.engine.runtime.copies_tokens and is_copied.any()):
            return 0.0
        moved_bytes = 2.0 * self.element * self.tokens * self.job.shape.width * collectives
        return np.where(is_copied, move_s(moved_bytes, self.machine.device), 0.0)

    def product_s(
        self, product: Product, layer: LayerShape | None = None, products: int = 1, chunks: Values = 1.0
    ) -> Array:
        """Returns seconds of a matrix product, (N,).

        Args:
            product: of a layer.
            layer: needed for products of experts.
            products: 1 for forward, 2 for both of backward.
            chunks: of tokens, of which the product is of one.
        """
        layouts, tp = self.layouts, self.layouts.tp
        m: Values = self.tokens / chunks
        n: Values = float(product.outer)
        k: Values = float(product.inner)
        if product.experts and layer is not None:
            is_dispatched = layouts.ep > 1
            routed = self.tokens * layer.active_experts / chunks
            local_experts = layer.experts / layouts.ep
            # ep dispatches the tokens of each rank of tp separately; without it all ranks of tp compute the same ones.
            m = np.where(is_dispatched, routed / tp, routed) / local_experts
            n = n / np.where(is_dispatched | (product.split != "columns"), 1.0, tp)
            k = k / np.where(is_dispatched | (product.split != "rows"), 1.0, tp)
            # With ep a rank has experts / ep full experts; without, a slice of every expert.
            return local_experts * self._products_s(m, n, k, products)
        # Column-parallel linears divide the result, row-parallel ones the contracted size: Shoeybi et al. (2019), 3.
        n = n / tp if product.split == "columns" else n
        k = k / tp if product.split == "rows" else k
        # A replicated product runs on the rank's share of the tokens under sequence parallelism.
        m = m / self.token_shards if not product.split else m
        return self._products_s(m, n, k, products)

    def _all_products_s(self, layer: LayerShape, products: int) -> Values:
        """Returns seconds of all products of a layer, (N,) or 0; equal ones, as of keys and values, are priced once."""
        seconds_by_sizes: dict[tuple[int, int, str, bool], Array] = {}
        total_s: Values = 0.0
        for product in layer.products:
            sizes = (product.inner, product.outer, product.split, product.experts)
            if sizes not in seconds_by_sizes:
                seconds_by_sizes[sizes] = self.product_s(product, layer, products)
            total_s = total_s + seconds_by_sizes[sizes]
        return total_s

    def _products_s(self, m: Values, n: Values, k: Values, products: int) -> Array:
        """Returns seconds of (m, k) x (k, n), or of backward's two products: input and weight gradients."""
        device, dtype, share = self.machine.device, self.job.dtype, self.engine.runtime.matmul
        if products == 1:
            return matmul_s(m, n, k, device, dtype, share)
        # dX = dY W': (m, n) x (n, k); dW = X' dY: (k, m) x (m, n).
        return matmul_s(m, k, n, device, dtype, share) + matmul_s(k, n, m, device, dtype, share)

    def price_layer(self, layer: LayerShape) -> LayerCost:
        """Returns the cost of a layer: time, traffic and bytes."""
        forward, backward = self._compute_pass(layer, False), self._compute_pass(layer, True)
        repeated = dataclasses.replace(forward)
        kept = self._add_traffic(layer, forward, backward, repeated)
        runtime = self.engine.runtime
        if layer.products and not layer.norm_behind:
            last_product_s = self.product_s(layer.products[-1], layer)
            repeated.matmul = runtime.repeated_matmul_s(repeated.matmul, last_product_s)
        if layer.experts and runtime.pairs_in_turns and self.layouts.paired_share.any():
            self._pair_passes(layer, forward, backward, repeated)
        self._add_recompute(layer, forward, repeated, backward, kept)
        for pass_time in (forward, backward):
            pass_time.host = runtime.layer_host_s(pass_time.host, pass_time.busy, self.layouts.tp)
        cost = self.price_bytes(layer)
        cost.forward, cost.backward = forward, backward
        return cost

    def price_bytes(self, layer: LayerShape) -> LayerCost:
        """Returns the bytes and parameters of a layer alone; its time and traffic are 0."""
        cost = LayerCost()
        tp, ep = self.layouts.tp, self.layouts.ep
        tp_split = sum(item.inner * item.outer for item in layer.products if item.split and not item.experts)
        replicated = layer.parameters - layer.expert_parameters - tp_split
        cost.parameters = tp_split / tp + replicated
        cost.experts = layer.expert_parameters / np.where(ep > 1, ep, tp) + 0.0 * tp
        cost.first_gradient = self._first_gradient(layer)
        self._price_saved_bytes(layer, cost)
        return cost

    def _first_gradient(self, layer: LayerShape) -> Values:
        """Returns parameters of the last product, or of more in one weight of all experts that a rank holds, (N,)."""
        largest: Values = 0.0
        for product in layer.products:
            size = product.inner * product.outer / np.where(product.split != "", self.layouts.tp, 1.0)
            if product.experts:
                # With ep experts are whole, without it tp has a slice of every one.
                whole = product.inner * product.outer / self.layouts.ep
                size = layer.experts * np.where(self.layouts.ep > 1, whole, size)
            if product.experts or product is layer.products[-1]:
                largest = np.maximum(largest, size)
        return largest

    def take(self, index: Index) -> PricedModel:
        """Returns a copy for the layouts at an index, slice or mask."""
        selected = copy.copy(self)
        for name in [name for name, attribute in vars(type(self)).items() if isinstance(attribute, cached_property)]:
            vars(selected).pop(name, None)
        selected.layouts = self.layouts.take(index)
        selected.groups = self.groups.take(index, selected.layouts)
        return selected

    def _compute_pass(self, layer: LayerShape, is_backward: bool) -> PassTime:
        """Returns compute and launch seconds of a layer's forward or backward, without traffic and recompute."""
        runtime, device = self.engine.runtime, self.machine.device
        products = self._product_count(is_backward)
        matmul = self._all_products_s(layer, products)
        moved = self.job.moved.ratio(self.engine.saved.compiled, is_backward) if self.job.moved else 1.0
        elementwise = move_s(moved * self.moved_bytes(layer, is_backward), device)
        # A gather before and a scatter after each block, in backward the other way round.
        elementwise = elementwise + self.token_copies_s(2.0 * self._split_blocks(layer))
        if self.job.products in ("fp8", "fp4"):
            rotated = 2.0 if self.job.products == "fp4" else 1.0
            elementwise = elementwise + move_s(
                self._cast_elements(layer, is_backward) * runtime.cast_bytes * rotated, device
            )
        attention = self._attention(layer, is_backward)
        host = runtime.launch_s(self.layouts, self.rows, layer, is_backward)
        return PassTime(matmul=matmul, attention=attention, elementwise=elementwise, host=host)

    def _product_count(self, is_backward: bool) -> int:
        """Returns the products of each weight in a pass: backward has that of its gradient too, where it is trained."""
        return 2 if is_backward and not self.job.adapters else 1

    def moved_bytes(self, layer: LayerShape, is_backward: bool) -> Values:
        """Returns the bytes, (N,), that a layer's pass moves beside products and attention, by the closed form.

        Norms, residuals, rotations, activation function and gate, routed tokens, dropout.
        """
        runtime = self.engine.runtime
        width = layer.width * runtime.pass_width / self.token_shards
        ffn = (layer.ffn + layer.active_experts * layer.expert_ffn) * runtime.pass_ffn * (2 if layer.gated else 1)
        routed = layer.active_experts * layer.width * runtime.route_bytes
        moved_bytes = self.tokens * (width + (ffn + routed) / self.layouts.tp) * (self.element / 2.0)
        moved_bytes = moved_bytes * (runtime.pass_backward if is_backward else 1.0)
        if runtime.draw_bytes and layer.drops:
            dropped = self.tokens * layer.width / self.token_shards * layer.drops
            moved_bytes = moved_bytes + dropped * drops_bytes(runtime, self.element, is_backward)
        return moved_bytes

    def _split_blocks(self, layer: LayerShape) -> Values:
        """Returns the number of blocks that tp splits, (N,): attention and feed-forward, but not dispatched experts."""
        is_dispatched = (self.layouts.ep > 1) & (layer.experts > 0)
        return np.where(is_dispatched & (layer.ffn == 0), 1.0, 2.0) if layer.heads else 1.0

    def _cast_elements(self, layer: LayerShape, is_backward: bool) -> Values:
        """Returns elements cast for low-precision products: inputs in forward, output gradients in backward."""
        elements: Values = 0.0
        for product in layer.products:
            copies = layer.active_experts if product.experts else 1
            inner = product.inner / np.where(product.split == "rows", self.layouts.tp, 1.0)
            outer = product.outer / np.where(product.split == "columns", self.layouts.tp, 1.0)
            elements = elements + copies * self.tokens * (outer if is_backward else inner)
        return elements

    def _attention(self, layer: LayerShape, is_backward: bool) -> Values:
        """Returns seconds of a layer's attention without its products of weights, (N,) or 0."""
        if not layer.heads:
            return 0.0
        runtime, device = self.engine.runtime, self.machine.device
        dtype = "tf32" if self.job.products == "tf32" else self.job.precision
        keys: Values = layer.attended(self.job.sequence)
        if runtime.context == "gather" and layer.window:
            # Its kernel gets a dense mask of the window, over all keys of the row, and skips none.
            keys = np.where(self.layouts.cp > 1, self.job.sequence, keys)
        scores = self.tokens * layer.heads / self.layouts.tp
        scores = scores * runtime.attention_imbalance(self.layouts.cp)
        all_scores = scores * self.job.sequence
        if self._is_unfused(layer):
            return self._unfused_attention_s(layer, all_scores, is_backward)
        unfused_s = runtime.unfused_attention_s(layer, all_scores, device, dtype, is_backward)
        if unfused_s is not None:
            return unfused_s
        fused_s = attention_s(scores * keys, layer.head_size, layer.value_size, device, dtype, is_backward)
        return fused_s / runtime.attention_share(device, (layer.head_size + layer.value_size) / 2.0)

    def _is_unfused(self, layer: LayerShape) -> bool:
        """Whether our runtime computes attention without a fused kernel.

        That is with dropout; and on a device in float64, or in float32 with fewer key heads, which its only kernel for
        float32 doesn't take.
        """
        if not (self.engine.runtime.draw_bytes and layer.heads):
            return False
        is_grouped = 0 < layer.kv_heads < layer.heads
        is_wide = self.job.precision == "float64" or (self.job.precision == "float32" and is_grouped)
        return layer.drops_scores or (is_wide and self.machine.device.units > 0)

    def _unfused_attention_s(self, layer: LayerShape, scores: Values, is_backward: bool) -> Values:
        """Returns seconds of attention without a fused kernel; backward recomputes more than `MOST_SCORES` weights."""
        device, dtype, drops = self.machine.device, self.job.precision, layer.drops_scores
        size = (layer.head_size + layer.value_size) / 2
        mask_bytes = drop_bytes(self.element) if drops else 0.0
        draw_bytes = self.engine.runtime.draw_bytes if drops else 0.0
        forward_bytes = score_bytes(self.element, False) + mask_bytes
        if not is_backward:
            return plain_attention_s(scores, size, device, dtype, forward_bytes + draw_bytes, False)
        repeated_forward_s = plain_attention_s(scores, size, device, dtype, forward_bytes, False)
        backward_s = plain_attention_s(scores, size, device, dtype, 0.0, True)
        backward_s = backward_s + move_s(scores * (score_bytes(self.element, True) + mask_bytes), device)
        return backward_s + repeated_forward_s * (drops & (scores > MOST_SCORES))

    def _score_bytes(self, layer: LayerShape) -> tuple[Values, Values]:
        """Returns the bytes a token of unfused attention: (saved for backward, allocated only while it runs)."""
        scores_per_token = layer.heads * float(self.job.sequence)
        if not self._is_unfused(layer):
            return self.engine.saved.attention_bytes(layer.heads, scores_per_token)[1], 0.0
        saved_bytes = scores_per_token * (2.0 * self.element + 1.0 if layer.drops_scores else self.element)
        # Keys and values are repeated for the heads that share them.
        repeated = (layer.heads - layer.kv_heads) * (layer.head_size + layer.value_size) * self.element
        saved_bytes = saved_bytes + (0.0 if layer.drops_scores else repeated)
        is_too_many = layer.drops_scores & (self.tokens * scores_per_token / self.layouts.tp > MOST_SCORES)
        # Beyond `MOST_SCORES` only a byte a score is saved, and the weights live while attention runs.
        transient_bytes = np.where(is_too_many, saved_bytes - scores_per_token, 0.0)
        return np.where(is_too_many, scores_per_token, saved_bytes), transient_bytes

    def _add_traffic(self, layer: LayerShape, forward: PassTime, backward: PassTime, repeated: PassTime) -> PassTime:
        """Adds the exposed seconds of tp, cp and ep to the passes; for norms over all heads tp gathers.

        Returns:
            What of the repeated forward's traffic selective recompute has kept: sums over tp, a ring of cp, which is
            part of attention, and the heads of all tokens that products become.
        """
        layouts, runtime, groups, tp = self.layouts, self.engine.runtime, self.groups, self.groups.tp
        size, normed_share = self.tokens * layer.width * self.element, layer.normed_width / layer.width
        reduce, gather = (groups.seconds(kind, size, tp) for kind in (traffic.all_reduce_s, traffic.all_gather_s))
        normed_s = groups.seconds(traffic.all_gather_s, size * normed_share, tp) if normed_share else 0.0
        # One all-reduce a block and pass; with sequence parallelism an all-gather and a reduce-scatter instead.
        collective_s = np.where(layouts.sequence > 0, 2 * gather, reduce)
        wire, backward_wire, kept, kept_wire = WireTime(), WireTime(), PassTime(), WireTime()
        repeated_share: Values = 1.0
        block_count = self._split_blocks(layer)
        forward.tp = runtime.exposed_tp_s(block_count, collective_s, gather, layouts, False) + normed_s
        backward.tp = runtime.exposed_tp_s(block_count, collective_s, gather, layouts, True) + normed_s
        if (layouts.tp_overlap > 0).any():
            OverlappedTraffic(self, layer, collective_s).correct(forward, backward)
        if (layouts.tp > 1).any():
            sums_s = np.where(layouts.sequence > 0, 0.5, 1.0) * block_count * collective_s
            all_s = block_count * collective_s + normed_s
            wire = backward_wire = groups.booked(all_s, tp)
            kept_share = np.divide(sums_s, all_s, out=np.zeros(layouts.count), where=all_s > 0.0)
            # What stops ahead of the last sum sends and keeps one less.
            repeated_share = 1.0 - self._last_sum_share(layer, block_count, kept_share)
            kept_share = kept_share - (1.0 - repeated_share)
            kept.tp, kept_wire = kept_share * forward.tp, wire.scaled(kept_share)
        repeated_wire = wire.scaled(repeated_share)
        if layer.heads:
            context, backward_context, kept_context = self._add_context_traffic(layer, forward, backward)
            if (layouts.cp > 1).any():
                wire, backward_wire = wire + context, backward_wire + backward_context
                repeated_wire, kept_wire = repeated_wire + context, kept_wire + kept_context
                kept.cp = forward.cp if runtime.context == "ring" else kept_context.seconds
        if layer.experts:
            exchange = self._add_exchange(layer, forward, backward, repeated)
            repeated_wire = repeated_wire + exchange.scaled(1.0 - layouts.ep_keep)
            wire, backward_wire = wire + exchange, backward_wire + exchange
        repeated.tp, repeated.cp = repeated_share * forward.tp, forward.cp
        repeated.inside, repeated.outside = repeated_wire.inside, repeated_wire.outside
        for pass_time, carried in ((forward, wire), (backward, backward_wire)):
            pass_time.inside, pass_time.outside = carried.inside, carried.outside
            # What hides under products and attention takes as long as its links all the same.
            pass_time.tp = pass_time.tp + np.maximum(np.maximum(carried.inside, carried.outside) - pass_time.busy, 0.0)
        kept.inside, kept.outside = kept_wire.inside, kept_wire.outside
        return kept

    def _last_sum_share(self, layer: LayerShape, blocks: Values, sums_share: Array) -> Values:
        """Returns the share of tp's traffic in a forward that recompute leaves out, its last sum, (N,) or 0.

        Args:
            layer: the layer.
            blocks: whose products are summed.
            sums_share: of all sums in the traffic.
        """
        if layer.norm_behind or not self.engine.runtime.stops_ahead_of_sums:
            return 0.0
        # Dispatched experts follow attention's sum; of a compiled layer they make several graphs, which repeat all.
        is_dispatched = (self.layouts.ep > 1) & (layer.experts > 0)
        is_repeated = is_dispatched & ((layer.ffn == 0) | self.engine.saved.compiled)
        return np.where(is_repeated, 0.0, sums_share / blocks)

    def _add_exchange(self, layer: LayerShape, forward: PassTime, backward: PassTime, repeated: PassTime) -> WireTime:
        """Adds the exposed seconds of ep to the passes of a layer with experts; returns what a pass sends."""
        layouts, exchange = self.layouts, self._exchange.wire(layer)
        forward.ep = backward.ep = exchange.seconds * (1.0 - self.engine.runtime.ep_overlap)
        round_s = self._exchange.round_operations * self.engine.runtime.host_layer_s / LAYER_OPERATORS
        for pass_time in (forward, backward, repeated):
            pass_time.host = pass_time.host + round_s
        if (layouts.ep_overlap > 0).any():
            for pass_time, is_backward in ((forward, False), (backward, True)):
                self._overlap_exchange(layer, pass_time, exchange.seconds, self._product_count(is_backward))
        repeated.ep = forward.ep
        if (layouts.ep_halves > 0).any():
            for pass_time, is_backward in ((forward, False), (backward, True)):
                self._take_turns(layer, pass_time, exchange.seconds, self._product_count(is_backward))
            # What backward computes again it computes one half after the other.
            repeated.ep = np.where(layouts.ep_halves > 0, exchange.seconds, repeated.ep)
        repeated.ep = repeated.ep * (1.0 - layouts.ep_keep)
        return exchange

    def _overlap_exchange(self, layer: LayerShape, pass_time: PassTime, exchange_s: Values, products: int) -> None:
        """Hides the exchange with experts under their products, chunk by chunk, in layouts that do (`ep_overlap`)."""
        is_on = (self.layouts.ep_overlap > 0) & (self.layouts.ep > 1) & (self.machine.device.units > 0)
        chunks = np.maximum(1.0, self.layouts.ep_overlap)
        experts = [product for product in layer.products if product.experts]
        whole_s, chunk_s = (sum(self.product_s(item, layer, products, n) for item in experts) for n in (1.0, chunks))
        seen_s = overlapped_s(exchange_s, chunks, whole_s, chunk_s)
        runtime = self.engine.runtime
        seen_s = seen_s + runtime.slowed_s(np.maximum(exchange_s - seen_s, 0.0))
        pass_time.ep = np.where(is_on, seen_s, pass_time.ep)
        operator_s = runtime.host_layer_s / LAYER_OPERATORS
        pass_time.host = pass_time.host + np.where(is_on, operator_s * EXCHANGE_OPERATIONS * (chunks - 1), 0.0)

    def _take_turns(self, layer: LayerShape, pass_time: PassTime, exchange_s: Values, products: int) -> None:
        """Hides the exchange with experts under the other half's layer, in layouts whose halves take turns."""
        layouts, runtime = self.layouts, self.engine.runtime
        is_on = (layouts.ep_halves > 0) & (layouts.ep > 1) & (self.machine.device.units > 0)
        whole_s, halves_s, experts_s = np.zeros(layouts.count), np.zeros(layouts.count), np.zeros(layouts.count)
        for product in layer.products:
            whole_s = whole_s + self.product_s(product, layer, products)
            both_s = 2.0 * self.product_s(product, layer, products, 2.0)
            halves_s, experts_s = halves_s + both_s, experts_s + both_s * product.experts
        busy_s = pass_time.compute + pass_time.tp + pass_time.cp
        rest_s = busy_s - whole_s + halves_s - experts_s
        ends = layouts.pp * layouts.stages / self.job.shape.layers
        seen_s = turns_s(exchange_s, rest_s, experts_s, ends) - busy_s
        seen_s = seen_s + runtime.slowed_s(np.maximum(exchange_s - seen_s, 0.0))
        pass_time.ep = np.where(is_on, seen_s, pass_time.ep)
        pass_time.host = pass_time.host * np.where(is_on, 2.0, 1.0) + np.where(is_on, 4.0 * TURN_S, 0.0)

    def _pair_passes(self, layer: LayerShape, forward: PassTime, backward: PassTime, repeated: PassTime) -> None:
        """Hides the exchange with experts under the other pass of a pair, in the share of passes that have one."""
        layouts, runtime = self.layouts, self.engine.runtime
        share = layouts.paired_share * ((layouts.ep_overlap == 0) & (self.machine.device.units > 0))
        experts = [product for product in layer.products if product.experts]

        def pieces(pass_time: PassTime, is_backward: bool, compute_share: Values = 1.0) -> tuple[Values, Values]:
            products_s: Values = sum(self.product_s(item, layer, self._product_count(is_backward)) for item in experts)
            rest_s = pass_time.elementwise + compute_share * (pass_time.matmul + pass_time.attention - products_s)
            return np.maximum(rest_s + pass_time.tp + pass_time.cp, 0.0), compute_share * products_s

        exchange_s, ends = forward.ep, layouts.pp * layouts.stages / self.job.shape.layers
        # Selective recompute has the products already.
        again_share = self._sent_again()
        again = pieces(repeated, False, layouts.share_of(FULL) / np.where(again_share > 0.0, again_share, 1.0))
        own = pieces(forward, False), pieces(backward, True)
        exposed = paired_ep_s(exchange_s / 2.0, *own, again, again_share, layouts.ep_keep, ends)
        always = np.ones(layouts.count)
        travel_shares = always, always, 1.0 - layouts.ep_keep
        for pass_time, seen_s, travels in zip((forward, backward, repeated), exposed, travel_shares):
            seen_s = seen_s + runtime.slowed_s(np.maximum(travels * exchange_s - seen_s, 0.0))
            pass_time.ep = share * seen_s + (1.0 - share) * pass_time.ep
            pass_time.host = pass_time.host + travels * share * 2.0 * TURN_S

    def _sent_again(self) -> Array:
        """Returns the share of the layers whose recompute sends again what they send in forward, (N,)."""
        layouts = self.layouts
        return layouts.share_of(FULL) + self.engine.runtime.selective_sends * layouts.share_of(SELECTIVE)

    def _add_context_traffic(
        self, layer: LayerShape, forward: PassTime, backward: PassTime
    ) -> tuple[WireTime, WireTime, WireTime]:
        """Adds the exposed seconds of cp to both passes, by the way in which attention meets other ranks' keys.

        Returns:
            What each of the two passes sends, and what of forward's selective recompute keeps.
        """
        layouts, runtime, groups = self.layouts, self.engine.runtime, self.groups
        feature_bytes = self.tokens * self.element / layouts.tp
        if runtime.context == "heads":
            # All-to-alls of queries, keys, values, and of attention's output back: DeepSpeed Ulysses (2023), 3.
            copies = self._key_copies(layer)
            widths = (layer.query_width, copies * layer.key_width, copies * layer.value_width, layer.mixed_width)
            *products, output = (
                groups.wire(traffic.all_to_all_s, feature_bytes * width, groups.cp) for width in widths
            )
            kept = sum(products, WireTime())
            sent = kept + output
            forward.cp, backward.cp = sent.seconds, 1.0 * sent.seconds
            return sent, sent, kept if self.engine.saved.selective_is_wide else WireTime()
        row_bytes = feature_bytes * (layer.key_width + layer.value_width) * layouts.cp
        if runtime.context == "gather":
            gathered = groups.wire(traffic.all_gather_s, row_bytes, groups.cp)
            scattered = groups.wire(traffic.reduce_scatter_s, row_bytes, groups.cp)
            forward.cp, backward.cp = gathered.seconds, scattered.seconds
            return gathered, scattered, WireTime()
        # Of a window's run the keys that it reaches back to travel: W - 1 tokens of each of a rank's two runs, where
        # all other ranks' would be (c - 1) / c of the row.
        if layer.window:
            all_tokens = self.job.sequence * np.maximum(1.0, layouts.cp - 1) / layouts.cp
            row_bytes = row_bytes * np.minimum(1.0, 2.0 * (layer.window - 1) / all_tokens)
        ring = groups.wire(traffic.all_gather_s, row_bytes, groups.cp)
        ring_s, exposed_share = ring.seconds, 1.0 - runtime.cp_overlap
        # Attention hides a share of the ring at most, and no more than its own seconds; backward sends twice.
        forward.cp = np.maximum(exposed_share * ring_s, ring_s - forward.attention)
        backward.cp = np.maximum(exposed_share * 2.0 * ring_s, 2.0 * ring_s - backward.attention)
        return ring, ring.scaled(2.0), ring

    def _key_copies(self, layer: LayerShape) -> Array:
        """Returns the ranks, on average, that hold a head of keys once heads are exchanged, (N,).

        One that queries of several ranks need is at each of them, of all tokens.
        """
        heads = max(1, layer.kv_heads) / self.layouts.tp
        return self.layouts.cp * np.ceil(heads / self.layouts.cp) / heads

    def _context_bytes(self, layer: LayerShape) -> tuple[Values, Values]:
        """Returns the bytes of split tokens' attention: (saved for backward, allocated only while it runs), (N,)."""
        layouts, runtime, w = self.layouts, self.engine.runtime, self.element
        if not layer.heads:
            return 0.0, 0.0
        local_elements = self.tokens * (layer.key_width + layer.value_width) / layouts.tp
        is_split = layouts.cp > 1
        if runtime.context == "gather":
            # Keys and values of the whole row beside the rank's own, and a mask for each of its queries, of which an
            # average one reaches over half of the row: scaled_dot_product_attention keeps it in the type of compute.
            masks = self.tokens * w * self.job.sequence * (1.0 + 1.0 / (2.0 * layouts.cp)) / 2.0
            return is_split * (w * local_elements * (layouts.cp - 1) + masks), 0.0
        if runtime.context != "ring":
            return is_split * w * local_elements * (self._key_copies(layer) - 1.0), 0.0
        # Blocks that come and go, and sums in float32: of the output, or of the gradients of q, k, v and the block.
        sums = 4.0 * (self.tokens * layer.query_width / layouts.tp + 2.0 * local_elements)
        return 0.0, is_split * (4.0 * w * local_elements + sums)

    def _is_kept(self, product: Product, layer: LayerShape) -> Array:
        """Returns whether selective recompute keeps a layer's product, or what ranks make of it, (N,) bool."""
        # Queries of low rank become heads of all tokens, which are kept whatever the product sums over.
        is_query = layer.latent > 0 and product.split == "columns" and product.outer == layer.query_width
        is_exchanged = is_query and self.engine.runtime.context == "heads"
        return self.engine.saved.is_kept(product, layer, self.layouts) | (is_exchanged & (self.layouts.cp > 1))

    def _narrow_products_s(self, layer: LayerShape) -> Values:
        """Returns seconds of the products that selective recompute computes again, (N,) or 0."""
        saved = self.engine.saved
        if not saved.selective_is_wide:
            return 0.0
        # It stops ahead of the last one, unless experts' results are weighed behind it.
        products = layer.products if layer.experts else layer.products[:-1]
        narrow = [product for product in products if product.inner < layer.width]
        again = (~self._is_kept(item, layer) * self.product_s(item, layer) for item in narrow)
        return sum(again, 0.0)

    def _kept_products(self, layer: LayerShape) -> tuple[Values, Values]:
        """Returns features of a token that selective recompute keeps: (those outside, those that tp divides)."""
        saved = self.engine.saved
        if not saved.selective_is_wide:
            # Attention's output and the feed-forward part's; queries, keys, values and the branches up.
            qkv = layer.query_width + layer.key_width + layer.value_width
            return 2.0 * layer.width, qkv + layer.ffn * (2.0 if layer.gated else 1.0)
        outside: Values = 0.0
        inside: Values = 0.0
        for product in layer.products:
            features = self._is_kept(product, layer) * product.outer
            features = features * (layer.active_experts if product.experts else 1)
            if product.split == "columns" or product.experts:
                inside = inside + features
            else:
                outside = outside + features
        return outside, inside

    def _add_recompute(
        self, layer: LayerShape, forward: PassTime, repeated: PassTime, backward: PassTime, kept: PassTime
    ) -> None:
        """Adds recompute to backward.

        Args:
            layer: the layer.
            forward: of the layer.
            repeated: the forward that is computed again.
            backward: of the layer.
            kept: what of the repeated traffic selective recompute has kept.
        """
        full, selective, block = (self.layouts.share_of(mode) for mode in (FULL, SELECTIVE, BLOCK))
        all_s = repeated.matmul + repeated.attention + repeated.elementwise
        selective_s = repeated.elementwise + (1.0 - self.engine.saved.selective_share) * repeated.matmul
        selective_s = selective_s + self._narrow_products_s(layer)
        # Full recompute repeats the forward, selective all but the kept products, block the attention scores.
        scores_s = self.engine.runtime.recomputed_scores_s(repeated.attention)
        backward.recompute = full * all_s + selective * selective_s + block * scores_s
        sends = self.engine.runtime.selective_sends * selective
        for name in (*LAYER_TRAFFIC, "inside", "outside"):
            all_s, kept_s = getattr(repeated, name), getattr(kept, name)
            setattr(backward, name, getattr(backward, name) + full * all_s + sends * (all_s - kept_s))
        asked = self.engine.runtime.selective_host
        backward.host = backward.host + (full + asked * selective) * repeated.host
        forward.host = forward.host * (1.0 + (asked - 1.0) * selective)

    def _price_saved_bytes(self, layer: LayerShape, cost: LayerCost) -> None:
        """Sets the bytes that autograd saves.

        Source: Korthikanti et al. (2022), section 4, extended to gated layers.
        """
        layouts, saved, w = self.layouts, self.engine.saved, self.element
        # Two norms, of each the input and the output, which is the next product's input.
        masks = 2.0 * self.engine.runtime.mask_bytes if layer.dropout else 0.0
        # A compiled layer casts what was an input in 16 bits again, from what it was computed of.
        casts_again = saved.compiled and self.job.products in ("fp8", "fp4")
        outside_tp: Values = layer.width * ((2 if casts_again else 4) * w + masks) + w * layer.latent
        qkv = layer.query_width + layer.key_width + layer.value_width
        if layer.norm == "rms":
            outside_tp = outside_tp + 2.0 * saved.rms_extra * layer.width
        inside_tp: Values = w * qkv + w * layer.mixed_width + saved.attention_bytes(layer.heads, 0.0)[0]
        inside_tp += layer.ffn * (w * ((3.0 if layer.gated else 2.0) - casts_again) + saved.gate_extra * w / 2.0)
        outside_tp, inside_tp = self._with_routed_tokens(layer, outside_tp, inside_tp)
        scores, transient_scores = self._score_bytes(layer)
        # tp divides heads and F; what lies outside its linears is divided by sequence parallelism alone.
        context_saved, context_transient = self._context_bytes(layer)
        all_bytes = self.tokens * (outside_tp / self.token_shards + (inside_tp + scores) / layouts.tp) + context_saved
        # Selective recompute keeps a share of the products' outputs.
        kept_outside, kept_inside = self._kept_products(layer)
        product_outputs = kept_outside / self.token_shards + kept_inside / layouts.tp
        product_bytes = self.tokens * w * (saved.selective_share * product_outputs + layer.mixed_width / layouts.tp)
        input_bytes = self.tokens * w * layer.width / self.token_shards
        without_scores = all_bytes - self.tokens * scores / layouts.tp
        # A compiled layer's graphs hand on, and keep, the input of experts whose tokens travel.
        handed = saved.compiled * input_bytes * ((layouts.ep > 1) & (layer.experts > 0))
        # Products are kept as heads of all tokens; those that tp_overlap makes ahead of an eager layer's modules, too.
        if self.engine.runtime.context == "heads" and saved.selective_is_wide:
            is_twice = (layouts.cp > 1) & (layouts.tp_overlap > 0) & (not saved.compiled)
            handed = handed + context_saved + is_twice * self.tokens * w * qkv / layouts.tp
        selective_bytes = np.minimum(product_bytes + input_bytes + handed, all_bytes)
        bytes_by_mode = [input_bytes, selective_bytes, without_scores]
        kept_rows = self._exchange.kept_bytes(layer) if layer.experts and layouts.ep_keep.any() else 0.0

        def spared(mode: Array) -> Array:
            kept = np.select([mode == code for code in (FULL, SELECTIVE, BLOCK)], bytes_by_mode, all_bytes)
            return np.asarray(all_bytes - np.minimum(kept + kept_rows, all_bytes))

        cost.spared, cost.spared_rest = spared(layouts.recompute), spared(layouts.recompute_rest)
        cost.saved, cost.working = all_bytes, cost.spared
        ffn = (layer.ffn + layer.active_experts * layer.expert_ffn) / layouts.tp
        again = np.where(layouts.recompute > 0, saved.fused_again_ffn * saved.compiled, 0.0)
        ffn = ffn * (saved.working_ffn + again + (saved.cast_ffn if self.job.products in ("fp8", "fp4") else 0.0))
        width = saved.working_width * layer.width / self.token_shards
        cost.working = cost.working + self.tokens * np.maximum(width, ffn) * (w / 2.0)
        if self._is_unfused(layer):
            # Gradients of the weights, and of the scores that they are of.
            gradients = 2.0 * w * layer.heads * self.job.sequence
            cost.working = cost.working + self.tokens * (transient_scores + gradients) / layouts.tp
        dense = [item.inner * item.outer for item in layer.products if item.split and not item.experts]
        cost.working = cost.working + context_transient
        buffers = saved.buffer_bytes(layouts, self.tokens * layer.width, max(dense, default=0))
        cost.working = cost.working + buffers

    def _with_routed_tokens(self, layer: LayerShape, outside_tp: Values, inside_tp: Values) -> tuple[Values, Values]:
        """Adds the bytes a token that routed experts save: float32 router scores, copies, and expert activations."""
        if not layer.experts:
            return outside_tp, inside_tp
        saved, w = self.engine.saved, self.element
        bytes_per_token = saved.expert_copies * layer.width + layer.expert_ffn * (w * (3.0 if layer.gated else 2.0))
        bytes_per_token += layer.expert_ffn * saved.gate_extra * w / 2.0
        inside_tp = inside_tp + layer.active_experts * bytes_per_token
        return outside_tp + 4.0 * layer.experts, inside_tp
