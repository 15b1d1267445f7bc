"""The listening end of a channel: admits peers that authenticate by the run's key, without blocking on any of them.

A connection that hasn't authenticated is a **stranger**. It costs a descriptor and some hundred bytes for at most five
seconds, and there are at most 64: beyond that, the address with the most strangers loses its oldest. Refusals are
reported by events, at most one every ten seconds.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.transport.connection import CHALLENGE_S, Connection, close_socket
from meshwright.transport.key import RunKey
from meshwright.transport.seal import (
    HELLO_BYTES,
    NOTICE_REST_BYTES,
    PROOF_BYTES,
    Channel,
    ServerChallenge,
    WireError,
    is_notice,
    read_notice,
)

MOST_STRANGERS = 64
"""Most connections that haven't authenticated yet."""
_ACCEPTED_AT_ONCE = 128
_EVENT_INTERVAL_S = 10.0
"""Seconds between two events of refused strangers; an event counts those since the last one."""
Refused = Callable[..., None]
"""Called with ``"connection_refused"`` and the event's fields: wire, address, why, count."""


@dataclass
class _Stranger:
    """A connection that hasn't authenticated yet."""

    socket: socket.socket
    address: str
    deadline: float
    expected_bytes: int = HELLO_BYTES
    data: bytearray = field(default_factory=bytearray)
    challenge: ServerChallenge | None = None
    hello: bytes = b""


class Gate:
    """Accepts the connections of one channel; used by one thread of the process that created it.

    Args:
        listener: the socket; its owner closes it.
        key: of the run.
        channel: the purpose of its connections.
        refused: called for refused strangers.
    """

    def __init__(self, listener: socket.socket, key: RunKey, channel: Channel, refused: Refused | None = None) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._channel, self._refused = listener, key, channel, refused
        self._strangers: list[_Stranger] = []
        self._waiting: list[Connection] = []
        self.notices: list[bytes] = []
        """Contents of received notices; the reader removes them."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._last_event_at, self._unreported = -_EVENT_INTERVAL_S, 0

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a connection or data has arrived."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    @property
    def strangers(self) -> int:
        """Number of connections that haven't authenticated yet."""
        return len(self._strangers)

    def poll(self, seconds: float = 0.0) -> list[Connection]:
        """Waits up to ``seconds`` for arrivals; returns the connections that have authenticated."""
        welcome: list[Connection] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers and (connection := self._read_handshake(key.data)) is not None:
                welcome.append(connection)
        now_s = time.monotonic()
        for stranger in [pending for pending in self._strangers if now_s > pending.deadline]:
            self._drop(stranger, f"it didn't show the run's key within {CHALLENGE_S:g} s")
        return welcome

    def accept(self, limit_s: float) -> Connection | None:
        """Waits for an authenticated connection; returns None when a notice arrives first.

        Raises:
            TimeoutError: when neither arrives in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            if connection := self._next_authenticated(min(1.0, max(0.0, deadline - time.monotonic()))):
                return connection
            if self.notices:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came within {limit_s:g} s")

    def _next_authenticated(self, seconds: float) -> Connection | None:
        """Returns one authenticated connection, if any; the others wait for the next call."""
        if not self._waiting:
            self._waiting = self.poll(seconds)
        return self._waiting.pop(0) if self._waiting else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            stranger = _Stranger(connection, str(address[0]), time.monotonic() + CHALLENGE_S)
            if len(self._strangers) >= MOST_STRANGERS:
                self._make_room()
            self._strangers.append(stranger)
            self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _make_room(self) -> None:
        """Drops the oldest stranger of the address with the most strangers."""
        busiest_address, _ = Counter(stranger.address for stranger in self._strangers).most_common(1)[0]
        # Per address: a flood from one host evicts its own connections, not those of others.
        oldest = next(stranger for stranger in self._strangers if stranger.address == busiest_address)
        self._drop(oldest, f"{MOST_STRANGERS} connections had not shown the run's key yet")

    def _read_handshake(self, stranger: _Stranger) -> Connection | None:
        """Advances a stranger's handshake, reading no byte beyond it; returns the authenticated connection."""
        try:
            # Never more than the handshake's bytes: what follows belongs to the `Connection`.
            data = stranger.socket.recv(stranger.expected_bytes - len(stranger.data))
            if not data:
                raise WireError("it ended before it had shown the run's key")
            stranger.data += data
            if len(stranger.data) < stranger.expected_bytes:
                return None
            # A notice: its second part carries contents and proof; there is no answer.
            if stranger.hello:
                self.notices.append(read_notice(self._key, self._channel, stranger.hello, bytes(stranger.data)))
                self._forget(stranger)
                close_socket(stranger.socket)
                return None
            if stranger.challenge is None and is_notice(bytes(stranger.data)):
                stranger.hello, stranger.data = bytes(stranger.data), bytearray()
                stranger.expected_bytes = NOTICE_REST_BYTES
                return self._read_handshake(stranger)
            if stranger.challenge is None:
                stranger.challenge = ServerChallenge(self._key, self._channel, bytes(stranger.data))
                stranger.data, stranger.expected_bytes = bytearray(), PROOF_BYTES
                # A fresh socket's buffer takes the few bytes at once, unless the peer misbehaves.
                if stranger.socket.send(stranger.challenge.challenge) != len(stranger.challenge.challenge):
                    raise WireError("it takes nothing in")
                return None
            seals = stranger.challenge.accept(bytes(stranger.data))
        except BlockingIOError:
            return None
        except OSError as error:
            self._drop(stranger, str(error))
            return None
        self._forget(stranger)
        # `Connection` waits; supervisors set it back (`PeerConnection`).
        stranger.socket.setblocking(True)
        return Connection(stranger.socket, seals)

    def _forget(self, stranger: _Stranger) -> None:
        # Before closing: while a forked process holds the socket, epoll would keep reporting it.
        self._selector.unregister(stranger.socket)
        self._strangers.remove(stranger)

    def _drop(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger)
        close_socket(stranger.socket)
        self.report_refusal(stranger.address, reason)

    def report_refusal(self, address: str, reason: str) -> None:
        """Counts a refusal, and reports all unreported ones at most every `_EVENT_INTERVAL_S`."""
        self._unreported += 1
        if self._refused is not None and time.monotonic() - self._last_event_at >= _EVENT_INTERVAL_S:
            count, self._unreported, self._last_event_at = self._unreported, 0, time.monotonic()
            self._refused(
                "connection_refused", wire=self._channel.name.lower(), address=address, why=reason, count=count
            )

    def close(self) -> None:
        """Drops all connections that `poll` hasn't returned; the listener stays open."""
        for stranger in list(self._strangers):
            self._forget(stranger)
            close_socket(stranger.socket)
        for connection in self._waiting:
            connection.close()
        self._selector.close()
