"""Top-k sums written down plainly in numpy, with every copy's state in one place, sharing no code with the runtime.

Here a copy's values are sorted in full, and what travels is picked off the front; the runtime finds a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.proof.plain_rounding import Floats, sum_in_order


@dataclass
class PlainTopK:
    """The sums of all steps, in the gradients' type, with their state.

    Args:
        inverse_density: of so many values one travels.
        exact_steps: first steps that are summed exactly.
    """

    inverse_density: int
    exact_steps: int
    _owed: dict[str, list[Floats]] = field(default_factory=dict)
    """What each copy owes of a weight, (n,), in order."""
    _next: dict[str, list[Floats]] = field(default_factory=dict)

    def finish_step(self, updates_weights: bool) -> None:
        """Ends a step, which changes what is owed where it updates the weights."""
        if updates_weights:
            self._owed |= self._next
        self._next.clear()

    def sum(
        self, name: str, terms: Sequence[Floats], step: int, shape: Sequence[int], local_shape: Sequence[int]
    ) -> Floats:
        """Returns the sum of a weight's gradients, (n,).

        Args:
            name: of the weight.
            terms: (n,) of each copy, in order.
            step: number of the step, from 0 on.
            shape: of the whole weight.
            local_shape: of this rank's part.
        """
        long_dims = [size for size in shape if size > 1]
        if step < self.exact_steps or len(long_dims) < 2:
            return sum_in_order(terms)
        elements = int(np.prod(local_shape))
        sent = max(1, int(np.ceil(elements / self.inverse_density)))
        total, owed = np.zeros(elements, terms[0].dtype), []
        for copy, term in enumerate(terms):
            values = term + self._owed[name][copy] if name in self._owed else term.copy()
            # By magnitude, the largest first; a stable sort leaves equal ones in order of their index.
            largest = np.argsort(-np.abs(values), kind="stable")[:sent]
            total[largest] = total[largest] + values[largest]
            values[largest] = 0.0
            owed.append(values)
        self._next[name] = owed
        return total
