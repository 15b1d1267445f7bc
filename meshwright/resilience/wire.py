"""What supervisors of several nodes say to each other: JSON lines over TCP, heard by one thread without waiting."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

BEAT_S = 0.5
"""Seconds between signs of life."""
SILENCE_S = 3.0
"""A node that is silent for so long is taken for lost."""
_CONNECT_S = 2.0
Message = dict[str, Any]


class Line:
    """A connection to another supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._out, self._in = bytearray(), bytearray()
        self._heard = self._beat = time.monotonic()
        self._patience = SILENCE_S
        self.open = True
        """Whether the connection stands."""

    def say(self, kind: str, **data: Any) -> None:
        """Sends a message, as far as the connection takes it now; the rest follows."""
        self._out += json.dumps({"kind": kind} | data, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what is left, and signs of life."""
        now = time.monotonic()
        if now - self._beat >= BEAT_S and not self._out:
            self._out += b'{"kind":"beat"}\n'
        try:
            while self.open and self._out:
                del self._out[: self.socket.send(self._out)]
                self._beat = now
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def hear(self) -> list[Message]:
        """Returns the messages that have come; signs of life are left out."""
        try:
            while self.open:
                chunk = self.socket.recv(1 << 16)
                if not chunk:
                    self.close()
                self._in += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, rest = self._in.split(b"\n")
        self._in = rest
        if lines:
            self._heard = time.monotonic()
        found = [json.loads(line) for line in lines]
        for message in found:
            # Who is busy may still have sent something before; signs of life come only afterwards.
            if message["kind"] in ("busy", "beat"):
                self._patience = message.get("seconds", SILENCE_S)
        return [message for message in found if message["kind"] not in ("beat", "busy")]

    def excuse(self) -> None:
        """Gives the other one its time anew, where it was this process that didn't listen."""
        self._heard = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether nothing was heard for longer than a living supervisor is silent."""
        return time.monotonic() - self._heard > self._patience

    def close(self) -> None:
        """Ends the connection; a second call does nothing. Its descriptor stays open until the hub drops it."""
        if self.open:
            self.open = False
            # Forked processes may hold it too.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """All connections of a supervisor."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._lines: list[Line] = []
        self._pumped = time.monotonic()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when something has come."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def call(self, host: str, port: int) -> Line | None:
        """Connects to another supervisor; None when it can't be reached.

        Raises:
            ConnectionRefusedError: when its machine says that there is none.
        """
        try:
            connection = socket.create_connection((host, port), _CONNECT_S)
        except ConnectionRefusedError:
            raise
        except OSError:
            return None
        return self._add(connection)

    def _add(self, connection: socket.socket) -> Line:
        line = Line(connection)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        return line

    def drop(self, line: Line) -> None:
        """Ends a connection."""
        if line in self._lines:
            self._lines.remove(line)
            # Before it is closed: while a forked process holds it, what waits for it would be woken for ever.
            self._selector.unregister(line.socket)
            line.close()
            line.socket.close()

    def drop_all(self) -> None:
        """Ends all connections."""
        for line in list(self._lines):
            self.drop(line)

    def pump(self, seconds: float = 0.0) -> tuple[list[tuple[Line, Message]], list[Line]]:
        """Waits so long at most for something to come.

        Returns:
            Messages with the connections that they came through, and connections that are lost: they are dropped.
        """
        heard: list[tuple[Line, Message]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                heard += [(key.data, message) for message in key.data.hear()]
        now = time.monotonic()
        # After a stop of this process itself, which may have been one of the whole machine, others get time to speak.
        fair, self._pumped = now - self._pumped < SILENCE_S / 2, now
        lost = []
        for line in list(self._lines):
            line.flush()
            if not fair:
                line.excuse()
            if not line.open or line.silent:
                self.drop(line)
                lost.append(line)
        return heard, lost

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._add(connection)

    def tell(self, kind: str, **data: Any) -> None:
        """Says something to all."""
        for line in self._lines:
            line.say(kind, **data)

    def close(self) -> None:
        """Sends what is left, as far as it goes, and ends all connections."""
        for line in list(self._lines):
            line.flush()
            self.drop(line)
        self._selector.close()
        self._listener.close()


def until(done: Callable[[], bool], limit_s: float, pump: Callable[[float], None]) -> bool:
    """Pumps until something is true, a limited time; returns whether it is."""
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        pump(0.05)
    return True
