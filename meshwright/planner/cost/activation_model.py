"""What a framework's layers keep between forward and backward, as named options without hidden factors.

The methods are our own runtime's; a profile of another framework overrides those in which it differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from meshwright.array_types import Values
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.spec.model_shape import LayerShape, Product


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationModel:
    """Bytes that a layer saves between forward and backward, and temporaries beside them."""

    gate_extra: float = 0.0
    """More bytes per element of F: eager SwiGLU saves silu(gate) too (2), a decomposed GELU more."""
    rms_extra: float = 0.0
    """More bytes per element of D of each RMSNorm: eager code keeps its input in float32 and the result before its
    weight."""
    logits: float = 12.0
    """Bytes per logit of one micro-batch at the peak: logits, their float32 copy, their gradient."""
    chunk_logits: float = 0.0
    """Logits that exist at once under ``loss_chunk=auto``; 0 for those of a whole micro-batch."""
    chunk_tokens: float = 0.0
    """The same as tokens, where that is how the device decides."""
    selective_share: float = 1.0
    """Share of the products whose results ``selective`` recompute keeps."""
    selective_is_wide: bool = False
    """Whether ``selective`` recompute keeps sums over tp in place of their summands, and else the products alone that
    sum as many values as the hidden state has (`parallel.selective`)."""
    compiled: bool = False
    """Whether layers are compiled: element-wise results are computed again, and neither kept nor written."""
    working_width: float = 0.0
    """Bytes per element of D in 16 bits that exist at once while a layer's backward runs, beside what was kept."""
    working_ffn: float = 0.0
    """The same per element of F, where that is more."""
    fused_working_ffn: float = 0.0
    """`working_ffn` of a compiled layer."""
    fused_again_ffn: float = 0.0
    """What recompute adds to `working_ffn` of a compiled layer: one kernel computes again and makes gradients."""
    cast_ffn: float = 0.0
    """What products in 8 or 4 bits add to `working_ffn`: both casts of a gradient and what they are computed of."""
    fused_cast_ffn: float = 0.0
    """`cast_ffn` of a compiled layer."""
    expert_copies: float = 4.0
    """Bytes per element of D of each routed token beside the expert's own: dispatched input and result to combine."""

    def attention_bytes(self, heads: int, scores: float) -> tuple[float, float]:
        """Returns bytes a token of fused attention's statistics, and of saved scores: fused attention holds none.

        Args:
            heads: of the layer.
            scores: of a token, over all heads.
        """
        return 4.0 * heads, 0.0  # the log-sum-exp, in float32

    def is_kept(self, product: Product, layer: LayerShape, layouts: LayoutBatch) -> Array:
        """Returns whether ``selective`` recompute keeps what a layer's product makes, or its sum over tp, (N,) bool."""
        is_summed = (layouts.tp > 1) & (product.split == "rows") & (not product.experts)
        return is_summed | (product.inner >= layer.width)

    def buffer_bytes(self, layouts: LayoutBatch, elements: Array, largest_product: int) -> Values:
        """Returns further bytes that are allocated only while a layer runs, (N,) or a scalar.

        Args:
            layouts: N layouts.
            elements: of a micro-batch's hidden state on a rank of cp, (N,).
            largest_product: parameters of the layer's largest product.
        """
        return 0.0

    def late_bytes(self, layouts: LayoutBatch, elements: Array, width: int, layers: Array, in_flight: Array) -> Values:
        """Returns bytes that the allocator gets back late where the host is ahead of the device, (N, P) or a scalar.

        They are reserved beside all that is allocated; where memory is short, the allocator waits for them.

        Args:
            layouts: N layouts.
            elements: of a micro-batch's hidden state on a rank of cp, (N,).
            width: D, of the hidden state.
            layers: number of layers of each rank, (N or 1, P).
            in_flight: micro-batches micro-batches of each rank, (N, P).
        """
        return 0.0

    def of_compiled_layers(self) -> Self:
        """Returns the same of layers that torch.compile made, which compute element-wise results again."""
        return dataclasses.replace(
            self,
            compiled=True,
            gate_extra=0.0,
            rms_extra=0.0,
            working_ffn=self.fused_working_ffn,
            cast_ffn=self.fused_cast_ffn,
        )
