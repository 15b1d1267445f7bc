"""Snapshots that lie on another node: read over TCP, with the same tables and the same checksums."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from meshwright.checkpoint.snapshot import HEADER_BYTES, Snapshot, header
from meshwright.errors import CheckpointError

_ASK = struct.Struct("<qqqqq")
_ANSWER = struct.Struct("<qq")
_WAIT_S = 10.0
Key = tuple[int, int, int]
"""Generation, step and rank of a snapshot."""


class Shelf:
    """Reads the snapshots that another node holds; connects at the first read.

    Args:
        host: of the node.
        port: where `serve` listens there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address, self._socket = (host, port), None  # type: tuple[str, int], socket.socket | None

    def read(self, key: Key, at: int, size: int) -> tuple[memoryview, int]:
        """Returns some bytes of a snapshot, and how long it is.

        Raises:
            CheckpointError: when the node can't be reached, or doesn't hold it.
        """
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, _WAIT_S)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_ASK.pack(*key, at, size))
            found, whole = _ANSWER.unpack(receive(self._socket, _ANSWER.size))
            data = receive(self._socket, max(0, found))
        except OSError as error:
            host, port = self._address
            raise CheckpointError(f"lost contact with another rank's memory at {host}:{port}: {error}") from error
        if found != size:
            raise CheckpointError(f"{self._address[0]} has no snapshot of step {key[1]} of rank {key[2]}")
        return data, whole

    def close(self) -> None:
        """Ends the connection; another read opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


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


def serve(listener: socket.socket, snapshots: Iterable[tuple[Key, Snapshot]]) -> None:
    """Answers `Shelf`s for ever."""
    held = dict(snapshots)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, held), daemon=True).start()


def _answer(connection: socket.socket, held: dict[Key, Snapshot]) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                generation, step, rank, at, size = _ASK.unpack(receive(connection, _ASK.size))
                one = held.get((generation, step, rank))
                if one is None or not 0 <= at <= at + size <= one.size:
                    connection.sendall(_ANSWER.pack(-1, 0))
                    continue
                connection.sendall(_ANSWER.pack(size, one.size))
                connection.sendall(one.read(at, size))
        except OSError:
            return


def receive(connection: socket.socket, size: int) -> memoryview:
    """Returns exactly so many bytes of a connection.

    Raises:
        ConnectionError: when it ends before.
    """
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = connection.recv_into(data[at:])
        if not got:
            raise ConnectionError("the connection ended")
        at += got
    return data


def whole_steps(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns (step, generation) of which every rank's snapshot is there, newest first.

    Args:
        rows: generation, step, rank and number of ranks (and more) of the snapshots that are held anywhere.
    """
    found: dict[tuple[int, int], tuple[set[int], int]] = {}
    for generation, step, rank, ranks, *_ in rows:
        found.setdefault((step, generation), (set(), ranks))[0].add(rank)
    return sorted((key for key, (held, ranks) in found.items() if held >= set(range(max(1, ranks)))), reverse=True)
