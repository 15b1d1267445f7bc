"""Prices what context parallelism sends and keeps, where attention meets the keys and values of other ranks of cp.

``heads`` exchanges tokens for heads by all-to-alls (DeepSpeed Ulysses, 2023), ``gather`` all-gathers keys and values,
and ``ring`` passes them around while attention computes on those that came (Ring Attention, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import traffic
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.layer_cost import PassTime
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.model_shape import LayerShape


@dataclass(frozen=True, slots=True)
class ContextTraffic:
    """What the ranks of cp send in the passes of a layer."""

    forward: WireTime
    backward: WireTime
    kept: WireTime
    """Of forward's, what selective recompute keeps and needn't send again."""


class ContextExchange:
    """The keys, values or heads that a layer's attention exchanges over cp, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer = model, layer

    def add_traffic(self, forward: PassTime, backward: PassTime) -> ContextTraffic:
        """Sets the exposed seconds of cp in both passes, whose seconds of attention are known; returns what is sent."""
        model, layer = self._model, self._layer
        layouts, runtime, groups = model.layouts, model.engine.runtime, model.groups
        feature_bytes = model.tokens * model.element / layouts.tp
        if runtime.context == "heads":
            # All-to-alls of queries, keys, values, and of attention's output back: DeepSpeed Ulysses (2023), 3.
            copies = self._key_copies()
            widths = (layer.query_width, copies * layer.key_width, copies * layer.value_width, layer.mixed_width)
            *products, output = (
                groups.wire(traffic.all_to_all_s, feature_bytes * width, groups.cp) for width in widths
            )
            kept = sum(products, WireTime())
            sent = kept + output
            forward.cp, backward.cp = sent.seconds, 1.0 * sent.seconds
            return ContextTraffic(sent, sent, kept if model.engine.saved.selective_is_wide else WireTime())
        row_bytes = feature_bytes * (layer.key_width + layer.value_width) * layouts.cp
        if runtime.context == "gather":
            gathered = groups.wire(traffic.all_gather_s, row_bytes, groups.cp)
            scattered = groups.wire(traffic.reduce_scatter_s, row_bytes, groups.cp)
            forward.cp, backward.cp = gathered.seconds, scattered.seconds
            return ContextTraffic(gathered, scattered, WireTime())
        # Of a window's run the keys that it reaches back to travel: W - 1 tokens of each of a rank's two runs, where
        # all other ranks' would be (c - 1) / c of the row.
        if layer.window:
            all_tokens = model.job.sequence * np.maximum(1.0, layouts.cp - 1) / layouts.cp
            row_bytes = row_bytes * np.minimum(1.0, 2.0 * (layer.window - 1) / all_tokens)
        ring = groups.wire(traffic.all_gather_s, row_bytes, groups.cp)
        ring_s, exposed_share = ring.seconds, 1.0 - runtime.cp_overlap
        # Attention hides a share of the ring at most, and no more than its own seconds; backward sends twice.
        forward.cp = np.maximum(exposed_share * ring_s, ring_s - forward.attention)
        backward.cp = np.maximum(exposed_share * 2.0 * ring_s, 2.0 * ring_s - backward.attention)
        return ContextTraffic(ring, ring.scaled(2.0), ring)

    def activation_bytes(self) -> tuple[Values, Values]:
        """Returns the bytes of other ranks' keys and values: (saved for backward, allocated only while it runs), (N,).

        Both are 0 where cp is 1.
        """
        model, layer = self._model, self._layer
        layouts, runtime, w = model.layouts, model.engine.runtime, model.element
        if not layer.heads:
            return 0.0, 0.0
        local_elements = model.tokens * (layer.key_width + layer.value_width) / layouts.tp
        is_split = layouts.cp > 1
        if runtime.context == "gather":
            # Keys and values of the whole row beside the rank's own, and a mask for each of its queries, of which an
            # average one reaches over half of the row: scaled_dot_product_attention keeps it in the type of compute.
            masks = model.tokens * w * model.job.sequence * (1.0 + 1.0 / (2.0 * layouts.cp)) / 2.0
            return is_split * (w * local_elements * (layouts.cp - 1) + masks), 0.0
        if runtime.context != "ring":
            return is_split * w * local_elements * (self._key_copies() - 1.0), 0.0
        # Blocks that come and go, and sums in float32: of the output, or of the gradients of q, k, v and the block.
        sums = 4.0 * (model.tokens * layer.query_width / layouts.tp + 2.0 * local_elements)
        return 0.0, is_split * (4.0 * w * local_elements + sums)

    def _key_copies(self) -> Array:
        """Returns the ranks, on average, that hold a head of keys once heads are exchanged, (N,).

        One that queries of several ranks need is at each of them, of all tokens.
        """
        cp = self._model.layouts.cp
        heads = max(1, self._layer.kv_heads) / self._model.layouts.tp
        return cp * np.ceil(heads / cp) / heads
