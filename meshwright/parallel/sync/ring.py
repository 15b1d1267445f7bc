"""Both neighbours in a ring: each island averages its values with theirs.

Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? (NeurIPS 2017), D-PSGD on a ring.
"""

from __future__ import annotations

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.sync.contract import Exchange, PendingMean


class Ring(Exchange):
    """The mean of an island's values and those of its two neighbours, each a third; of two islands a half."""

    name = "ring"
    global_mean = False

    def check(self, islands: int) -> None:
        """Refuses no number of islands."""

    def start(
        self, values: torch.Tensor, weight: float, group: AxisGroup, exchange_index: int, compress: str = "none"
    ) -> PendingMean:
        """Starts exchanging ``values: (n,)`` with both neighbours."""
        neighbours = sorted({(group.index - 1) % group.size, (group.index + 1) % group.size})
        received = {peer: torch.empty_like(values) for peer in neighbours}
        pending = group.exchange(received, dict.fromkeys(neighbours, values))

        def finish() -> torch.Tensor:
            pending.wait()
            total = values.clone()
            for peer in neighbours:
                total.add_(received[peer])
            return total.div_(len(neighbours) + 1)

        return PendingMean(finish, self.sent_bytes(values.numel(), values.element_size(), group.size))


EXCHANGE = Ring()
