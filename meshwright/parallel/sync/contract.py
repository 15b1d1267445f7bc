"""The contract of a topology: whom an island exchanges values with in a round, and what mean it gets.

A file of `parallel/sync/` exports one `EXCHANGE`. It knows nothing of optimizers, names or steps: it gets a flat tensor
and returns a mean of the islands' tensors. A parameter server, a quorum of the islands that answer in time, and islands
in other sites are further files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.spec.gossip import GOSSIP_PEERS


@dataclass(slots=True)
class PendingMean:
    """A mean under way."""

    finish: Callable[[], torch.Tensor]
    """Waits for the transfer and returns the mean, (n,), of the dtype and device of what was handed over."""
    sent_bytes: int
    """Bytes that this rank sends for it."""


class Exchange(ABC):
    """One topology; all ranks of the islands' group call `start` together, in the same order."""

    name: str
    """As `outer.topology` has it."""
    global_mean: bool
    """Whether every island gets the mean over all islands, to the same bits; else the islands' weights stay apart."""

    def sent_bytes(self, elements: int, element_bytes: int, islands: int, compress: str = "none") -> int:
        """Returns the bytes that a rank sends in an exchange.

        Args:
            elements: values that it hands over.
            element_bytes: of one in its own type.
            islands: number of islands.
            compress: what values travel as, one of `outer.compress`.
        """
        return min(GOSSIP_PEERS.get(self.name, 0), islands - 1) * elements * element_bytes

    @abstractmethod
    def check(self, islands: int) -> None:
        """Refuses a number of islands.

        Raises:
            ConfigError: with the nearest number that works.
        """

    @abstractmethod
    def start(
        self, values: torch.Tensor, weight: float, group: AxisGroup, exchange_index: int, compress: str = "none"
    ) -> PendingMean:
        """Starts an exchange.

        Args:
            values: (n,) this island's, which may be overwritten.
            weight: this island's weight in the mean; topologies without a global mean count each island once.
            group: the ranks that hold the same part of the weights, one of each island.
            exchange_index: exchanges of these values before this one.
            compress: what values travel as, one of `outer.compress`.
        """
