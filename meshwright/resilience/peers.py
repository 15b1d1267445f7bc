"""Lines between supervisors of several nodes: messages over authenticated TCP, heard by one thread without waiting."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from meshwright.records import RecordError
from meshwright.resilience.messages import Beat, Busy, Said, decode, encode
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import HEADER_BYTES, MAC_BYTES, Channel, FrameKind, WireError, frame_header, read_header

BEAT_S = 0.5
"""Seconds between signs of life."""
SILENCE_S = 3.0
"""A node that is silent for so long is taken for lost."""
MESSAGE_BYTES = 1 << 26
"""Of the longest message that is taken: an order of some 100,000 ranks."""
MOST_LINES = 4096
"""Connections of a supervisor, all of which have shown the run's key."""
_CONNECT_S = 2.0
_READ_BYTES = 1 << 22
"""What is read of a line before others are looked at."""
Message = dict[str, Any]
"""Plain values of an order or a report."""


class PeerConnection:
    """A connection to another supervisor, which has shown the run's key."""

    def __init__(self, connection: Connection) -> None:
        connection.socket.setblocking(False)
        self.socket, self._seals = connection.socket, connection.seals
        self._out, self._in = bytearray(), bytearray()
        self._heard = self._beat = time.monotonic()
        self._patience = SILENCE_S
        self.open = True
        """Whether the connection stands."""
        self.address = connection.address
        """Of the other end."""
        self.fault = ""
        """What was wrong with what the other end sent; empty while nothing is."""

    def say(self, message: Said) -> None:
        """Sends a message, as far as the connection takes it now; the rest follows."""
        contents = encode(message)
        header = frame_header(FrameKind.MESSAGE, len(contents))
        self._out += header + contents + self._seals.sends.mac(header, contents)
        self.flush()

    def flush(self) -> None:
        """Sends what is left, and signs of life."""
        now = time.monotonic()
        if now - self._beat >= BEAT_S and not self._out:
            self._beat = now  # once: `say` comes back here
            self.say(Beat())
            return
        try:
            while self.open and self._out:
                del self._out[: self.socket.send(self._out)]
                self._beat = now
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def hear(self) -> list[Said]:
        """Returns the messages that have come; signs of life are left out."""
        began = len(self._in)
        try:
            while self.open and len(self._in) - began < _READ_BYTES:
                chunk = self.socket.recv(1 << 16)
                if not chunk:
                    self.close()
                self._in += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        found: list[Said] = []
        try:
            while (message := self._next_message()) is not None:
                found.append(message)
        except (WireError, RecordError) as error:
            self.fault = str(error)
            self.close()
        if found:
            self._heard = time.monotonic()
        for message in found:
            # Who is busy may still have sent something before; signs of life come only afterwards.
            if isinstance(message, (Busy, Beat)):
                self._patience = message.seconds if isinstance(message, Busy) else SILENCE_S
        return [message for message in found if not isinstance(message, (Beat, Busy))]

    def _next_message(self) -> Said | None:
        """Takes the first whole frame off what has come in; None when there is none."""
        if len(self._in) < HEADER_BYTES:
            return None
        header = bytes(self._in[:HEADER_BYTES])
        kind, size = read_header(header, MESSAGE_BYTES)
        if kind is not FrameKind.MESSAGE:
            raise WireError("a parcel came where a message was due")
        last = HEADER_BYTES + size
        if len(self._in) < last + MAC_BYTES:
            return None
        contents = bytes(self._in[HEADER_BYTES:last])
        self._seals.takes.check(header, contents, bytes(self._in[last : last + MAC_BYTES]))
        del self._in[: last + MAC_BYTES]
        return decode(contents)

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
    """All connections of a supervisor.

    Args:
        listener: where others connect.
        key: of the run.
        refused: told of those that don't have it, and of what is no message.
    """

    def __init__(self, listener: socket.socket, key: RunKey, refused: Refused | None = None) -> None:
        self._listener, self._key = listener, key
        self._gate = Gate(listener, key, Channel.SUPERVISORS, refused)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._lines: list[PeerConnection] = []
        self._pumped = time.monotonic()
        self.mismatch = ""
        """Where what was called last doesn't have the run's key; empty where it does."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when something has come."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def call(self, host: str, port: int) -> PeerConnection | None:
        """Connects to another supervisor; None when it can't be reached, or doesn't have the run's key.

        Raises:
            ConnectionRefusedError: when its machine says that there is none.
        """
        try:
            connection = connect((host, port), self._key, Channel.SUPERVISORS, _CONNECT_S)
        except ConnectionRefusedError:
            raise
        except WireError as error:
            self.mismatch = f"{host}:{port}"
            self._gate.tell(host, str(error))
            return None
        except OSError:
            return None
        self.mismatch = ""
        return self._add(connection)

    def _add(self, connection: Connection) -> PeerConnection:
        line = PeerConnection(connection)
        self._lines.append(line)
        self._selector.register(line.socket, selectors.EVENT_READ, line)
        return line

    def drop(self, line: PeerConnection) -> None:
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

    def pump(self, seconds: float = 0.0) -> tuple[list[tuple[PeerConnection, Said]], list[PeerConnection]]:
        """Waits so long at most for something to come.

        Returns:
            Messages with the connections that they came through, and connections that are lost: they are dropped.
        """
        heard: list[tuple[PeerConnection, Said]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                heard += [(key.data, message) for message in key.data.hear()]
        # Whether somebody has come or not: who hasn't shown the key in time goes.
        for connection in self._gate.poll():
            if len(self._lines) < MOST_LINES:
                self._add(connection)
            else:
                connection.close()
        now = time.monotonic()
        # After a stop of this process itself, which may have been one of the whole machine, others get time to speak.
        fair, self._pumped = now - self._pumped < SILENCE_S / 2, now
        lost = []
        for line in list(self._lines):
            line.flush()
            if not fair:
                line.excuse()
            if not line.open or line.silent:
                if line.fault:
                    self._gate.tell(line.address, line.fault)
                self.drop(line)
                lost.append(line)
        return heard, lost

    def tell(self, message: Said) -> None:
        """Says something to all."""
        for line in self._lines:
            line.say(message)

    def close(self) -> None:
        """Sends what is left, as far as it goes, and ends all connections."""
        for line in list(self._lines):
            line.flush()
            self.drop(line)
        self._gate.close()
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
