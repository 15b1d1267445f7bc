"""The listening end of a wire: lets in who shows the run's key, without waiting for anybody.

Until then a connection costs a descriptor and some hundred bytes, for five seconds at most, and there are 64 of them at
most: of more, the address that has the most loses its oldest. Who is turned away is told of by an event, seldom.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.transport.connection import CHALLENGE_S, Connection, end
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
"""Connections that haven't shown the key yet."""
_ACCEPTED_AT_ONCE = 128
_TOLD_EVERY_S = 10.0
"""Between two events of strangers; the second says how many there were."""
Refused = Callable[..., None]
"""Takes ``kind="connection_refused"`` and what it says: wire, address, why, count."""


@dataclass
class _Stranger:
    """A connection that hasn't shown the key."""

    socket: socket.socket
    address: str
    deadline: float
    wanted: int = HELLO_BYTES
    data: bytearray = field(default_factory=bytearray)
    challenge: ServerChallenge | None = None
    hello: bytes = b""


class Gate:
    """Accepts the connections of one wire; used by one thread, of the process that made it.

    Args:
        listener: the socket; it stays its owner's.
        key: of the run.
        wire: what its connections are for.
        refused: told of strangers.
    """

    def __init__(self, listener: socket.socket, key: RunKey, wire: Channel, refused: Refused | None = None) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._wire, self._refused = listener, key, wire, refused
        self._strangers: list[_Stranger] = []
        self._waiting: list[Connection] = []
        self.notices: list[bytes] = []
        """What notices have said; who takes them removes them."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._told_at, self._untold = -_TOLD_EVERY_S, 0

    def fileno(self) -> int:
        """Returns a descriptor that is readable when somebody has come or said something."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    @property
    def strangers(self) -> int:
        """Connections that haven't shown the key yet."""
        return len(self._strangers)

    def poll(self, seconds: float = 0.0) -> list[Connection]:
        """Waits so long at most for somebody to come; returns those that have shown the key."""
        welcome: list[Connection] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers and (found := self._hear(key.data)) is not None:
                welcome.append(found)
        now = time.monotonic()
        for stranger in [one for one in self._strangers if now > one.deadline]:
            self._drop(stranger, f"it didn't show the run's key within {CHALLENGE_S:g} s")
        return welcome

    def accept(self, limit_s: float) -> Connection | None:
        """Waits for one that shows the key; None when a notice came before.

        Raises:
            TimeoutError: when none does in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            if found := self._welcome_one(min(1.0, max(0.0, deadline - time.monotonic()))):
                return found
            if self.notices:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came within {limit_s:g} s")

    def _welcome_one(self, seconds: float) -> Connection | None:
        """Returns one of those that have shown the key; the others wait for the next call."""
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
        """Drops the oldest of the address that has the most connections."""
        crowd, _ = Counter(one.address for one in self._strangers).most_common(1)[0]
        oldest = next(one for one in self._strangers if one.address == crowd)
        self._drop(oldest, f"{MOST_STRANGERS} connections had not shown the run's key yet")

    def _hear(self, stranger: _Stranger) -> Connection | None:
        """Takes in what a stranger says, and no byte more than the challenge has."""
        try:
            data = stranger.socket.recv(stranger.wanted - len(stranger.data))
            if not data:
                raise WireError("it ended before it had shown the run's key")
            stranger.data += data
            if len(stranger.data) < stranger.wanted:
                return None
            if stranger.hello:
                self.notices.append(read_notice(self._key, self._wire, stranger.hello, bytes(stranger.data)))
                self._forget(stranger)
                end(stranger.socket)
                return None
            if stranger.challenge is None and is_notice(bytes(stranger.data)):
                stranger.hello, stranger.data = bytes(stranger.data), bytearray()
                stranger.wanted = NOTICE_REST_BYTES
                return self._hear(stranger)
            if stranger.challenge is None:
                stranger.challenge = ServerChallenge(self._key, self._wire, bytes(stranger.data))
                stranger.data, stranger.wanted = bytearray(), PROOF_BYTES
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
        stranger.socket.setblocking(True)
        return Connection(stranger.socket, seals)

    def _forget(self, stranger: _Stranger) -> None:
        # Before it is closed: while a forked process holds it, what waits for it would be woken for ever.
        self._selector.unregister(stranger.socket)
        self._strangers.remove(stranger)

    def _drop(self, stranger: _Stranger, why: str) -> None:
        self._forget(stranger)
        end(stranger.socket)
        self.tell(stranger.address, why)

    def tell(self, address: str, why: str) -> None:
        """Tells of one that was turned away, unless that was told of another a moment ago."""
        self._untold += 1
        if self._refused is not None and time.monotonic() - self._told_at >= _TOLD_EVERY_S:
            count, self._untold, self._told_at = self._untold, 0, time.monotonic()
            self._refused("connection_refused", wire=self._wire.name.lower(), address=address, why=why, count=count)

    def close(self) -> None:
        """Drops those that haven't shown the key; the listener stays open."""
        for stranger in list(self._strangers):
            self._forget(stranger)
            end(stranger.socket)
        for connection in self._waiting:
            connection.close()
        self._selector.close()
