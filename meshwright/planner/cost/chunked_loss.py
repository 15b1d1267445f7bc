"""Prices a head and its loss whose logits exist a chunk of tokens at a time (`Layout.loss_chunk`)."""

from __future__ import annotations

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.priced_model import PricedModel
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
        chunk_tokens = np.where(chosen == AUTO_CHUNK, automatic, chosen)
        can_chunk = bool(saved.chunk_logits or saved.chunk_tokens) and not shape.whole_logits
        self.on = np.asarray((chosen != WHOLE_LOGITS) & (chunk_tokens > 0) & can_chunk)
        """Which layouts compute their logits in chunks, bool."""
        self.count = np.ceil(model.tokens / np.clip(chunk_tokens, 1.0, np.maximum(1.0, model.tokens)))
        """Chunks of a micro-batch, k."""
        self._weight = shape.vocab * shape.width / model.layouts.tp
        self._sum_bytes = np.where(self.count > 1, float(master_bytes(model.job.precision)), model.element)

    @property
    def working_bytes(self) -> Array:
        """Bytes at the peak of the loss.

        A chunk's logits in the type of compute (e bytes), which become their gradient, the hidden state's gradient
        (N D e), and the weight's (V D m), added up in float32 where there are several chunks. Cores have the logits'
        exponentials in float32 besides; what a chunk adds to the sum in 16 bits, or the sum becomes in the end, doesn't
        meet these. On a GPU the products add to the sum, which becomes 16 bits when the last chunk's logits are gone.
        """
        model, element = self._model, self._model.element
        chunk_logits = model.tokens / self.count * self._columns
        exponentials = chunk_logits * float(master_bytes(model.job.precision))
        trained = 0.0 if model.job.adapters else 1.0
        narrow_product = np.where(self._sum_bytes > element, self._weight * element, 0.0)
        hidden = model.tokens * model.job.shape.width * element
        kept = hidden + trained * self._weight * self._sum_bytes
        if self._has_kernels:
            return np.asarray(kept + np.maximum(chunk_logits * element, trained * narrow_product))
        return np.asarray(kept + chunk_logits * element + np.maximum(exponentials, trained * narrow_product))

    @property
    def gradient_bytes(self) -> Array:
        """Bytes of the gradients of hidden state and weight while those of whole logits are there, by our own kernels.

        Source: one H100's allocator, 2026-11-27: of 8,192 tokens and 128,256 words of D = 4,096 1.06 GiB, 1.04 by this.
        """
        model, element = self._model, self._model.element
        if not model.engine.saved.chunk_logits:
            return np.zeros_like(self._columns)
        weight = 0.0 if model.job.adapters else self._weight
        return np.asarray((weight + model.tokens * model.job.shape.width) * element)

    @property
    def _has_kernels(self) -> bool:
        """Whether two kernels read the logits and write their gradient over them, as on GPUs but in float64."""
        return bool(self._model.engine.saved.chunk_logits) and self._model.job.precision != "float64"

    @property
    def moved_bytes(self) -> Array:
        """Bytes that the loss moves beside its three products: of each logit's passes, and of the weight's sum.

        Of each chunk after the first the sum is read and written (2 m); on cores a product in 16 bits is written and
        read besides. On a GPU the sum becomes 16 bits once, and both gradients are scaled in their memory.
        """
        model, element = self._model, self._model.element
        trained = 0.0 if model.job.adapters else 1.0
        is_wide = self._sum_bytes > element
        narrow = 0.0 if self._has_kernels else np.where(is_wide, 2.0 * element, 0.0)
        added = trained * np.maximum(0.0, self.count - 1.0) * self._weight * (2.0 * self._sum_bytes + narrow)
        if model.engine.saved.chunk_logits:
            added = added + 2.0 * element * (trained * self._weight + model.tokens * model.job.shape.width)
        if self._has_kernels:
            added = added + trained * self._weight * np.where(is_wide, self._sum_bytes + element, 0.0)
            # Read for the sums, read again, and the gradient written.
            return np.asarray(model.tokens * self._columns * 3.0 * element + added)
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
