"""Prices a head and its loss whose logits exist a chunk of tokens at a time (`Layout.loss_chunk`)."""

from __future__ import annotations

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import Array
from meshwright.spec.layout_choices import AUTO_CHUNK, WHOLE_LOGITS


class ChunkedLoss:
    """Chunks of the loss of one micro-batch; arrays are (N,).

    Args:
        model: the job and its N layouts.
    """

    def __init__(self, model: PricedModel) -> None:
        self._model, saved = model, model.engine.saved
        shape, chosen = model.job.shape, model.layouts.loss_chunk
        self._columns = shape.vocab / model.layouts.tp
        automatic = saved.chunk_logits / self._columns if saved.chunk_logits else saved.chunk_tokens
        asked = np.where(chosen == AUTO_CHUNK, automatic, chosen)
        can_chunk = bool(saved.chunk_logits or saved.chunk_tokens) and not shape.whole_logits
        self.on = np.asarray((chosen != WHOLE_LOGITS) & (asked > 0) & can_chunk)
        """Which layouts compute their logits in chunks, bool."""
        self.count = np.ceil(model.tokens / np.clip(asked, 1.0, np.maximum(1.0, model.tokens)))
        """Chunks of a micro-batch, k."""
        self._weight = shape.vocab * shape.width / model.layouts.tp
        self._sum_bytes = np.where(self.count > 1, float(master_bytes(model.job.precision)), model.element)

    @property
    def working_bytes(self) -> Array:
        """Bytes at the peak of the loss.

        A chunk's logits in the type of compute (e bytes) and their exponentials in float32, the hidden state's gradient
        (N D e), and the weight's (V D m), added up in float32 where there are several chunks. What a chunk adds to that
        sum in 16 bits, or the sum becomes in the end, doesn't meet the exponentials. On a GPU backward copies both
        gradients, since looking whether they are scaled once more would synchronise.
        """
        model, element = self._model, self._model.element
        chunk_logits = model.tokens / self.count * self._columns
        exponentials = chunk_logits * float(master_bytes(model.job.precision))
        trained = 0.0 if model.job.adapters else 1.0
        narrow_product = np.where(self._sum_bytes > element, self._weight * element, 0.0)
        temporary = np.maximum(exponentials, trained * narrow_product)
        hidden = model.tokens * model.job.shape.width * element
        forward = chunk_logits * element + temporary + hidden + trained * self._weight * self._sum_bytes
        is_copied = 1.0 if model.engine.saved.chunk_logits else 0.0
        return np.asarray(np.maximum(forward, is_copied * 2.0 * (hidden + trained * self._weight * element)))

    @property
    def moved_bytes(self) -> Array:
        """Bytes that the loss moves beside its three products: of each logit's passes, and of the weight's sum.

        Of each chunk after the first the sum is read and written (2 m), and a product in 16 bits written and read.
        """
        model, element = self._model, self._model.element
        per_weight = 2.0 * self._sum_bytes + np.where(self._sum_bytes > element, 2.0 * element, 0.0)
        added = 0.0 if model.job.adapters else np.maximum(0.0, self.count - 1.0) * self._weight * per_weight
        # Read for the maximum, read and its exponential written, exponential, sum, factor (2), gradient written.
        wide = float(master_bytes(model.job.precision))
        return np.asarray(model.tokens * self._columns * (3.0 * element + 7.0 * wide) + added)

    @property
    def elementwise_s(self) -> Array:
        """Seconds of these bytes."""
        return np.asarray(move_s(self.moved_bytes, self._model.machine.device))

    @property
    def all_reduce_s(self) -> Array:
        """Seconds of each chunk's two all-reduces over tp: a maximum a token, then two sums."""
        model, wide = self._model, float(master_bytes(self._model.job.precision))
        size = model.tokens / self.count * wide
        one, two = (model.groups.seconds(traffic.all_reduce_s, count * size, model.groups.tp) for count in (1.0, 2.0))
        return np.asarray(self.count * (one + two))
