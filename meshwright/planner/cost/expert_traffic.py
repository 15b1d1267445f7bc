"""Prices what expert parallelism adds to the passes of a layer: its exchanges, and what hides them.

Exchanges are hidden under the experts of other chunks of tokens (``ep_overlap``), under the other half of a micro-batch
(``ep_halves``), or under the other pass of a pair in schedules that run a forward beside a backward.
"""

from __future__ import annotations

import numpy as np

from meshwright.array_types import Values
from meshwright.planner.cost.expert_dispatch import (
    EXCHANGE_OPERATIONS,
    TURN_S,
    ExpertExchange,
    overlapped_s,
    paired_ep_s,
    turns_s,
)
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.layer_cost import PassTime
from meshwright.planner.cost.layout_batch import FULL, SELECTIVE, Array
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.tp_overlap import LAYER_OPERATORS
from meshwright.spec.model_shape import LayerShape


class ExpertTraffic:
    """The exchanges of a layer with experts, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer = model, layer
        self._experts = [product for product in layer.products if product.experts]
        # With ep the ranks of tp send a part of the tokens each.
        self._exchange = ExpertExchange(
            model.layouts,
            model.groups,
            model.machine.device,
            model.tokens / model.layouts.tp,
            model.element,
            model.engine.saved.compiled,
        )

    def kept_bytes(self) -> Array:
        """Returns the bytes that ``ep_keep`` keeps of a pass for recompute, (N,)."""
        return self._exchange.kept_bytes(self._layer)

    def add_traffic(self, forward: PassTime, backward: PassTime, repeated: PassTime) -> WireTime:
        """Sets the exposed seconds of ep in all passes, which have their compute, tp and cp; returns what one sends."""
        model, layouts, exchange = self._model, self._model.layouts, self._exchange.wire(self._layer)
        forward.ep = backward.ep = exchange.seconds * (1.0 - model.engine.runtime.ep_overlap)
        round_s = self._exchange.round_operations * model.engine.runtime.host_layer_s / LAYER_OPERATORS
        for pass_time in (forward, backward, repeated):
            pass_time.host = pass_time.host + round_s
        if (layouts.ep_overlap > 0).any():
            for pass_time, is_backward in ((forward, False), (backward, True)):
                self._hide_under_chunks(pass_time, exchange.seconds, model.product_count(is_backward))
        repeated.ep = forward.ep
        if (layouts.ep_halves > 0).any():
            for pass_time, is_backward in ((forward, False), (backward, True)):
                self._hide_under_other_half(pass_time, exchange.seconds, model.product_count(is_backward))
            # What backward computes again it computes one half after the other.
            repeated.ep = np.where(layouts.ep_halves > 0, exchange.seconds, repeated.ep)
        repeated.ep = repeated.ep * (1.0 - layouts.ep_keep)
        return exchange

    def hide_under_pairs(self, forward: PassTime, backward: PassTime, repeated: PassTime) -> None:
        """Hides the exchange under the other pass of a pair, in the share of passes that have one."""
        model, layer, layouts, runtime = self._model, self._layer, self._model.layouts, self._model.engine.runtime
        share = layouts.paired_share * ((layouts.ep_overlap == 0) & (model.machine.device.units > 0))

        def pieces(pass_time: PassTime, is_backward: bool, compute_share: Values = 1.0) -> tuple[Values, Values]:
            products = model.product_count(is_backward)
            products_s: Values = sum(model.product_s(item, layer, products) for item in self._experts)
            rest_s = pass_time.elementwise + compute_share * (pass_time.matmul + pass_time.attention - products_s)
            return np.maximum(rest_s + pass_time.tp + pass_time.cp, 0.0), compute_share * products_s

        exchange_s, ends = forward.ep, layouts.pp * layouts.stages / model.job.shape.layers
        # The share of the layers whose recompute sends again what they send in forward.
        again_share = layouts.share_of(FULL) + runtime.selective_sends * layouts.share_of(SELECTIVE)
        # Selective recompute has the products already.
        again = pieces(repeated, False, layouts.share_of(FULL) / np.where(again_share > 0.0, again_share, 1.0))
        own = pieces(forward, False), pieces(backward, True)
        exposed = paired_ep_s(exchange_s / 2.0, *own, again, again_share, layouts.ep_keep, ends)
        always = np.ones(layouts.count)
        travel_shares = always, always, 1.0 - layouts.ep_keep
        for pass_time, exposed_s, travels in zip((forward, backward, repeated), exposed, travel_shares):
            seen_s = exposed_s + runtime.slowed_s(np.maximum(travels * exchange_s - exposed_s, 0.0))
            pass_time.ep = share * seen_s + (1.0 - share) * pass_time.ep
            pass_time.host = pass_time.host + travels * share * 2.0 * TURN_S

    def _hide_under_chunks(self, pass_time: PassTime, exchange_s: Values, products: int) -> None:
        """Hides the exchange under the experts' products, chunk by chunk, in layouts with ``ep_overlap``."""
        model, layouts = self._model, self._model.layouts
        is_on = (layouts.ep_overlap > 0) & (layouts.ep > 1) & (model.machine.device.units > 0)
        chunks = np.maximum(1.0, layouts.ep_overlap)
        whole_s, chunk_s = (
            sum(model.product_s(item, self._layer, products, count) for item in self._experts)
            for count in (1.0, chunks)
        )
        seen_s = overlapped_s(exchange_s, chunks, whole_s, chunk_s)
        runtime = model.engine.runtime
        seen_s = seen_s + runtime.slowed_s(np.maximum(exchange_s - seen_s, 0.0))
        pass_time.ep = np.where(is_on, seen_s, pass_time.ep)
        operator_s = runtime.host_layer_s / LAYER_OPERATORS
        pass_time.host = pass_time.host + np.where(is_on, operator_s * EXCHANGE_OPERATIONS * (chunks - 1), 0.0)

    def _hide_under_other_half(self, pass_time: PassTime, exchange_s: Values, products: int) -> None:
        """Hides the exchange under what the other half of a micro-batch computes, in layouts with ``ep_halves``."""
        model, layouts, runtime = self._model, self._model.layouts, self._model.engine.runtime
        is_on = (layouts.ep_halves > 0) & (layouts.ep > 1) & (model.machine.device.units > 0)
        whole_s, halves_s, experts_s = np.zeros(layouts.count), np.zeros(layouts.count), np.zeros(layouts.count)
        for product in self._layer.products:
            whole_s = whole_s + model.product_s(product, self._layer, products)
            both_s = 2.0 * model.product_s(product, self._layer, products, 2.0)
            halves_s, experts_s = halves_s + both_s, experts_s + both_s * product.experts
        busy_s = pass_time.compute + pass_time.tp + pass_time.cp
        rest_s = busy_s - whole_s + halves_s - experts_s
        ends = layouts.pp * layouts.stages / model.job.shape.layers
        seen_s = turns_s(exchange_s, rest_s, experts_s, ends) - busy_s
        seen_s = seen_s + runtime.slowed_s(np.maximum(exchange_s - seen_s, 0.0))
        pass_time.ep = np.where(is_on, seen_s, pass_time.ep)
        pass_time.host = pass_time.host * np.where(is_on, 2.0, 1.0) + np.where(is_on, 4.0 * TURN_S, 0.0)
