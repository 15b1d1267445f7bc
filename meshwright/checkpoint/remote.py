"""Snapshots in another node's memory: read over authenticated TCP, with the same tables and the same checksums."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from meshwright.checkpoint.snapshot import HEADER_BYTES, Snapshot, parse_header
from meshwright.errors import CheckpointError
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, WireError

_REQUEST = struct.Struct("<qqqqq")
_ANSWER = struct.Struct("<qq")
_WAIT_S = 10.0
_IDLE_POLL_S = 3600.0
Key = tuple[int, int, int]
"""Generation, step and rank of a snapshot."""


class Shelf:
    """A client of another node's snapshots; it connects at the first read.

    Args:
        host: of the node.
        port: that `serve` listens on.
        key: secret of the run.
    """

    def __init__(self, host: str, port: int, key: RunKey) -> None:
        self._address, self._key = (host, port), key
        self._connection: Connection | None = None

    def read(self, key: Key, offset: int, size: int) -> tuple[memoryview, int]:
        """Reads ``size`` bytes from ``offset`` on; returns them and the size of the whole snapshot.

        Raises:
            CheckpointError: when the node can't be reached, or doesn't hold it.
        """
        try:
            if self._connection is None:
                self._connection = connect(self._address, self._key, Channel.SHELF, _WAIT_S)
                self._connection.limit(_WAIT_S)
            self._connection.send(_REQUEST.pack(*key, offset, size))
            answer_size, snapshot_size = _receive_fields(_ANSWER, self._connection)
            # A size of -1 means that the node has no such snapshot: receive nothing.
            data = memoryview(bytearray(size if answer_size == size else 0))
            self._connection.receive_parcel(data)
        except OSError as error:
            self.close()
            host, port = self._address
            raise CheckpointError(f"lost contact with another rank's memory at {host}:{port}: {error}") from error
        if answer_size != size:
            raise CheckpointError(f"{self._address[0]} has no snapshot of step {key[1]} of rank {key[2]}")
        return data, snapshot_size

    def close(self) -> None:
        """Closes the connection; the next read opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RemoteSnapshot(Snapshot):
    """A snapshot on another node; its tables are read at once, its values when they are needed."""

    def __init__(self, shelf: Shelf, key: Key) -> None:
        """Reads the header and the tables.

        Raises:
            CheckpointError: when they can't be read, or are damaged.
        """
        self._shelf, self._key = shelf, key
        header_data, snapshot_size = shelf.read(key, 0, HEADER_BYTES)
        header_fields = parse_header(header_data)
        if header_fields is None or not HEADER_BYTES <= header_fields[2] <= snapshot_size:
            raise CheckpointError(f"rank {key[2]}'s snapshot of step {key[1]} is damaged")
        # Header and tables in one read, up to the data's offset; values follow one by one.
        super().__init__(shelf.read(key, 0, header_fields[2])[0], snapshot_size)

    def read(self, offset: int, size: int) -> memoryview:
        """Reads ``size`` bytes of the segment from ``offset`` on."""
        return self._shelf.read(self._key, offset, size)[0]


def remote_snapshot(shelf: Shelf, key: Key) -> Callable[[], Snapshot]:
    """Returns a function that opens a snapshot on another node."""
    return partial(RemoteSnapshot, shelf, key)


def serve(
    listener: socket.socket, snapshots: Iterable[tuple[Key, Snapshot]], key: RunKey, refused: Refused | None = None
) -> None:
    """Serves snapshots to `Shelf` clients until the process ends, each in a thread.

    Args:
        listener: socket that clients connect to.
        snapshots: (key, snapshot) of all that they may read.
        key: secret of the run; a client without it reads nothing.
        refused: called for strangers that fail to authenticate.
    """
    snapshots_by_key, gate = dict(snapshots), Gate(listener, key, Channel.SHELF, refused)
    while True:
        for connection in gate.poll(_IDLE_POLL_S if not gate.strangers else 1.0):
            # A thread a client: one slow reader must not hold up the recovery of others.
            threading.Thread(target=_answer, args=(connection, snapshots_by_key, gate), daemon=True).start()


def _answer(connection: Connection, snapshots_by_key: dict[Key, Snapshot], gate: Gate) -> None:
    """Answers one client until it disconnects; a range outside a snapshot is refused."""
    with connection:
        try:
            while True:
                generation, step, rank, offset, size = _receive_fields(_REQUEST, connection)
                snapshot = snapshots_by_key.get((generation, step, rank))
                # The range comes from another machine: nothing outside the snapshot may be read.
                if snapshot is None or offset < 0 or size < 0 or offset + size > snapshot.size:
                    connection.send(_ANSWER.pack(-1, 0))
                    continue
                connection.send(_ANSWER.pack(size, snapshot.size))
                connection.send_parcel(memoryview(snapshot.read(offset, size)))
        except WireError as error:
            gate.report_refusal(connection.address, str(error))
        except OSError:
            return


def _receive_fields(layout: struct.Struct, connection: Connection) -> tuple[int, ...]:
    """Receives a message and unpacks its integers.

    Raises:
        WireError: when its length differs from the layout's.
    """
    contents = connection.receive(layout.size)
    if len(contents) != layout.size:
        raise WireError(f"a message of {len(contents)} bytes came where {layout.size} were due")
    return layout.unpack(contents)


def complete_steps(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the (step, generation) of which every rank's snapshot is present, newest first.

    Args:
        rows: (generation, step, rank, number of ranks, ...) of each snapshot on any node.
    """
    ranks_by_step: dict[tuple[int, int], tuple[set[int], int]] = {}
    for generation, step, rank, ranks, *_ in rows:
        # A step counts once every rank of its generation has a snapshot on some reachable node.
        ranks_by_step.setdefault((step, generation), (set(), ranks))[0].add(rank)
    return sorted(
        (key for key, (present_ranks, ranks) in ranks_by_step.items() if present_ranks >= set(range(max(1, ranks)))),
        reverse=True,
    )
