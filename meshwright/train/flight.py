"""Lets a supervisor query which operation the GPU of each hung rank waits for, by a thread in each rank."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable

from meshwright.checkpoint.snapshot import Segment
from meshwright.monitor.flight import read_dump, unfinished

WAIT_S = 1.0
"""A rank that doesn't answer within this time can't: its interpreter or its driver is blocked."""
_ANSWER_BYTES = 256
_SIZE = struct.Struct("<q")
_POLL_S = 0.01


class Flight:
    """A request pipe and shared answers between a supervisor and its node's ranks; made before they are forked.

    Args:
        ranks: of this node.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._segment = Segment()
        self._map = self._segment.map(_ANSWER_BYTES * ranks)
        self._request_reader, self._request_writer = os.pipe()

    def answer(self, local_rank: int, dump: Callable[[], bytes] | None) -> None:
        """Starts a thread on a rank that answers one query.

        Args:
            local_rank: index among the ranks of this node.
            dump: returns the flight recorder's dump; None without a recorder.
        """
        if dump is not None:
            thread = threading.Thread(target=self._wait_and_answer, args=(local_rank, dump), name="flight", daemon=True)
            thread.start()

    def _wait_and_answer(self, local_rank: int, dump: Callable[[], bytes]) -> None:
        # One query writes a byte for each rank; each rank reads one.
        if not os.read(self._request_reader, 1):
            return
        try:
            operation = unfinished(read_dump(dump()))
        except Exception:  # an unknown dump format must not replace the error that is being diagnosed
            return
        text = (str(operation) if operation is not None else "").encode()[: _ANSWER_BYTES - _SIZE.size]
        offset = _ANSWER_BYTES * local_rank
        # Text first, then its size: a nonzero size says that the text is complete.
        self._map[offset + _SIZE.size : offset + _SIZE.size + len(text)] = text
        _SIZE.pack_into(self._map, offset, len(text) + 1)

    def query(self) -> dict[int, str]:
        """Queries all ranks; returns the answers by local rank, empty text for a GPU that waits for nothing."""
        os.write(self._request_writer, bytes(self._ranks))
        deadline = time.monotonic() + WAIT_S
        # Ranks whose interpreter is blocked never answer: don't wait longer than `WAIT_S`.
        while len(answers := self._read_answers()) < self._ranks and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return answers

    def _read_answers(self) -> dict[int, str]:
        answers = {}
        for rank in range(self._ranks):
            (size,) = _SIZE.unpack_from(self._map, _ANSWER_BYTES * rank)
            if size:
                offset = _ANSWER_BYTES * rank + _SIZE.size
                answers[rank] = self._map[offset : offset + size - 1].decode("utf-8", "replace")
        return answers

    def close(self) -> None:
        """Lets go of memory and pipe."""
        self._map.close()
        self._segment.close()
        for fd in (self._request_reader, self._request_writer):
            os.close(fd)
