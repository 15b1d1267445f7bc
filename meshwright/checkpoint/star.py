"""Agreement of processes on several nodes without a process group: process 0 gathers values and sends them to all."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TypeVar

from meshwright.checkpoint.agreement import CODEC, Agreement
from meshwright.errors import CheckpointError
from meshwright.records import RecordError
from meshwright.transport.connection import CHALLENGE_S, Connection, connect, notify
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, WireError

_HELLO = struct.Struct("<qqq")
_RETRY_S = 0.05
_GIVE_UP_S = 1.0
_VALUE_BYTES = 1 << 28
"""Limit of one message: tables of some million shards."""
T = TypeVar("T")


class StarAgreement(Agreement):
    """Gathers values over authenticated TCP.

    Args:
        rank: this process; the others connect to process 0.
        count: number of processes.
        key: (generation, step) of the agreement; a process with another key is turned away.
        address: where process 0 listens.
        listener: its socket, on process 0 alone.
        limit_s: seconds after which a silent process counts as lost.
        run_key: secret of the run, by which both ends authenticate.
        refused: called for strangers that fail to authenticate.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        key: tuple[int, int],
        address: tuple[str, int],
        listener: socket.socket | None,
        limit_s: float,
        run_key: RunKey,
        refused: Refused | None = None,
    ) -> None:
        super().__init__(None)
        self.rank, self.count = rank, count
        self._key, self._address, self._listener, self._limit_s = key, address, listener, limit_s
        self._run_key, self._refused = run_key, refused
        self._connections: dict[int, Connection] = {}

    def gather(self, value: T) -> list[T]:
        """Gathers every process's value, in order of rank.

        Raises:
            CheckpointError: when a process doesn't answer within the limit.
        """
        try:
            if self.rank:
                connection = self._connections.get(0) or self._connect_to_root()
                connection.send(CODEC.dumps(value))
                gathered: list[T] = CODEC.loads_as(list, connection.receive(_VALUE_BYTES))
                return gathered
            if not self._connections:
                self._accept_all()
            values = [value]
            values += [CODEC.loads(self._connections[rank].receive(_VALUE_BYTES)) for rank in range(1, self.count)]
            # Encoded once for all receivers.
            encoded_values = CODEC.dumps(values)
            for connection in self._connections.values():
                connection.send(encoded_values)
            return values
        except (OSError, RecordError) as error:
            raise CheckpointError(f"lost contact with the writer of another node: {error}") from error

    def give_up(self) -> None:
        """Notifies process 0 that this rank won't come; another process of the node may call it in its place."""
        if self.rank:
            contents = _HELLO.pack(*self._key, self.rank)
            with contextlib.suppress(OSError):
                notify(self._address, self._run_key, Channel.WRITERS, contents, _GIVE_UP_S)

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _connect_to_root(self) -> Connection:
        """Connects to process 0 and sends the greeting; its node listens even before that process runs."""
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                connection = connect(self._address, self._run_key, Channel.WRITERS, self._limit_s)
                break
            # Process 0's node listens before it runs, so a refusal is temporary.
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
        self._connections[0] = connection
        connection.limit(self._limit_s)
        connection.send(_HELLO.pack(*self._key, self.rank))
        return connection

    def _accept_all(self) -> None:
        """Accepts all other processes; those of another generation or step are turned away."""
        assert self._listener is not None
        deadline = time.monotonic() + self._limit_s
        gate = Gate(self._listener, self._run_key, Channel.WRITERS, self._refused)
        try:
            while len(self._connections) < self.count - 1:
                connection = gate.accept(deadline - time.monotonic())
                # A rank that gave up ends the wait for it at once, instead of at the deadline.
                while gate.notices:
                    *key, rank = _HELLO.unpack(gate.notices.pop(0))
                    if tuple(key) == self._key:
                        if connection is not None:
                            connection.close()
                        raise ConnectionError(f"writer {rank} gave up")
                if connection is None:
                    continue
                rank = self._read_greeting(connection)
                if 0 < rank < self.count and rank not in self._connections:
                    connection.limit(self._limit_s)
                    self._connections[rank] = connection
                else:
                    connection.close()
        finally:
            gate.close()

    def _read_greeting(self, connection: Connection) -> int:
        """Reads a greeting; returns the rank of a process with the same key, or 0 for any other."""
        connection.limit(CHALLENGE_S)
        try:
            contents = connection.receive(_HELLO.size)
            if len(contents) != _HELLO.size:
                raise WireError("not a greeting")
        except OSError:
            return 0  # it died before its greeting
        # A straggler of an earlier step connects with another key and must not be counted.
        *key, rank = _HELLO.unpack(contents)
        return int(rank) if tuple(key) == self._key else 0
