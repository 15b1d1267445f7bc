"""How processes of several nodes agree where they have no process group: the first collects, and tells all."""

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
_AGAIN_S = 0.05
_GIVE_UP_S = 1.0
_VALUE_BYTES = 1 << 28
"""Of the longest value: tables of some million parts."""
T = TypeVar("T")


class StarAgreement(Agreement):
    """Gathers values over authenticated TCP.

    Args:
        rank: this process; the others come to process 0.
        count: how many there are.
        key: generation and step that they agree for; whoever comes with others is sent away.
        address: where process 0 listens.
        listener: its socket, on process 0 alone.
        limit_s: seconds after which a process that doesn't answer is given up.
        run_key: shown by both ends.
        refused: told of those that don't have it.
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
        self._lines: dict[int, Connection] = {}

    def gather(self, value: T) -> list[T]:
        """Returns every process's value, in order.

        Raises:
            CheckpointError: when one doesn't answer within the limit.
        """
        try:
            if self.rank:
                line = self._lines.get(0) or self._call()
                line.send(CODEC.dumps(value))
                found: list[T] = CODEC.loads_as(list, line.receive(_VALUE_BYTES))
                return found
            if not self._lines:
                self._welcome()
            values = [value]
            values += [CODEC.loads(self._lines[rank].receive(_VALUE_BYTES)) for rank in range(1, self.count)]
            whole = CODEC.dumps(values)
            for line in self._lines.values():
                line.send(whole)
            return values
        except (OSError, RecordError) as error:
            raise CheckpointError(f"lost contact with the writer of another node: {error}") from error

    def give_up(self) -> None:
        """Tells process 0 that this one won't come, whatever became of it; it need not be the same process."""
        if self.rank:
            contents = _HELLO.pack(*self._key, self.rank)
            with contextlib.suppress(OSError):
                notify(self._address, self._run_key, Channel.WRITERS, contents, _GIVE_UP_S)

    def close(self) -> None:
        """Ends the connections."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _call(self) -> Connection:
        """Comes to process 0, whose node listens before it has started it."""
        end = time.monotonic() + self._limit_s
        while True:
            try:
                line = connect(self._address, self._run_key, Channel.WRITERS, self._limit_s)
                break
            except ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_S)
        self._lines[0] = line
        line.limit(self._limit_s)
        line.send(_HELLO.pack(*self._key, self.rank))
        return line

    def _welcome(self) -> None:
        """Waits for all others; those that came for something else are turned away."""
        assert self._listener is not None
        end = time.monotonic() + self._limit_s
        gate = Gate(self._listener, self._run_key, Channel.WRITERS, self._refused)
        try:
            while len(self._lines) < self.count - 1:
                line = gate.accept(end - time.monotonic())
                while gate.notices:
                    *key, rank = _HELLO.unpack(gate.notices.pop(0))
                    if tuple(key) == self._key:
                        if line is not None:
                            line.close()
                        raise ConnectionError(f"writer {rank} gave up")
                if line is None:
                    continue
                rank = self._greeted(line)
                if 0 < rank < self.count and rank not in self._lines:
                    line.limit(self._limit_s)
                    self._lines[rank] = line
                else:
                    line.close()
        finally:
            gate.close()

    def _greeted(self, line: Connection) -> int:
        """Returns the number of a process that came for what this one came for; 0 for another."""
        line.limit(CHALLENGE_S)
        try:
            contents = line.receive(_HELLO.size)
            if len(contents) != _HELLO.size:
                raise WireError("not a greeting")
        except OSError:
            return 0  # it died before it had said what it came for
        *key, rank = _HELLO.unpack(contents)
        return int(rank) if tuple(key) == self._key else 0
