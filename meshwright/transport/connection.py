"""A blocking authenticated connection; supervisors, which must not block, use `resilience.peers` instead."""

from __future__ import annotations

import contextlib
import selectors
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
"""Limit of the handshake; a peer that hasn't authenticated by then is dropped."""
_JOINED_BYTES = 1 << 13
"""Largest contents of a frame that is concatenated and sent by one call."""


class Connection:
    """Sends and receives authenticated frames.

    Args:
        sock: connected, after the handshake.
        seals: the handshake's MACs of both directions.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self.socket, self.seals = sock, seals
        with contextlib.suppress(OSError):
            self.address = str(sock.getpeername()[0])
        # Small messages await answers: Nagle's algorithm would delay them.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that lost power never closes the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    address = "nowhere"
    """The peer's address."""

    def limit(self, seconds: float | None) -> None:
        """Sets the timeout of each wait for the peer; None waits for ever."""
        self.socket.settimeout(seconds)

    def readable(self, seconds: float) -> bool:
        """Returns whether data, or the connection's end, comes within some seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def send(self, contents: bytes | bytearray | memoryview, kind: FrameKind = FrameKind.MESSAGE) -> None:
        """Sends a frame.

        Raises:
            OSError: when the connection has ended.
        """
        header = frame_header(kind, len(contents))
        mac = self.seals.sends.mac(header, contents)
        # Large contents aren't copied for the sake of one system call.
        if len(contents) > _JOINED_BYTES:
            self.socket.sendall(header)
            self.socket.sendall(contents)
            self.socket.sendall(mac)
        else:
            self.socket.sendall(header + bytes(contents) + mac)

    def receive(self, most_bytes: int) -> bytearray:
        """Returns the contents of the next message, of ``most_bytes`` bytes at most.

        Raises:
            WireError: for another kind of frame, a longer one, or a wrong MAC.
            OSError: when the connection has ended.
        """
        contents = bytearray(self._receive_header(FrameKind.MESSAGE, most_bytes))
        self._receive_contents(memoryview(contents))
        return contents

    def send_parcel(self, data: memoryview) -> None:
        """Sends bytes whose number the peer knows already, in frames of `FRAME_BYTES`."""
        for offset in range(0, len(data), FRAME_BYTES):
            self.send(data[offset : offset + FRAME_BYTES], FrameKind.PARCEL)

    def receive_parcel(self, buffer: memoryview) -> None:
        """Fills ``buffer`` with exactly as many bytes.

        Raises:
            WireError: when more or fewer bytes come, or a MAC is wrong; the buffer's contents are then invalid.
            OSError: when the connection has ended.
        """
        offset = 0
        while offset < len(buffer):
            frame_bytes = min(FRAME_BYTES, len(buffer) - offset)
            # Sizes are known on both ends: any other size is an error, never a short read.
            if self._receive_header(FrameKind.PARCEL, frame_bytes) != frame_bytes:
                raise WireError(f"a frame of a parcel is shorter than the {frame_bytes} bytes that were due")
            self._receive_contents(buffer[offset : offset + frame_bytes])
            offset += frame_bytes

    def _receive_header(self, kind: FrameKind, most_bytes: int) -> int:
        self._current_header = bytes(_receive(self.socket, HEADER_BYTES))
        received_kind, size = read_header(self._current_header, most_bytes)
        if received_kind is not kind:
            raise WireError(f"a {received_kind.name.lower()} came where a {kind.name.lower()} was due")
        return size

    def _receive_contents(self, buffer: memoryview) -> None:
        # Straight into the caller's memory; the MAC is checked before the caller may use it.
        _receive_into(self.socket, buffer)
        self.seals.receives.check(self._current_header, buffer, bytes(_receive(self.socket, MAC_BYTES)))

    def close(self) -> None:
        """Ends the connection; a second call does nothing."""
        close_socket(self.socket)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(address: tuple[str, int], key: RunKey, channel: Channel, limit_s: float = CHALLENGE_S) -> Connection:
    """Connects, and authenticates both ends by the run's key.

    Args:
        address: host and port.
        key: of the run.
        channel: the connection's purpose.
        limit_s: seconds for all of it.

    Raises:
        WireError: when the other end doesn't have the key.
        OSError: when it can't be reached or doesn't answer in time.
    """
    deadline = time.monotonic() + limit_s
    sock = socket.create_connection(address, limit_s)
    try:
        challenge = ClientChallenge(key, channel)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(challenge.hello)
        answer, seals = challenge.answer(bytes(_receive(sock, CHALLENGE_BYTES, deadline)))
        sock.sendall(answer)
        sock.settimeout(None)
        return Connection(sock, seals)
    except BaseException:
        close_socket(sock)
        raise


def notify(address: tuple[str, int], key: RunKey, channel: Channel, contents: bytes, limit_s: float) -> None:
    """Sends a notice to a listener, which need not be accepting yet (`seal.make_notice`).

    Raises:
        OSError: when nothing listens there.
    """
    with socket.create_connection(address, limit_s) as sock:
        sock.sendall(make_notice(key, channel, contents))


def close_socket(sock: socket.socket) -> None:
    """Ends a connection, even if forked processes inherited its socket."""
    with contextlib.suppress(OSError):
        # close() alone leaves the connection open while a forked process holds the descriptor.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _receive(sock: socket.socket, size: int, deadline: float | None = None) -> memoryview:
    data = memoryview(bytearray(size))
    _receive_into(sock, data, deadline)
    return data


def _receive_into(sock: socket.socket, buffer: memoryview, deadline: float | None = None) -> None:
    offset = 0
    while offset < len(buffer):
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        received = sock.recv_into(buffer[offset : offset + FRAME_BYTES])
        if not received:
            raise ConnectionError("the connection ended")
        offset += received
