"""What the page asks of a running job: shared counters, of which all ranks of a step learn by its all-reduce."""

from __future__ import annotations

import mmap
import struct

from meshwright.train.hooks import Request

ACTIONS = {"stop": Request.STOP, "checkpoint": Request.CHECKPOINT, "evaluate": Request.EVALUATE}
"""What can be asked for, by name."""
_SHARES = {"stop": 2.0**-22, "checkpoint": 2.0**-23, "evaluate": 2.0**-24}
"""Term of the stop count that one rank adds for each request. Ranks that were asked to end or to reconfigure add
multiples of 2**-20 (`memory.CUT_SHARE`), so that a float64 sum, with 53 bits, holds all of them exactly."""
_QUANTUM = 2.0**-20
_WORD = struct.Struct("<Q")


class PageRequests:
    """Shared counters of requests made and requests that a step has spread, a pair for each of `ACTIONS`.

    The page's process alone writes the first, one rank the second, so no update is lost.
    """

    def __init__(self) -> None:
        # Anonymous and shared: forked processes see it, no other.
        self._map = mmap.mmap(-1, 2 * len(ACTIONS) * _WORD.size)

    def make(self, action: str) -> None:
        """Requests an action, after the step under way; a request that is still open counts once.

        Raises:
            ValueError: for another name than those of `ACTIONS`.
        """
        self._write(2 * _index(action), self._read(2 * _index(action)) + 1)

    def share(self) -> float:
        """Returns this rank's term of the stop count for the open requests; 0.0 without any."""
        return sum(share for action, share in _SHARES.items() if self._is_open(action))

    def answer(self, requests: Request) -> None:
        """Marks requests as spread, which all ranks have learned of by a step's sum."""
        for action, flag in ACTIONS.items():
            if flag in requests:
                self._write(2 * _index(action) + 1, self._read(2 * _index(action)))

    def _is_open(self, action: str) -> bool:
        return self._read(2 * _index(action)) != self._read(2 * _index(action) + 1)

    def _read(self, word: int) -> int:
        value: int = _WORD.unpack_from(self._map, word * _WORD.size)[0]
        return value

    def _write(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * _WORD.size, value)


def _index(action: str) -> int:
    return list(ACTIONS).index(action)


def split_stop_count(total: float) -> tuple[float, Request]:
    """Splits an all-reduced stop count into that of the ranks, and the requests of the page.

    Args:
        total: sum over the ranks of a step, of which at most one added `PageRequests.share`.

    Returns:
        The sum of what ranks were asked, as without a page; and the page's requests.
    """
    stop_count = total - total % _QUANTUM
    requests = Request.NONE
    for action, share in _SHARES.items():
        # Each share is a bit of its own: an odd multiple says that it is set.
        if int((total - stop_count) / share) % 2:
            requests |= ACTIONS[action]
    return stop_count, requests
