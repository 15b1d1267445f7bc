"""What a model does to its head's product on the way to its logits: a factor, and a soft limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LogitMap:
    """Logits z of a head's product x: z = a x, or z = c tanh(a x / c) with a limit c.

    Source: Gemma Team, Gemma 2 (2024), section 2, for the limit; Cohere's and Granite's models have a factor.
    """

    factor: float = 1.0
    """a."""
    limit: float = 0.0
    """c; 0 for none."""

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """Returns the logits of ``product``, of any shape, in its memory."""
        if self.limit:
            return product.mul_(self.factor / self.limit).tanh_().mul_(self.limit)
        return product if self.factor == 1.0 else product.mul_(self.factor)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Returns the derivative dz/dx at ``logits`` z, of any shape: a (1 - (z / c)^2), or a."""
        if not self.limit:
            return self.factor
        return (logits / self.limit).square_().neg_().add_(1.0).mul_(self.factor)
