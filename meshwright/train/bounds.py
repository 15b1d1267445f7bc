"""Bounds of every weight and moment under AdamW's updates: a value beyond them was corrupted by the machine.

With b1, b2 the decays and g the norm of the gradient that an update used, after clipping, every element keeps

    |m_t| <= max(|m_t-1|, g)        0 <= v_t <= max(v_t-1, g^2)
    |w_t| <= max(1, |1 - lr decay|) |w_t-1| + lr c sqrt(1 - b2^t) / (1 - b1^t)
    c^2 = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2))

the last by the Cauchy-Schwarz inequality over the sums that m and v are, for b1^2 < b2. These bounds also protect state
that only one rank holds, which has no copy to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.parallel.program import Program
from meshwright.torch_compat.tensors import foreach_norm
from meshwright.train.optimizer import MOMENTS, LocalAdamW
from meshwright.train.state import WEIGHTS

SLACK, GROWTH = 1.05, 2.0
"""Factors on the bounds of values and of updates, for rounding: bfloat16 rounds values to 1 part in 256, and an added
update to at most twice its size, or to nothing. For the same reason bounds of moments don't decay with the moments:
0.999 x a bfloat16 rounds to the same number."""
_LEAST = 1e-30
"""Magnitudes below this are never too large: rounding may leave remnants of underflow."""


class StateBounds:
    """Tracks how large each element of a rank's local weights and moments can be.

    Args:
        program: this rank's program.
        optimizer: over its weights.
    """

    def __init__(self, program: Program, optimizer: LocalAdamW) -> None:
        config = optimizer.config
        self._optimizer, self._config = optimizer, config
        weights = [weight for weight in (*program.weights, *program.frozen) if weight.local.numel()]
        # Only floating weights are updated by AdamW.
        self._weights = [weight for weight in weights if weight.local.is_floating_point()]
        # c of the module's head: finite for b1^2 < b2 only; otherwise weights have no bound.
        ratio = config.beta1**2 / config.beta2 if config.beta2 else math.inf
        self._ratio = (1 - config.beta1) / math.sqrt((1 - config.beta2) * (1 - ratio)) if ratio < 1 else math.inf
        self._largest_weights: list[float] = []
        self._mean_bound = self._square_bound = self._growth = 0.0
        self._decay_factor = 1.0
        self._updates = 0

    def start(self) -> None:
        """Takes the present state as correct, and measures it."""
        self._updates = self._optimizer.steps
        self.weights_moved()
        means, squares, _ = self._moments()
        self._mean_bound, self._square_bound = (max(sizes, default=0.0) for sizes in (means, squares))

    def weights_moved(self) -> None:
        """Takes the present weights as correct, and measures them: something else than an update has moved them."""
        self._growth, self._decay_factor = 0.0, 1.0
        self._largest_weights = _largest_magnitudes([weight.local for weight in self._weights])

    def updated(self, norm: float, lr: float) -> None:
        """Extends the bounds by an update.

        Args:
            norm: global 2-norm of its gradient, before clipping.
            lr: its learning rate.
        """
        config = self._config
        clipped_norm = min(norm, config.clip) if config.clip else norm
        self._updates += 1
        self._mean_bound, self._square_bound = (
            max(self._mean_bound, clipped_norm),
            max(self._square_bound, clipped_norm * clipped_norm),
        )
        # |update| <= lr c sqrt(1 - b2^t) / (1 - b1^t), the third inequality of the module's head.
        bias = math.sqrt(1 - config.beta2**self._updates) / (1 - config.beta1**self._updates)
        factor = max(1.0, abs(1 - lr * config.weight_decay))
        self._decay_factor *= factor
        # Bounds compose over updates: decay first, then the largest possible step.
        self._growth = factor * self._growth + lr * self._ratio * bias

    def broken(self) -> str | None:
        """Returns a sentence on the first tensor beyond its bound, None without one; else measures the state anew."""
        weights = _largest_magnitudes([weight.local for weight in self._weights])
        means, squares, least_square = self._moments()
        rows = [
            *((f"{WEIGHTS}/{weight.name}", size, SLACK * self._decay_factor * earlier_size + GROWTH * self._growth)
              for weight, size, earlier_size in zip(self._weights, weights, self._largest_weights)),
            *((MOMENTS[0], size, SLACK * self._mean_bound) for size in means),
            *((MOMENTS[1], size, SLACK * self._square_bound) for size in squares),
        ]  # fmt: skip
        for name, size, limit in rows:
            # Written so that NaN fails too.
            if not (size <= limit + _LEAST and math.isfinite(size)):
                return f"{name} holds {size:.4g}, of which its updates can't have made more than {limit:.4g}"
        # A sign bit flip in a second moment keeps its magnitude: only the sign shows it.
        if least_square < 0:
            return f"{MOMENTS[1]} holds {least_square:.4g}, and squares are never below 0"
        self._largest_weights, self._growth, self._decay_factor = weights, 0.0, 1.0
        self._mean_bound, self._square_bound = (max(sizes, default=0.0) for sizes in (means, squares))
        return None

    def _moments(self) -> tuple[list[float], list[float], float]:
        """Returns each first moment's and each second moment's largest magnitude, and the least second moment."""
        moments = self._optimizer.moments()
        means, squares = moments[::2], moments[1::2]
        least_square = torch.stack([square.min() for square in squares]) if squares else torch.zeros(1)
        return _largest_magnitudes(means), _largest_magnitudes(squares), float(least_square.min())


def _largest_magnitudes(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Returns each tensor's largest magnitude; NaN where it contains one.

    Args:
        tensors: local shards of any shape, floating, none of them empty.
    """
    detached = [tensor.detach() for tensor in tensors]
    if not detached:
        return []
    if detached[0].device.type == "cpu":
        # A tenth of the time of the CPU's infinity norm (5.8 million float32 on a core: 2 against 22 ms).
        extremes = torch.stack([extreme for tensor in detached for extreme in torch.aminmax(tensor)])
        return extremes.view(-1, 2).abs().amax(1).tolist()
    # One fused kernel for all tensors, and one transfer of the results.
    return torch.stack(foreach_norm(detached, math.inf)).tolist()
