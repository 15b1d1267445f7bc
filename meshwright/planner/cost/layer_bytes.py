"""Prices the bytes of a layer on one micro-batch of N layouts: parameters, what autograd saves, what recompute spares.

Source: Korthikanti et al. (2022), section 4, extended to gated layers, experts and context parallelism.
"""

from __future__ import annotations

import numpy as np

from meshwright.array_types import Values
from meshwright.planner.cost.attention import AttentionPrice
from meshwright.planner.cost.context_parallel import ContextExchange
from meshwright.planner.cost.expert_traffic import ExpertTraffic
from meshwright.planner.cost.layer_cost import LayerCost
from meshwright.planner.cost.layout_batch import BLOCK, FULL, SELECTIVE, Array
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.selective_recompute import SelectiveRecompute
from meshwright.spec.model_shape import LayerShape


def price_bytes(model: PricedModel, layer: LayerShape) -> LayerCost:
    """Returns the bytes and parameters of a layer alone; its time and traffic are 0."""
    cost = LayerCost()
    tp, ep = model.layouts.tp, model.layouts.ep
    tp_split = sum(item.inner * item.outer for item in layer.products if item.split and not item.experts)
    replicated = layer.parameters - layer.expert_parameters - tp_split
    cost.parameters = tp_split / tp + replicated
    cost.experts = layer.expert_parameters / np.where(ep > 1, ep, tp) + 0.0 * tp
    cost.first_gradient = _first_gradient(model, layer)
    _LayerActivations(model, layer).price(cost)
    return cost


def _first_gradient(model: PricedModel, layer: LayerShape) -> Values:
    """Returns parameters of the last product, or of more in one weight of all experts that a rank holds, (N,)."""
    largest: Values = 0.0
    for product in layer.products:
        size = product.inner * product.outer / np.where(product.split != "", model.layouts.tp, 1.0)
        if product.experts:
            # With ep experts are whole, without it tp has a slice of every one.
            whole = product.inner * product.outer / model.layouts.ep
            size = layer.experts * np.where(model.layouts.ep > 1, whole, size)
        if product.experts or product is layer.products[-1]:
            largest = np.maximum(largest, size)
    return largest


