"""Records between the server's own processes, over a socket pair that a fork shares."""

from __future__ import annotations

import socket
import struct

from meshwright.sites.messages import CODEC, MOST_HELLO_BYTES

_SIZE = struct.Struct("<I")


class Pipe:
    """One end of a socket pair.

    Args:
        sock: blocking; a limit bounds each wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """Returns the descriptor, readable when a record has come or the other end has gone."""
        return self._socket.fileno()

    def send(self, record: object) -> None:
        """Sends a record.

        Raises:
            OSError: when the other end has gone.
        """
        data = CODEC.dumps(record)
        self._socket.sendall(_SIZE.pack(len(data)) + data)

    def receive(self, limit_s: float | None = None) -> object:
        """Returns the next record.

        Raises:
            OSError: when the other end has gone, or nothing came in time.
        """
        self._socket.settimeout(limit_s)
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        if size > MOST_HELLO_BYTES:
            raise ConnectionError(f"a record of {size} bytes")
        return CODEC.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            received = self._socket.recv(size - len(data))
            if not received:
                raise ConnectionError("the other process has ended")
            data += received
        return bytes(data)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
