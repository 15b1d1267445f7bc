"""Prices one layer on one micro-batch of N layouts: seconds by part and traffic, and its bytes; arrays (N,)."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import traffic
from meshwright.planner.cost.attention import AttentionPrice
from meshwright.planner.cost.context_parallel import ContextExchange
from meshwright.planner.cost.expert_traffic import ExpertTraffic
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layer_cost import LayerCost, PassTime
from meshwright.planner.cost.layout_batch import BLOCK, FULL, SELECTIVE, Array
from meshwright.planner.cost.meshwright_profile import drops_bytes
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.prices import LAYER_TRAFFIC
from meshwright.planner.cost.selective_recompute import SelectiveRecompute
from meshwright.planner.cost.tp_overlap import OverlappedTraffic
from meshwright.spec.model_shape import LayerShape


def price_layer(model: PricedModel, layer: LayerShape) -> LayerCost:
    """Returns the cost of a layer: time, traffic and bytes."""
    passes = _LayerPasses(model, layer)
    cost = price_bytes(model, layer)
    cost.forward, cost.backward = passes.forward, passes.backward
    return cost


def moved_bytes(model: PricedModel, layer: LayerShape, is_backward: bool) -> Values:
    """Returns the bytes, (N,), that a layer's pass moves beside products and attention, by the closed form.

    Norms, residuals, rotations, activation function and gate, routed tokens, dropout.
    """
    runtime = model.engine.runtime
    width = layer.width * runtime.pass_width / model.token_shards
    ffn = (layer.ffn + layer.active_experts * layer.expert_ffn) * runtime.pass_ffn * (2 if layer.gated else 1)
    routed = layer.active_experts * layer.width * runtime.route_bytes
    all_bytes = model.tokens * (width + (ffn + routed) / model.layouts.tp) * (model.element / 2.0)
    all_bytes = all_bytes * (runtime.pass_backward if is_backward else 1.0)
    if runtime.draw_bytes and layer.drops:
        dropped = model.tokens * layer.width / model.token_shards * layer.drops
        all_bytes = all_bytes + dropped * drops_bytes(runtime, model.element, is_backward)
    return all_bytes


class _LayerPasses:
    """The passes of a layer for N layouts: ``forward``, and ``backward`` with what it computes again.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer, self._layouts = model, layer, model.layouts
        runtime = model.engine.runtime
        self.forward, self.backward = self._compute_pass(False), self._compute_pass(True)
        # The forward that recompute runs again; what of its traffic selective recompute needn't send.
        self._repeated, self._kept = dataclasses.replace(self.forward), PassTime()
        self._add_traffic()
        if layer.products and not layer.norm_behind:
            last_product_s = model.product_s(layer.products[-1], layer)
            self._repeated.matmul = runtime.repeated_matmul_s(self._repeated.matmul, last_product_s)
        if layer.experts and runtime.pairs_in_turns and model.layouts.paired_share.any():
            ExpertTraffic(model, layer).hide_under_pairs(self.forward, self.backward, self._repeated)
        self._add_recompute()
        for pass_time in (self.forward, self.backward):
            pass_time.host = runtime.layer_host_s(pass_time.host, pass_time.busy, model.layouts.tp)

    def _compute_pass(self, is_backward: bool) -> PassTime:
        """Returns compute and launch seconds of a forward or backward, without traffic and recompute."""
        model, layer = self._model, self._layer
        runtime, device, products = model.engine.runtime, model.machine.device, model.job.products
        moved_ratio = model.job.moved.ratio(model.engine.saved.compiled, is_backward) if model.job.moved else 1.0
        elementwise_s = move_s(moved_ratio * moved_bytes(model, layer, is_backward), device)
        # A gather before and a scatter after each block, in backward the other way round.
        elementwise_s = elementwise_s + model.token_copies_s(2.0 * model.split_blocks(layer))
        if products in ("fp8", "fp4"):
            rotated = 2.0 if products == "fp4" else 1.0
            cast_bytes = self._cast_elements(is_backward) * runtime.cast_bytes * rotated
            elementwise_s = elementwise_s + move_s(cast_bytes, device)
        return PassTime(
            matmul=self._products_s(model.product_count(is_backward)),
            attention=AttentionPrice(model, layer).pass_s(is_backward),
            elementwise=elementwise_s,
            host=runtime.launch_s(model.layouts, model.rows, layer, is_backward),
        )

    def _products_s(self, products: int) -> Values:
        """Returns seconds of all products of a layer, (N,) or 0; equal ones, as of keys and values, are priced once."""
        seconds_by_sizes: dict[tuple[int, int, str, bool], Array] = {}
        total_s: Values = 0.0
        for product in self._layer.products:
            sizes = (product.inner, product.outer, product.split, product.experts)
            if sizes not in seconds_by_sizes:
                seconds_by_sizes[sizes] = self._model.product_s(product, self._layer, products)
            total_s = total_s + seconds_by_sizes[sizes]
        return total_s

    def _cast_elements(self, is_backward: bool) -> Values:
        """Returns elements cast for low-precision products: inputs in forward, output gradients in backward."""
        tp = self._layouts.tp
        elements: Values = 0.0
        for product in self._layer.products:
            copies = self._layer.active_experts if product.experts else 1
            inner = product.inner / np.where(product.split == "rows", tp, 1.0)
            outer = product.outer / np.where(product.split == "columns", tp, 1.0)
            elements = elements + copies * self._model.tokens * (outer if is_backward else inner)
        return elements

    def _add_traffic(self) -> None:
        """Adds the exposed seconds of tp, cp and ep to the passes, and all that they send.

        Selective recompute has kept sums over tp, a ring of cp, which is part of attention, and the heads of all tokens
        that products become.
        """
        model, layer, layouts, kept = self._model, self._layer, self._layouts, self._kept
        forward, backward, repeated = self.forward, self.backward, self._repeated
        wire, kept_wire, repeated_share = self._add_tp_traffic()
        backward_wire, repeated_wire = wire, wire.scaled(repeated_share)
        if layer.heads:
            context = ContextExchange(model, layer).add_traffic(forward, backward)
            if (layouts.cp > 1).any():
                wire, backward_wire = wire + context.forward, backward_wire + context.backward
                repeated_wire, kept_wire = repeated_wire + context.forward, kept_wire + context.kept
                kept.cp = forward.cp if model.engine.runtime.context == "ring" else context.kept.seconds
        if layer.experts:
            exchange = ExpertTraffic(model, layer).add_traffic(forward, backward, repeated)
            repeated_wire = repeated_wire + exchange.scaled(1.0 - layouts.ep_keep)
            wire, backward_wire = wire + exchange, backward_wire + exchange
        repeated.tp, repeated.cp = repeated_share * forward.tp, forward.cp
        repeated.inside, repeated.outside = repeated_wire.inside, repeated_wire.outside
        for pass_time, carried in ((forward, wire), (backward, backward_wire)):
            pass_time.inside, pass_time.outside = carried.inside, carried.outside
            # What hides under products and attention takes as long as its links all the same.
            pass_time.tp = pass_time.tp + np.maximum(np.maximum(carried.inside, carried.outside) - pass_time.busy, 0.0)
        kept.inside, kept.outside = kept_wire.inside, kept_wire.outside

    def _add_tp_traffic(self) -> tuple[WireTime, WireTime, Values]:
        """Adds the exposed seconds of tp to both passes; for norms over all heads tp gathers.

        Returns:
            What a pass sends; what of it selective recompute keeps; and the share that a repeated forward sends, (N,)
            or 1.
        """
        model, layer, layouts = self._model, self._layer, self._layouts
        runtime, groups, tp = model.engine.runtime, model.groups, model.groups.tp
        size, normed_share = model.tokens * layer.width * model.element, layer.normed_width / layer.width
        reduce, gather = (groups.seconds(kind, size, tp) for kind in (traffic.all_reduce_s, traffic.all_gather_s))
        normed_s = groups.seconds(traffic.all_gather_s, size * normed_share, tp) if normed_share else 0.0
        # One all-reduce a block and pass; with sequence parallelism an all-gather and a reduce-scatter instead.
        collective_s = np.where(layouts.sequence > 0, 2 * gather, reduce)
        blocks = model.split_blocks(layer)
        for pass_time, is_backward in ((self.forward, False), (self.backward, True)):
            pass_time.tp = runtime.exposed_tp_s(blocks, collective_s, gather, layouts, is_backward) + normed_s
        if (layouts.tp_overlap > 0).any():
            OverlappedTraffic(model, layer, collective_s).correct(self.forward, self.backward)
        if not (layouts.tp > 1).any():
            return WireTime(), WireTime(), 1.0
        sums_s = np.where(layouts.sequence > 0, 0.5, 1.0) * blocks * collective_s
        all_s = blocks * collective_s + normed_s
        wire = groups.booked(all_s, tp)
        sums_share = np.divide(sums_s, all_s, out=np.zeros(layouts.count), where=all_s > 0.0)
        # What stops ahead of the last sum sends and keeps one less.
        repeated_share = 1.0 - self._last_sum_share(blocks, sums_share)
        kept_share = sums_share - (1.0 - repeated_share)
        self._kept.tp = kept_share * self.forward.tp
        return wire, wire.scaled(kept_share), repeated_share

    def _last_sum_share(self, blocks: Values, sums_share: Array) -> Values:
        """Returns the share of tp's traffic in a forward that recompute leaves out, its last sum, (N,) or 0.

        Args:
            blocks: whose products are summed.
            sums_share: of all sums in the traffic.
        """
        engine, layer = self._model.engine, self._layer
        if layer.norm_behind or not engine.runtime.stops_ahead_of_sums:
            return 0.0
        # Dispatched experts follow attention's sum; of a compiled layer they make several graphs, which repeat all.
        is_dispatched = (self._layouts.ep > 1) & (layer.experts > 0)
        is_repeated = is_dispatched & ((layer.ffn == 0) | engine.saved.compiled)
        return np.where(is_repeated, 0.0, sums_share / blocks)

    def _add_recompute(self) -> None:
        """Adds what recompute computes, sends and launches again to backward."""
        engine, repeated, backward = self._model.engine, self._repeated, self.backward
        full, selective, block = (self._layouts.share_of(mode) for mode in (FULL, SELECTIVE, BLOCK))
        all_s = repeated.matmul + repeated.attention + repeated.elementwise
        selective_s = repeated.elementwise + (1.0 - engine.saved.selective_share) * repeated.matmul
        selective_s = selective_s + SelectiveRecompute(self._model, self._layer).narrow_products_s()
        # Full recompute repeats the forward, selective all but the kept products, block the attention scores.
        scores_s = engine.runtime.recomputed_scores_s(repeated.attention)
        backward.recompute = full * all_s + selective * selective_s + block * scores_s
        sends = engine.runtime.selective_sends * selective
        for name in (*LAYER_TRAFFIC, "inside", "outside"):
            all_s, kept_s = getattr(repeated, name), getattr(self._kept, name)
            setattr(backward, name, getattr(backward, name) + full * all_s + sends * (all_s - kept_s))
        host_share = engine.runtime.selective_host
        backward.host = backward.host + (full + host_share * selective) * repeated.host
        self.forward.host = self.forward.host * (1.0 + (host_share - 1.0) * selective)
