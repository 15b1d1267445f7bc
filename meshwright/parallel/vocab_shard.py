"""Cross-entropy over logits whose vocabulary is split: no rank ever sees another's logits.

Source: Shoeybi et al., Megatron-LM (2019), section 3; two small all-reduces a micro-batch: (tokens,), (2, tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.parallel.axis_group import AxisGroup


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The run [start, stop) of the vocabulary whose logits this rank computes, and the ranks that have the rest."""

    axis_group: AxisGroup
    start: int
    stop: int

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Replaces ``values`` (any shape) by their element-wise maximum over the ranks, in place, and returns them."""
        self.axis_group.all_reduce_max(values).wait()
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Replaces ``values`` (any shape) by their element-wise sum over the ranks, in place, and returns them."""
        self.axis_group.all_reduce(values).wait()
        return values
