"""An authenticated connection for threads that wait; a supervisor, which never waits, has `resilience.peers`."""

from __future__ import annotations

import contextlib
import socket
import time

from meshwright.transport.key import RunKey
from meshwright.transport.seal import (
    CHALLENGE_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    MAC_BYTES,
    Channel,
    ClientChallenge,
    FrameKind,
    Seals,
    WireError,
    frame_header,
    make_notice,
    read_header,
)

CHALLENGE_S = 5.0
"""An end that hasn't shown the key within so long is dropped."""
_JOINED_BYTES = 1 << 13
"""A frame of less is put together and sent by one call."""


class Connection:
    """Sends and takes frames.

    Args:
        sock: connected, after the challenge.
        seals: of the challenge.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self.socket, self.seals = sock, seals
        with contextlib.suppress(OSError):
            self.address = str(sock.getpeername()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # An end that lost power says nothing any more.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    address = "nowhere"
    """Of the other end."""

    def limit(self, seconds: float | None) -> None:
        """Sets how long each wait for the other end may take; None for ever."""
        self.socket.settimeout(seconds)

    def send(self, contents: bytes | bytearray | memoryview, kind: FrameKind = FrameKind.MESSAGE) -> None:
        """Sends a frame.

        Raises:
            OSError: when the connection has ended.
        """
        header = frame_header(kind, len(contents))
        mac = self.seals.sends.mac(header, contents)
        if len(contents) > _JOINED_BYTES:
            self.socket.sendall(header)
            self.socket.sendall(contents)
            self.socket.sendall(mac)
        else:
            self.socket.sendall(header + bytes(contents) + mac)

    def receive(self, most: int) -> bytearray:
        """Returns the contents of the next message, of ``most`` bytes at most.

        Raises:
            WireError: for another kind of frame, one that is too long, or a MAC that is wrong.
            OSError: when the connection has ended.
        """
        contents = bytearray(self._header(FrameKind.MESSAGE, most))
        self._contents(memoryview(contents))
        return contents

    def send_parcel(self, data: memoryview) -> None:
        """Sends bytes of whose number the other end knows."""
        for at in range(0, len(data), FRAME_BYTES):
            self.send(data[at : at + FRAME_BYTES], FrameKind.PARCEL)

    def receive_parcel(self, place: memoryview) -> None:
        """Fills ``place`` with exactly as many bytes.

        Raises:
            WireError: when more or fewer came, or a MAC is wrong; what has come by then counts for nothing.
            OSError: when the connection has ended.
        """
        at = 0
        while at < len(place):
            wanted = min(FRAME_BYTES, len(place) - at)
            if self._header(FrameKind.PARCEL, wanted) != wanted:
                raise WireError(f"a frame of a parcel is shorter than the {wanted} bytes that were due")
            self._contents(place[at : at + wanted])
            at += wanted

    def _header(self, kind: FrameKind, most: int) -> int:
        self._head = bytes(_receive(self.socket, HEADER_BYTES))
        found, size = read_header(self._head, most)
        if found is not kind:
            raise WireError(f"a {found.name.lower()} came where a {kind.name.lower()} was due")
        return size

    def _contents(self, place: memoryview) -> None:
        _fill(self.socket, place)
        self.seals.takes.check(self._head, place, bytes(_receive(self.socket, MAC_BYTES)))

    def close(self) -> None:
        """Ends the connection; a second call does nothing."""
        end(self.socket)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(address: tuple[str, int], key: RunKey, wire: Channel, limit_s: float = CHALLENGE_S) -> Connection:
    """Connects, shows the key, and has the other end show it.

    Args:
        address: host and port.
        key: of the run.
        wire: what for.
        limit_s: seconds for all of it.

    Raises:
        WireError: when the other end doesn't have the key.
        OSError: when it can't be reached or doesn't answer in time.
    """
    deadline = time.monotonic() + limit_s
    sock = socket.create_connection(address, limit_s)
    try:
        challenge = ClientChallenge(key, wire)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(challenge.hello)
        answer, seals = challenge.answer(bytes(_receive(sock, CHALLENGE_BYTES, deadline)))
        sock.sendall(answer)
        sock.settimeout(None)
        return Connection(sock, seals)
    except BaseException:
        end(sock)
        raise


def notify(address: tuple[str, int], key: RunKey, wire: Channel, contents: bytes, limit_s: float) -> None:
    """Tells something to a listener, at work or not yet (`seal.make_notice`).

    Raises:
        OSError: when nobody listens there.
    """
    with socket.create_connection(address, limit_s) as sock:
        sock.sendall(make_notice(key, wire, contents))


def end(sock: socket.socket) -> None:
    """Ends a connection, also where forked processes hold it too."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _receive(sock: socket.socket, size: int, deadline: float | None = None) -> memoryview:
    data = memoryview(bytearray(size))
    _fill(sock, data, deadline)
    return data


def _fill(sock: socket.socket, place: memoryview, deadline: float | None = None) -> None:
    at = 0
    while at < len(place):
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        got = sock.recv_into(place[at : at + FRAME_BYTES])
        if not got:
            raise ConnectionError("the connection ended")
        at += got
