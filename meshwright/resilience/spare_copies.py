"""Second copies of the state that a generation restores, made while its ranks start.

A node that ran alone, or whose ranks ended before their last snapshots were sent, may be the only holder of some state.
Until the new ranks' first snapshots are sent, its loss would cost every step since the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.checkpoint.remote import Key, Shelf
from meshwright.checkpoint.snapshot import HEADER_BYTES, Segment, Snapshot, read_snapshots
from meshwright.errors import CheckpointError
from meshwright.launch.host_memory import available_bytes
from meshwright.resilience.helper import Helper

_CHUNK_BYTES = 8 << 20


class SpareCopies:
    """Copies snapshots from other nodes to this one in a forked process.

    Args:
        servers: connects to the server of each snapshot's holder.
    """

    def __init__(self, servers: Mapping[Key, Callable[[], Shelf]]) -> None:
        self.wanted = tuple(servers)
        """Generation, step and rank of each snapshot."""
        self._segments = [Segment() for _ in servers]

        def copy_all() -> None:
            for (key, server), segment in zip(servers.items(), self._segments):
                try:
                    _copy_snapshot(server(), key, segment)
                except CheckpointError:  # its holder is gone, which the leader notices by itself
                    continue

        # A process, not a thread: the supervisor's thread must stay responsive, and forks ranks.
        self._helper = Helper(copy_all)
        self._reported = False

    @property
    def just_done(self) -> bool:
        """Whether the copying has ended since the last access."""
        finished = not self._reported and self._helper.died
        self._reported |= finished
        return finished

    def snapshots(self) -> list[Snapshot]:
        """Returns the completely copied snapshots."""
        return read_snapshots(self._segments)

    def close(self) -> None:
        """Ends the copying and closes the segments; `snapshots` keep their memory."""
        self._helper.close()
        for segment in self._segments:
            segment.close()


def _copy_snapshot(server: Shelf, key: Key, segment: Segment) -> None:
    """Copies a snapshot, its header last: a segment without a header holds no snapshot."""
    header_bytes, size = server.read(key, 0, HEADER_BYTES)
    # A copy is a precaution: never at the price of memory that ranks may need.
    if available_bytes() < 2 * size:
        return
    memory = segment.map(size)
    for start in range(HEADER_BYTES, size, _CHUNK_BYTES):
        stop = min(size, start + _CHUNK_BYTES)
        memory[start:stop] = bytes(server.read(key, start, stop - start)[0])
    memory[:HEADER_BYTES] = bytes(header_bytes)
    server.close()
