"""How processes of several nodes agree where they have no process group: the first collects, and tells all."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

from meshwright.checkpoint.agreement import Agreement, Outcome, attempt
from meshwright.checkpoint.remote import receive
from meshwright.errors import CheckpointError

_HELLO = struct.Struct("<qqq")
_SIZE = struct.Struct("<q")
_AGAIN_S = 0.05
_GIVE_UP_S = 1.0
T = TypeVar("T")


class StarAgreement(Agreement):
    """Gathers plain JSON values over TCP.

    Args:
        rank: this process; the others come to process 0.
        count: how many there are.
        key: generation and step that they agree for; whoever comes with others is sent away.
        address: where process 0 listens.
        listener: its socket, on process 0 alone.
        limit_s: seconds after which a process that doesn't answer is given up.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        key: tuple[int, int],
        address: tuple[str, int],
        listener: socket.socket | None,
        limit_s: float,
    ) -> None:
        super().__init__(None)
        self.rank, self.count = rank, count
        self._key, self._address, self._listener, self._limit_s = key, address, listener, limit_s
        self._lines: dict[int, socket.socket] = {}

    def gather(self, value: T) -> list[T]:
        """Returns every process's value, in order; values are plain JSON.

        Raises:
            CheckpointError: when one doesn't answer within the limit.
        """
        try:
            if self.rank:
                line = self._lines.get(0) or self._call()
                _say(line, value)
                found: list[T] = _hear(line)
                return found
            if not self._lines:
                self._welcome()
            values = [value] + [_hear(self._lines[rank]) for rank in range(1, self.count)]
            for line in self._lines.values():
                _say(line, values)
            return values
        except (OSError, ValueError) as error:
            raise CheckpointError(f"lost contact with the writer of another node: {error}") from error

    def outcomes(self, work: Callable[[], Any]) -> list[Outcome]:
        """Runs ``work`` in every process and returns what each came to."""
        return [Outcome(*row) for row in self.gather(list(attempt(work)))]

    def give_up(self) -> None:
        """Tells process 0 that this one won't come, whatever became of it; it need not be the same process."""
        if self.rank:
            # A connection that ends after its greeting is what process 0 would have seen of one that died later.
            with contextlib.suppress(OSError), socket.create_connection(self._address, _GIVE_UP_S) as line:
                line.sendall(_HELLO.pack(*self._key, self.rank))

    def close(self) -> None:
        """Ends the connections."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _call(self) -> socket.socket:
        """Comes to process 0, whose node listens before it has started it."""
        end = time.monotonic() + self._limit_s
        while True:
            try:
                line = socket.create_connection(self._address, self._limit_s)
                break
            except ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_S)
        line.settimeout(self._limit_s)
        line.sendall(_HELLO.pack(*self._key, self.rank))
        self._lines[0] = line
        return line

    def _welcome(self) -> None:
        """Waits for all others; those that came for something else are turned away."""
        assert self._listener is not None
        end = time.monotonic() + self._limit_s
        while len(self._lines) < self.count - 1:
            self._listener.settimeout(max(0.001, end - time.monotonic()))
            line, _ = self._listener.accept()
            line.settimeout(self._limit_s)
            try:
                *key, rank = _HELLO.unpack(receive(line, _HELLO.size))
            except OSError:
                key = []  # it died before it had said what it came for
            if tuple(key) == self._key:
                self._lines[rank] = line
            else:
                line.close()


def _say(line: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    line.sendall(_SIZE.pack(len(data)) + data)


def _hear(line: socket.socket) -> Any:
    (size,) = _SIZE.unpack(receive(line, _SIZE.size))
    return json.loads(bytes(receive(line, size)))
