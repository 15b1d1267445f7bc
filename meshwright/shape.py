"""The model as sizes: what a plan, a utilisation and a memory estimate are computed from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.units import Flops


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of one model; parameters are counted once however many names they have."""

    name: str
    """What was asked for."""
    parameters: int
    """All parameters."""
    layer_parameters: tuple[int, ...]
    """Parameters of each block, in order."""
    embedding_parameters: int
    """Token and learned position embeddings."""
    head_parameters: int
    """Projection to logits; 0 when it is tied to the embedding."""
    other_parameters: int
    """What is in no block and is neither embedding nor head: final norm ..."""
    matmul_parameters: int
    """Weights that each token multiplies, the head included though tied, the embedding tables not, of a mixture only
    the experts that a token visits."""
    layers: int
    """Number of blocks."""
    width: int
    """D."""
    heads: int
    """H; 0 for a model without attention heads."""
    head_size: int
    """E."""
    vocab: int
    """V."""
    experts: int = 0
    """X; 0 for a dense model."""
    active_experts: int = 0
    """Experts that one token visits."""

    def forward_flops_per_token(self, sequence: int) -> Flops:
        """Returns 2 N + 4 L S H E: two operations a matmul weight, scores and weighted values over S tokens.

        Args:
            sequence: tokens in a row, S; attention is counted over all of them, not over the causal half.

        Source: Chowdhery et al., PaLM (2022), appendix B, whose 6 N + 12 L H Q T counts forward and backward.
        """
        return Flops(2.0 * self.matmul_parameters + 4.0 * self.layers * sequence * self.heads * self.head_size)

    def train_flops_per_token(self, sequence: int) -> Flops:
        """Returns three times the forward: backward costs two. Recomputed activations don't count.

        Source: Chowdhery et al., PaLM (2022), appendix B (model FLOPs utilisation).
        """
        return Flops(3.0 * self.forward_flops_per_token(sequence))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values that `from_json` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelShape:
        """Builds the shape from what `to_json` gave."""
        return cls(**{**values, "layer_parameters": tuple(values["layer_parameters"])})
