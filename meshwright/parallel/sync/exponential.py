"""One peer a round, twice as far away each time: islands average pairwise, and after log2 n rounds everyone has met.

Source: Assran et al., Stochastic Gradient Push (ICML 2019), section 3; Ying et al., Exponential Graph is Provably
Efficient (NeurIPS 2021): over log2 n exchanges in a row the average is exact.
"""

from __future__ import annotations

import torch

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.sync.contract import Exchange, PendingMean


class Exponential(Exchange):
    """The mean of an island's values and those of the island 2^(t mod log2 n) before it, in exchange t."""

    name = "exponential"
    global_mean = False

    def check(self, islands: int) -> None:
        """Refuses a number of islands that is no power of two."""
        if islands & (islands - 1):
            near = 1 << (islands.bit_length() - 1)
            raise ConfigError(
                f"outer.topology = exponential doubles the distance of its peers, which {islands} islands don't divide "
                f"into; nearest that works: islands={near}, or --outer.topology ring"
            )

    def start(
        self, values: torch.Tensor, weight: float, group: AxisGroup, exchange_index: int, compress: str = "none"
    ) -> PendingMean:
        """Starts sending ``values: (n,)`` to one island and receiving those of another."""
        distance = 1 << exchange_index % (group.size.bit_length() - 1)
        received = torch.empty_like(values)
        source, target = (group.index - distance) % group.size, (group.index + distance) % group.size
        pending = group.exchange({source: received}, {target: values})

        def finish() -> torch.Tensor:
            pending.wait()
            return received.add_(values).div_(2.0)

        return PendingMean(finish, self.sent_bytes(values.numel(), values.element_size(), group.size))


EXCHANGE = Exponential()
