"""Snapshots that lie on another node: read over authenticated TCP, with the same tables and the same checksums."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from meshwright.checkpoint.snapshot import HEADER_BYTES, Snapshot, header
from meshwright.errors import CheckpointError
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, WireError

_ASK = struct.Struct("<qqqqq")
_ANSWER = struct.Struct("<qq")
_WAIT_S = 10.0
_FOR_EVER_S = 3600.0
Key = tuple[int, int, int]
"""Generation, step and rank of a snapshot."""


class Shelf:
    """Reads the snapshots that another node holds; connects at the first read.

    Args:
        host: of the node.
        port: where `serve` listens there.
        key: of the run.
    """

    def __init__(self, host: str, port: int, key: RunKey) -> None:
        self._address, self._key = (host, port), key
        self._connection: Connection | None = None

    def read(self, key: Key, at: int, size: int) -> tuple[memoryview, int]:
        """Returns some bytes of a snapshot, and how long it is.

        Raises:
            CheckpointError: when the node can't be reached, or doesn't hold it.
        """
        try:
            if self._connection is None:
                self._connection = connect(self._address, self._key, Channel.SHELF, _WAIT_S)
                self._connection.limit(_WAIT_S)
            self._connection.send(_ASK.pack(*key, at, size))
            found, whole = _unpacked(_ANSWER, self._connection)
            data = memoryview(bytearray(size if found == size else 0))
            self._connection.receive_parcel(data)
        except OSError as error:
            self.close()
            host, port = self._address
            raise CheckpointError(f"lost contact with another rank's memory at {host}:{port}: {error}") from error
        if found != size:
            raise CheckpointError(f"{self._address[0]} has no snapshot of step {key[1]} of rank {key[2]}")
        return data, whole

    def close(self) -> None:
        """Ends the connection; another read opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RemoteSnapshot(Snapshot):
    """A snapshot on another node; its table is read at once, its values when they are asked for."""

    def __init__(self, shelf: Shelf, key: Key) -> None:
        """Reads the header and the tables.

        Raises:
            CheckpointError: when they can't be read, or are damaged.
        """
        self._shelf, self._key = shelf, key
        head, whole = shelf.read(key, 0, HEADER_BYTES)
        found = header(head)
        if found is None or not HEADER_BYTES <= found[2] <= whole:
            raise CheckpointError(f"rank {key[2]}'s snapshot of step {key[1]} is damaged")
        super().__init__(shelf.read(key, 0, found[2])[0], whole)

    def read(self, at: int, size: int) -> memoryview:
        """Reads bytes of the segment."""
        return self._shelf.read(self._key, at, size)[0]


def remote(shelf: Shelf, key: Key) -> Callable[[], Snapshot]:
    """Returns what opens a snapshot on another node."""
    return partial(RemoteSnapshot, shelf, key)


def serve(
    listener: socket.socket, snapshots: Iterable[tuple[Key, Snapshot]], key: RunKey, refused: Refused | None = None
) -> None:
    """Answers `Shelf`s for ever.

    Args:
        listener: where they connect.
        snapshots: what they may read.
        key: of the run; who doesn't have it reads nothing.
        refused: told of those.
    """
    held, gate = dict(snapshots), Gate(listener, key, Channel.SHELF, refused)
    while True:
        for connection in gate.poll(_FOR_EVER_S if not gate.strangers else 1.0):
            threading.Thread(target=_answer, args=(connection, held, gate), daemon=True).start()


def _answer(connection: Connection, held: dict[Key, Snapshot], gate: Gate) -> None:
    with connection:
        try:
            while True:
                generation, step, rank, at, size = _unpacked(_ASK, connection)
                one = held.get((generation, step, rank))
                if one is None or at < 0 or size < 0 or at + size > one.size:
                    connection.send(_ANSWER.pack(-1, 0))
                    continue
                connection.send(_ANSWER.pack(size, one.size))
                connection.send_parcel(memoryview(one.read(at, size)))
        except WireError as error:
            gate.tell(connection.address, str(error))
        except OSError:
            return


def _unpacked(form: struct.Struct, connection: Connection) -> tuple[int, ...]:
    """Returns the numbers of the next message.

    Raises:
        WireError: when it is of another length.
    """
    contents = connection.receive(form.size)
    if len(contents) != form.size:
        raise WireError(f"a message of {len(contents)} bytes came where {form.size} were due")
    return form.unpack(contents)


def whole_steps(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns (step, generation) of which every rank's snapshot is there, newest first.

    Args:
        rows: generation, step, rank and number of ranks (and more) of the snapshots that are held anywhere.
    """
    found: dict[tuple[int, int], tuple[set[int], int]] = {}
    for generation, step, rank, ranks, *_ in rows:
        found.setdefault((step, generation), (set(), ranks))[0].add(rank)
    return sorted((key for key, (held, ranks) in found.items() if held >= set(range(max(1, ranks)))), reverse=True)
