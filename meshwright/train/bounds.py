"""What AdamW can have made of a state: a weight or moment beyond that was damaged by the machine.

With b1, b2 the decays and g the norm of the gradient that an update used, after clipping, every element keeps

    |m_t| <= max(|m_t-1|, g)        0 <= v_t <= max(v_t-1, g^2)
    |w_t| <= max(1, |1 - lr decay|) |w_t-1| + lr c sqrt(1 - b2^t) / (1 - b1^t)
    c^2 = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2))

the last by Cauchy and Schwarz over the sums that m and v are, for b1^2 < b2. Whoever holds a part once, so that there
is no copy to compare it with, still sees what no training can have done to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.parallel.program import Program
from meshwright.train.optimizer import MOMENTS, LocalAdamW
from meshwright.train.state import WEIGHTS

SLACK, GROWTH = 1.05, 2.0
"""By what moments and weights may be over their bound, and by what an update may be over its own: bfloat16 rounds to 1
part in 256, and what an update adds to at most twice that, or to nothing. For the same reason bounds of moments don't
decay with them: 0.999 of a bfloat16 is that number again."""
_LEAST = 1e-30
"""Below this nothing is too large: rounding may leave something of what underflows."""


class StateBounds:
    """Knows how large each element of a rank's state can be.

    Args:
        program: of this rank.
        optimizer: over its weights.
    """

    def __init__(self, program: Program, optimizer: LocalAdamW) -> None:
        config = optimizer.config
        self._optimizer, self._config = optimizer, config
        weights = [weight for weight in (*program.weights, *program.frozen) if weight.local.numel()]
        self._weights = [weight for weight in weights if weight.local.is_floating_point()]
        ratio = config.beta1**2 / config.beta2 if config.beta2 else math.inf
        self._ratio = (1 - config.beta1) / math.sqrt((1 - config.beta2) * (1 - ratio)) if ratio < 1 else math.inf
        self._largest: list[float] = []
        self._mean = self._square = self._growth = 0.0
        self._swelling = 1.0
        self._updates = 0

    def start(self) -> None:
        """Takes the state as it stands for sound."""
        self._updates, self._growth, self._swelling = self._optimizer.steps, 0.0, 1.0
        self._largest = _sizes([weight.local for weight in self._weights])
        means, squares, _ = self._moments()
        self._mean, self._square = (max(found, default=0.0) for found in (means, squares))

    def updated(self, norm: float, lr: float) -> None:
        """Takes note of an update.

        Args:
            norm: of its gradient, before clipping.
            lr: its learning rate.
        """
        config = self._config
        used = min(norm, config.clip) if config.clip else norm
        self._updates += 1
        self._mean, self._square = max(self._mean, used), max(self._square, used * used)
        bias = math.sqrt(1 - config.beta2**self._updates) / (1 - config.beta1**self._updates)
        swelling = max(1.0, abs(1 - lr * config.weight_decay))
        self._swelling *= swelling
        self._growth = swelling * self._growth + lr * self._ratio * bias

    def broken(self) -> str | None:
        """Returns which tensor is beyond what its updates can have made of it, and how far; None while none is."""
        weights = _sizes([weight.local for weight in self._weights])
        means, squares, least = self._moments()
        rows = [
            *((f"{WEIGHTS}/{weight.name}", size, SLACK * self._swelling * before + GROWTH * self._growth)
              for weight, size, before in zip(self._weights, weights, self._largest)),
            *((MOMENTS[0], size, SLACK * self._mean) for size in means),
            *((MOMENTS[1], size, SLACK * self._square) for size in squares),
        ]  # fmt: skip
        for name, size, limit in rows:
            if not (size <= limit + _LEAST and math.isfinite(size)):
                return f"{name} holds {size:.4g}, of which its updates can't have made more than {limit:.4g}"
        if least < 0:
            return f"{MOMENTS[1]} holds {least:.4g}, and squares are never below 0"
        self._largest, self._growth, self._swelling = weights, 0.0, 1.0
        self._mean, self._square = (max(found, default=0.0) for found in (means, squares))
        return None

    def _moments(self) -> tuple[list[float], list[float], float]:
        """Returns the largest size of each first and of each second moment, and the least second one."""
        held = self._optimizer.moments()
        means, squares = held[::2], held[1::2]
        least = torch.stack([square.min() for square in squares]) if squares else torch.zeros(1)
        return _sizes(means), _sizes(squares), float(least.min())


def _sizes(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Returns the largest size of an element of each tensor, none of them empty; NaN where one isn't a number."""
    held = [tensor.detach() for tensor in tensors]
    return torch.stack(torch._foreach_norm(held, math.inf)).tolist() if held else []
