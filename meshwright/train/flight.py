"""How a supervisor asks its ranks what their devices are at, when nothing moves: each has a thread that answers."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable

from meshwright.checkpoint.snapshot import Segment
from meshwright.monitor.flight import read_dump, unfinished

WAIT_S = 1.0
"""A rank that doesn't answer within so long can't: its interpreter is held, or its driver."""
_SPACE = 256
_SIZE = struct.Struct("<q")
_POLL_S = 0.01


class Flight:
    """Questions and answers between a supervisor and the ranks of its node; made before they are forked.

    Args:
        ranks: of this node.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._segment = Segment()
        self._map = self._segment.map(_SPACE * ranks)
        self._asks, self._asked = os.pipe()

    def answer(self, local_rank: int, dump: Callable[[], bytes] | None) -> None:
        """Answers on a rank, once, by a thread that sleeps until it is asked.

        Args:
            local_rank: among the ranks of this node.
            dump: of the recorder; None where there is none.
        """
        if dump is not None:
            work = threading.Thread(target=self._answer, args=(local_rank, dump), name="flight", daemon=True)
            work.start()

    def _answer(self, local_rank: int, dump: Callable[[], bytes]) -> None:
        # A byte for each rank comes at once, of which each takes one.
        if not os.read(self._asks, 1):
            return
        try:
            found = unfinished(read_dump(dump()))
        except Exception:  # a dump of another form than is known says nothing, and must not be what is told
            return
        words = (str(found) if found is not None else "").encode()[: _SPACE - _SIZE.size]
        at = _SPACE * local_rank
        self._map[at + _SIZE.size : at + _SIZE.size + len(words)] = words
        _SIZE.pack_into(self._map, at, len(words) + 1)

    def ask(self) -> dict[int, str]:
        """Asks all ranks, and returns what those that answered say, by local rank; empty words where nothing waits."""
        os.write(self._asked, bytes(self._ranks))
        end = time.monotonic() + WAIT_S
        while len(found := self._answers()) < self._ranks and time.monotonic() < end:
            time.sleep(_POLL_S)
        return found

    def _answers(self) -> dict[int, str]:
        found = {}
        for rank in range(self._ranks):
            (size,) = _SIZE.unpack_from(self._map, _SPACE * rank)
            if size:
                at = _SPACE * rank + _SIZE.size
                found[rank] = self._map[at : at + size - 1].decode("utf-8", "replace")
        return found

    def close(self) -> None:
        """Lets go of memory and pipe."""
        self._map.close()
        self._segment.close()
        for fd in (self._asks, self._asked):
            os.close(fd)
