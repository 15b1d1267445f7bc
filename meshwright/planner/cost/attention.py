"""Prices a layer's attention without its products of weights: seconds of the kernels, bytes of the scores."""

from __future__ import annotations

import numpy as np

from meshwright.array_types import Values
from meshwright.planner.cost.kernels import attention_s, move_s, plain_attention_s
from meshwright.planner.cost.meshwright_profile import MOST_SCORES, drop_bytes, score_bytes
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.model_shape import LayerShape


class AttentionPrice:
    """The attention of a layer, on the heads and tokens of a rank, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer = model, layer

    @property
    def is_unfused(self) -> bool:
        """Whether our runtime computes attention without a fused kernel.

        That is with dropout; and on a device in float64, or in float32 with fewer key heads, which its only kernel for
        float32 doesn't take.
        """
        job, layer = self._model.job, self._layer
        if not (self._model.engine.runtime.draw_bytes and layer.heads):
            return False
        is_grouped = 0 < layer.kv_heads < layer.heads
        is_wide = job.precision == "float64" or (job.precision == "float32" and is_grouped)
        return layer.drops_scores or (is_wide and self._model.machine.device.units > 0)

    def pass_s(self, is_backward: bool) -> Values:
        """Returns seconds of a forward or backward, (N,) or 0."""
        model, layer = self._model, self._layer
        if not layer.heads:
            return 0.0
        runtime, device, layouts = model.engine.runtime, model.machine.device, model.layouts
        dtype = "tf32" if model.job.products == "tf32" else model.job.precision
        keys: Values = layer.attended(model.job.sequence)
        if runtime.context == "gather" and layer.window:
            # Its kernel gets a dense mask of the window, over all keys of the row, and skips none.
            keys = np.where(layouts.cp > 1, model.job.sequence, keys)
        queries = model.tokens * layer.heads / layouts.tp * runtime.attention_imbalance(layouts.cp)
        all_scores = queries * model.job.sequence
        if self.is_unfused:
            return self._unfused_s(all_scores, is_backward)
        unfused_s = runtime.unfused_attention_s(layer, all_scores, device, dtype, is_backward)
        if unfused_s is not None:
            return unfused_s
        fused_s = attention_s(queries * keys, layer.head_size, layer.value_size, device, dtype, is_backward)
        return fused_s / runtime.attention_share(device, (layer.head_size + layer.value_size) / 2.0)

    def _unfused_s(self, scores: Values, is_backward: bool) -> Values:
        """Returns seconds without a fused kernel, (N,); backward recomputes more than `MOST_SCORES` weights."""
        model, layer = self._model, self._layer
        device, dtype, drops = model.machine.device, model.job.precision, layer.drops_scores
        size = (layer.head_size + layer.value_size) / 2
        mask_bytes = drop_bytes(model.element) if drops else 0.0
        draw_bytes = model.engine.runtime.draw_bytes if drops else 0.0
        forward_bytes = score_bytes(model.element, False) + mask_bytes
        if not is_backward:
            return plain_attention_s(scores, size, device, dtype, forward_bytes + draw_bytes, False)
        repeated_forward_s = plain_attention_s(scores, size, device, dtype, forward_bytes, False)
        backward_s = plain_attention_s(scores, size, device, dtype, 0.0, True)
        backward_s = backward_s + move_s(scores * (score_bytes(model.element, True) + mask_bytes), device)
        return backward_s + repeated_forward_s * (drops & (scores > MOST_SCORES))

    def score_bytes(self) -> tuple[Values, Values]:
        """Returns the bytes of a token's scores: (saved for backward, allocated only while it runs), (N,) or scalars.

        A fused kernel has none; tp divides them.
        """
        model, layer = self._model, self._layer
        scores_per_token = layer.heads * float(model.job.sequence)
        if not self.is_unfused:
            return model.engine.saved.attention_bytes(layer.heads, scores_per_token)[1], 0.0
        saved_bytes = scores_per_token * (2.0 * model.element + 1.0 if layer.drops_scores else model.element)
        # Keys and values are repeated for the heads that share them.
        repeated = (layer.heads - layer.kv_heads) * (layer.head_size + layer.value_size) * model.element
        saved_bytes = saved_bytes + (0.0 if layer.drops_scores else repeated)
        is_too_many = layer.drops_scores & (model.tokens * scores_per_token / model.layouts.tp > MOST_SCORES)
        # Beyond `MOST_SCORES` only a byte a score is saved, and the weights live while attention runs.
        transient_bytes = np.where(is_too_many, saved_bytes - scores_per_token, 0.0)
        return np.where(is_too_many, scores_per_token, saved_bytes), transient_bytes
