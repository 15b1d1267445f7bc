"""Back-off of a node's connection attempts to a lost leader, and whether a loss is worth an event."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_S = 0.05
"""Pause before the second call of a leader that dropped the first one."""
CAP_S = 5.0
"""Longest pause."""
STEADY_S = 3.0
"""A connection that has lasted this long counts as stable, and its end as a new loss."""


class ReconnectBackoff:
    """Spaces a follower's calls of a leader by exponential back-off with jitter.

    Args:
        draw: returns numbers from 0 to 1; a pause is drawn from its upper half, so that nodes which lost a leader
            together don't call it together.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._leader = self._reported_leader = ""
        self._failed_calls, self._next_call_at = 0, 0.0

    def may_call(self, leader: str) -> bool:
        """Whether the pause before the next call of a leader is over; the first call of a leader has none."""
        # Another leader owes nothing to the failures of the one before.
        if leader != self._leader:
            self._leader, self._failed_calls, self._next_call_at = leader, 0, 0.0
        return time.monotonic() >= self._next_call_at

    def record_failed_call(self) -> None:
        """Doubles the pause after a failed call."""
        # The exponent is capped, since 2.0 ** 1024 overflows.
        pause = min(CAP_S, FIRST_S * 2.0 ** min(self._failed_calls, 32))
        self._failed_calls += 1
        self._next_call_at = time.monotonic() + pause * (0.5 + 0.5 * self._draw())

    def mark_stable(self) -> None:
        """Resets the back-off, since the connection is stable."""
        self._reported_leader, self._failed_calls, self._next_call_at = "", 0, 0.0

    def record_loss(self, leader: str) -> bool:
        """Records the end of a connection; returns whether to report it: once until a connection was stable again."""
        news, self._reported_leader = self._reported_leader != leader, leader
        return news
