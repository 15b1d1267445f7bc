"""Second copies of the state that a generation's ranks go on from, made while they start.

A node that ran alone, or whose ranks ended before their last snapshots had been sent, holds some of that state as the
only one; until the new ranks' first snapshots have been sent, its loss would cost every step since the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.checkpoint.remote import Key, Shelf
from meshwright.checkpoint.snapshot import HEADER_BYTES, Segment, Snapshot, read_snapshots
from meshwright.errors import CheckpointError
from meshwright.resilience.courier import Helper
from meshwright.resilience.host_memory_budget import available_bytes
from meshwright.resilience.peers import Message

_CHUNK_BYTES = 8 << 20


def ranks_to_copy(order: Message, node: int) -> dict[int, int]:
    """Returns, for each rank of the old layout whose snapshot a node is to copy, the node that holds it alone.

    The next nodes of the ring copy, as many as hold copies of each node's snapshots.

    Args:
        order: the leader's.
        node: the one that asks.
    """
    state = order["state"]
    peers = order["peers"] if order["every"] else 0
    if state is None or not peers:
        return {}
    ring = sorted(map(int, order["nodes"]))
    wanted = {}
    for rank in state["alone"]:
        holder = state["places"][str(rank)]
        at = ring.index(holder) if holder in ring else -1
        if node != holder and node in [ring[(at + way) % len(ring)] for way in range(1, peers + 1)]:
            wanted[rank] = holder
    return wanted


class SpareCopies:
    """Copies snapshots from other nodes to this one, in a process of its own.

    Args:
        wanted: for each snapshot where to read it.
    """

    def __init__(self, wanted: Mapping[Key, Callable[[], Shelf]]) -> None:
        self.wanted = tuple(wanted)
        """Generation, step and rank of each."""
        self._segments = [Segment() for _ in wanted]

        def work() -> None:
            for (key, shelf), segment in zip(wanted.items(), self._segments):
                try:
                    _copy(shelf(), key, segment)
                except CheckpointError:  # the node that holds it is gone, and who leads sees it
                    continue

        self._helper = Helper(work)
        self._told = False

    @property
    def just_done(self) -> bool:
        """Whether it has ended since this was asked last."""
        done = not self._told and self._helper.died
        self._told |= done
        return done

    def snapshots(self) -> list[Snapshot]:
        """Returns what has been copied whole."""
        return read_snapshots(self._segments)

    def close(self) -> None:
        """Ends the copying and lets go of the memory, which lives on in `snapshots`."""
        self._helper.close()
        for segment in self._segments:
            segment.close()


def _copy(shelf: Shelf, key: Key, segment: Segment) -> None:
    """Copies a snapshot; its header is written last, as its own rank wrote it."""
    head, whole = shelf.read(key, 0, HEADER_BYTES)
    if available_bytes() < 2 * whole:
        return
    memory = segment.map(whole)
    for at in range(HEADER_BYTES, whole, _CHUNK_BYTES):
        end = min(whole, at + _CHUNK_BYTES)
        memory[at:end] = bytes(shelf.read(key, at, end - at)[0])
    memory[:HEADER_BYTES] = bytes(head)
    shelf.close()
