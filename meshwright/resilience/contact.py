"""How often a node calls the leader that it has lost, and whether the loss is news."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_S = 0.05
"""Before the second call of a leader that dropped the first one."""
CAP_S = 5.0
"""No pause is longer."""
STEADY_S = 3.0
"""A connection that has stood for so long is one, and its end another loss."""


class Contact:
    """A follower's attempts to reach one leader after another: exponential pauses, drawn from their upper half.

    Args:
        draw: gives numbers from 0 to 1, so that nodes which lost a leader together don't call it together.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._leader = self._told = ""
        self._failed, self._next = 0, 0.0

    def may_call(self, leader: str) -> bool:
        """Whether the pause before the next call of a leader is over; there is none before the first."""
        if leader != self._leader:
            self._leader, self._failed, self._next = leader, 0, 0.0
        return time.monotonic() >= self._next

    def failed(self) -> None:
        """Lengthens the pause, since the call came to nothing."""
        pause = min(CAP_S, FIRST_S * 2.0 ** min(self._failed, 32))
        self._failed += 1
        self._next = time.monotonic() + pause * (0.5 + 0.5 * self._draw())

    def stands(self) -> None:
        """Begins anew, since the connection is one."""
        self._told, self._failed, self._next = "", 0, 0.0

    def lost(self, leader: str) -> bool:
        """Notes the end of a connection; returns whether it is to be told: once, until one has stood again."""
        news, self._told = self._told != leader, leader
        return news