class _LayerActivations:
    """The activations of a layer on a rank, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer = model, layer
        self._attention = AttentionPrice(model, layer)
        self._scores, self._transient_scores = self._attention.score_bytes()
        self._context_saved, self._context_transient = ContextExchange(model, layer).activation_bytes()
        self._input_bytes = model.tokens * model.element * layer.width / model.token_shards
        self._is_cast = model.job.products in ("fp8", "fp4")

    def price(self, cost: LayerCost) -> None:
        """Sets the bytes of a layer's cost that are saved for backward, spared by recompute, and beside them."""
        layouts, all_bytes = self._model.layouts, self._saved_bytes()
        kept_bytes = self._kept_bytes(all_bytes)
        kept_rows: Values = 0.0
        if self._layer.experts and layouts.ep_keep.any():
            kept_rows = ExpertTraffic(self._model, self._layer).kept_bytes()

        def spared(mode: Array) -> Array:
            kept = np.select([mode == code for code in kept_bytes], list(kept_bytes.values()), all_bytes)
            return np.asarray(all_bytes - np.minimum(kept + kept_rows, all_bytes))

        cost.spared, cost.spared_rest = spared(layouts.recompute), spared(layouts.recompute_rest)
        # A layer that recomputes has all of its activations while its backward runs.
        cost.saved, cost.working = all_bytes, cost.spared + self._transient_bytes()

    def _saved_bytes(self) -> Array:
        """Returns the bytes that autograd saves where nothing is recomputed, (N,)."""
        model, layer, saved, w = self._model, self._layer, self._model.engine.saved, self._model.element
        # Two norms, of each the input and the output, which is the next product's input.
        masks = 2.0 * model.engine.runtime.mask_bytes if layer.dropout else 0.0
        # A compiled layer casts what was an input in 16 bits again, from what it was computed of.
        casts_again = saved.compiled and self._is_cast
        outside_tp: Values = layer.width * ((2 if casts_again else 4) * w + masks) + w * layer.latent
        if layer.norm == "rms":
            outside_tp = outside_tp + 2.0 * saved.rms_extra * layer.width
        qkv = layer.query_width + layer.key_width + layer.value_width
        inside_tp: Values = w * qkv + w * layer.mixed_width + saved.attention_bytes(layer.heads, 0.0)[0]
        inside_tp += layer.ffn * (w * ((3.0 if layer.gated else 2.0) - casts_again) + saved.gate_extra * w / 2.0)
        if layer.experts:
            # Of each chosen expert: copies of its input and result, and its own activations.
            routed = saved.expert_copies * layer.width + layer.expert_ffn * (w * (3.0 if layer.gated else 2.0))
            routed += layer.expert_ffn * saved.gate_extra * w / 2.0
            inside_tp = inside_tp + layer.active_experts * routed
            # The router's scores are in float32.
            outside_tp = outside_tp + 4.0 * layer.experts
        # tp divides heads and F; what lies outside its linears is divided by sequence parallelism alone.
        token_bytes = outside_tp / model.token_shards + (inside_tp + self._scores) / model.layouts.tp
        return np.asarray(model.tokens * token_bytes + self._context_saved)

    def _kept_bytes(self, all_bytes: Array) -> dict[int, Array]:
        """Returns the bytes that a layer keeps for backward under each mode of recompute, (N,).

        Args:
            all_bytes: that it keeps without, (N,).
        """
        model, layer, layouts, saved = self._model, self._layer, self._model.layouts, self._model.engine.saved
        w, input_bytes = model.element, self._input_bytes
        # Selective recompute keeps a share of the products' outputs.
        outside, inside = SelectiveRecompute(model, layer).kept_features()
        product_outputs = outside / model.token_shards + inside / layouts.tp
        product_bytes = model.tokens * w * (saved.selective_share * product_outputs + layer.mixed_width / layouts.tp)
        # A compiled layer's graphs hand on, and keep, the input of experts whose tokens travel.
        handed = saved.compiled * input_bytes * ((layouts.ep > 1) & (layer.experts > 0))
        # Products are kept as heads of all tokens; those that tp_overlap makes ahead of an eager layer's modules, too.
        if model.engine.runtime.context == "heads" and saved.selective_is_wide:
            qkv = layer.query_width + layer.key_width + layer.value_width
            is_twice = (layouts.cp > 1) & (layouts.tp_overlap > 0) & (not saved.compiled)
            handed = handed + self._context_saved + is_twice * model.tokens * w * qkv / layouts.tp
        return {
            FULL: input_bytes,
            SELECTIVE: np.minimum(product_bytes + input_bytes + handed, all_bytes),
            BLOCK: all_bytes - model.tokens * self._scores / layouts.tp,
        }

    def _transient_bytes(self) -> Array:
        """Returns the bytes that exist only while a layer's backward runs, beside its activations, (N,)."""
        model, layer, layouts, saved = self._model, self._layer, self._model.layouts, self._model.engine.saved
        ffn = (layer.ffn + layer.active_experts * layer.expert_ffn) / layouts.tp
        again = np.where(layouts.recompute > 0, saved.fused_again_ffn * saved.compiled, 0.0)
        ffn = ffn * (saved.working_ffn + again + (saved.cast_ffn if self._is_cast else 0.0))
        width = saved.working_width * layer.width / model.token_shards
        transient_bytes = model.tokens * np.maximum(width, ffn) * (model.element / 2.0)
        if self._attention.is_unfused:
            # Gradients of the weights, and of the scores that they are of.
            gradients = 2.0 * model.element * layer.heads * model.job.sequence
            transient_bytes = transient_bytes + model.tokens * (self._transient_scores + gradients) / layouts.tp
        dense = [item.inner * item.outer for item in layer.products if item.split and not item.experts]
        buffer_bytes = saved.buffer_bytes(layouts, model.tokens * layer.width, max(dense, default=0))
        return np.asarray(transient_bytes + self._context_transient + buffer_bytes)
