"""Connections between the supervisors of several nodes: messages over authenticated TCP, non-blocking, in one thread.

A connection counts as lost when it closes or is silent for `SILENCE_S`; `Beat` every `BEAT_S` keeps it alive, and a
supervisor that is about to block sends `Busy` first, which extends the peer's patience.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from meshwright.records import RecordError
from meshwright.resilience.messages import Beat, Busy, Message, decode, encode
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import HEADER_BYTES, MAC_BYTES, Channel, FrameKind, WireError, frame_header, read_header

BEAT_S = 0.5
"""Seconds between signs of life."""
SILENCE_S = 3.0
"""A node that is silent for so long counts as lost."""
MESSAGE_BYTES = 1 << 26
"""Size of the longest message that is accepted: an order of some 100,000 ranks."""
MAX_CONNECTIONS = 4096
"""Most authenticated connections of a supervisor."""
_CONNECT_S = 2.0
_READ_BYTES = 1 << 22
"""Bytes read from one connection before the others get their turn."""


class PeerConnection:
    """A connection to another supervisor that has authenticated itself by the run's key."""

    def __init__(self, connection: Connection) -> None:
        connection.socket.setblocking(False)
        self.socket, self._seals = connection.socket, connection.seals
        self._send_buffer, self._receive_buffer = bytearray(), bytearray()
        self._last_heard = self._last_beat = time.monotonic()
        self._patience = SILENCE_S
        self.open = True
        """Whether the connection is open."""
        self.address = connection.address
        """The peer's address."""
        self.fault = ""
        """Why the peer's data was rejected; empty while it wasn't."""

    def send(self, message: Message) -> None:
        """Queues a message and sends as much as the socket accepts now; `flush` sends the remainder."""
        contents = encode(message)
        header = frame_header(FrameKind.MESSAGE, len(contents))
        self._send_buffer += header + contents + self._seals.sends.mac(header, contents)
        self.flush()

    def flush(self) -> None:
        """Sends buffered bytes, and a `Beat` when none was sent for `BEAT_S`."""
        now = time.monotonic()
        # Buffered bytes are a sign of life too: no beat behind a message that the socket refuses.
        if now - self._last_beat >= BEAT_S and not self._send_buffer:
            self._last_beat = now  # before `send`, which calls `flush` again
            self.send(Beat())
            return
        try:
            while self.open and self._send_buffer:
                del self._send_buffer[: self.socket.send(self._send_buffer)]
                self._last_beat = now
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Returns the received messages; `Beat` and `Busy` are handled here and left out."""
        initial_size = len(self._receive_buffer)
        try:
            # Bounded, so that one chatty peer can't starve the others.
            while self.open and len(self._receive_buffer) - initial_size < _READ_BYTES:
                chunk = self.socket.recv(1 << 16)
                # An empty read is the peer's orderly close.
                if not chunk:
                    self.close()
                self._receive_buffer += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        messages: list[Message] = []
        try:
            while (message := self._next_message()) is not None:
                messages.append(message)
        except (WireError, RecordError) as error:
            self.fault = str(error)
            self.close()
        if messages:
            self._last_heard = time.monotonic()
        for message in messages:
            # The last of both counts: a Beat after Busy says that the peer is listening again.
            if isinstance(message, (Busy, Beat)):
                self._patience = message.seconds if isinstance(message, Busy) else SILENCE_S
        return [message for message in messages if not isinstance(message, (Beat, Busy))]

    def _next_message(self) -> Message | None:
        """Removes the first complete frame from the receive buffer and decodes it; None without one."""
        if len(self._receive_buffer) < HEADER_BYTES:
            return None
        header = bytes(self._receive_buffer[:HEADER_BYTES])
        kind, size = read_header(header, MESSAGE_BYTES)
        if kind is not FrameKind.MESSAGE:
            raise WireError("a parcel came where a message was due")
        contents_end = HEADER_BYTES + size
        if len(self._receive_buffer) < contents_end + MAC_BYTES:
            return None
        contents = bytes(self._receive_buffer[HEADER_BYTES:contents_end])
        # The code is checked before anything of the contents is decoded.
        self._seals.receives.check(
            header, contents, bytes(self._receive_buffer[contents_end : contents_end + MAC_BYTES])
        )
        del self._receive_buffer[: contents_end + MAC_BYTES]
        return decode(contents)

    def restart_silence_limit(self) -> None:
        """Restarts the peer's silence limit, because this process itself wasn't listening."""
        self._last_heard = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether nothing was received for longer than the peer's silence limit."""
        return time.monotonic() - self._last_heard > self._patience

    def close(self) -> None:
        """Ends the connection; a second call does nothing. Its descriptor stays open until the hub drops it."""
        if self.open:
            self.open = False
            # Forked ranks inherited the descriptor: only a shutdown ends the connection for the peer.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """All connections of a supervisor.

    Args:
        listener: socket to which other supervisors connect.
        key: the run's secret.
        refused: called for connections without the key, and for invalid messages.
    """

    def __init__(self, listener: socket.socket, key: RunKey, refused: Refused | None = None) -> None:
        self._listener, self._key = listener, key
        self._gate = Gate(listener, key, Channel.SUPERVISORS, refused)
        self._selector = selectors.DefaultSelector()
        # The gate is itself a selector's descriptor: one select covers listener, strangers and peers.
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._connections: list[PeerConnection] = []
        self._last_pump = time.monotonic()
        self.mismatch = ""
        """``host:port`` of the last called supervisor that lacks the run's key; empty otherwise."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when data or a connection has arrived."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def call(self, host: str, port: int) -> PeerConnection | None:
        """Connects to another supervisor; None when it can't be reached, or doesn't have the run's key.

        Raises:
            ConnectionRefusedError: when its machine runs, but nothing listens there.
        """
        try:
            connection = connect((host, port), self._key, Channel.SUPERVISORS, _CONNECT_S)
        except ConnectionRefusedError:
            raise
        except WireError as error:
            self.mismatch = f"{host}:{port}"
            self._gate.report_refusal(host, str(error))
            return None
        except OSError:
            return None
        self.mismatch = ""
        return self._add(connection)

    def _add(self, connection: Connection) -> PeerConnection:
        peer = PeerConnection(connection)
        self._connections.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        return peer

    def drop(self, connection: PeerConnection) -> None:
        """Ends a connection."""
        if connection in self._connections:
            self._connections.remove(connection)
            # Before closing: while a forked process holds the socket, epoll would keep reporting it.
            self._selector.unregister(connection.socket)
            connection.close()
            connection.socket.close()

    def drop_all(self) -> None:
        """Ends all connections."""
        for connection in list(self._connections):
            self.drop(connection)

    def pump(self, seconds: float = 0.0) -> tuple[list[tuple[PeerConnection, Message]], list[PeerConnection]]:
        """Waits up to ``seconds`` for data, reads messages, accepts peers and sends what is buffered.

        Returns:
            Messages with their connections, and the connections that were lost, which are dropped.
        """
        received: list[tuple[PeerConnection, Message]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                received += [(key.data, message) for message in key.data.receive()]
        # On every call: the gate also drops strangers that don't authenticate in time.
        for connection in self._gate.poll():
            if len(self._connections) < MAX_CONNECTIONS:
                self._add(connection)
            else:
                connection.close()
        now = time.monotonic()
        # After a stop of this process itself, perhaps with the whole machine, silence proves nothing about peers.
        listened, self._last_pump = now - self._last_pump < SILENCE_S / 2, now
        lost_peers = []
        for peer in list(self._connections):
            # Every pump also sends: there is no other thread to do so.
            peer.flush()
            if not listened:
                peer.restart_silence_limit()
            if not peer.open or peer.silent:
                if peer.fault:
                    self._gate.report_refusal(peer.address, peer.fault)
                self.drop(peer)
                lost_peers.append(peer)
        return received, lost_peers

    def broadcast(self, message: Message) -> None:
        """Sends a message to all connected supervisors."""
        for connection in self._connections:
            connection.send(message)

    def close(self) -> None:
        """Sends buffered bytes without blocking, and ends all connections."""
        for connection in list(self._connections):
            connection.flush()
            self.drop(connection)
        self._gate.close()
        self._selector.close()
        self._listener.close()


def pump_until(condition: Callable[[], bool], limit_s: float, pump: Callable[[float], None]) -> bool:
    """Pumps messages until a condition holds, for a limited time; returns whether it holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        pump(0.05)
    return True
