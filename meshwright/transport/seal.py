"""The handshake of a connection, and the MAC of each frame: a sans-I/O implementation, bytes in, bytes out.

    client                                            server
      magic, version, channel, nonce c       ->
                                             <-         nonce s, HMAC(key, server, channel, c, s)
      HMAC(key, client, channel, c, s)       ->
      frames, each with a MAC                <->        frames, each with a MAC

Both ends prove that they have the run's key, and neither sends it. Each contributes a nonce, so a proof is valid for
one connection only; roles are part of the hashed bytes, so a proof can't be reflected. Frames bear a MAC under keys of
this connection, one for each direction, over their number, header and contents, so a frame that is forged, changed,
omitted, repeated or reflected is rejected. Nothing is encrypted (docs/security.md).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from meshwright.transport.key import RunKey

MAGIC = b"meshwire"
NOTICE_MAGIC = b"meshnote"
VERSION = 1
"""Version of handshake and frames; ends of different versions refuse each other."""
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sBB{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
NOTICE_BYTES = 24
"""Length of a notice's contents."""
NOTICE_REST_BYTES = NOTICE_BYTES + PROOF_BYTES
"""Length of a notice after its first bytes, which are as long as a hello."""
_HEADER = struct.Struct("<BBxxI")
HEADER_BYTES = _HEADER.size
MAC_BYTES = 16
"""Length of a frame's MAC, keyed BLAKE2b: a guess succeeds once in 2**128, and the first wrong one ends the connection.
Source: RFC 7693."""
_NUMBER = struct.Struct("<Q")
FRAME_BYTES = 1 << 20
"""Most contents of one frame of a parcel; longer ones are split."""


class WireError(ConnectionError):
    """The other end doesn't have the run's key, or sent an invalid frame."""


class Channel(enum.IntEnum):
    """The purpose of a connection; an end with another one is refused."""

    SUPERVISORS = 1
    """Messages between the supervisors of two nodes."""
    COURIER = 2
    """Snapshots on their way to another node."""
    SHELF = 3
    """Snapshots that another node reads."""
    WRITERS = 4
    """Agreement between the writers of a checkpoint."""
    SITES = 5
    """Rounds and versions, between a site and the outer server."""
    MOVEMENTS = 6
    """Movements and outer weights, between a rank of a site and a shard of the outer server."""


class FrameKind(enum.IntEnum):
    """The kind of a frame's contents."""

    MESSAGE = 1
    """A record as JSON."""
    PARCEL = 2
    """Raw bytes, whose number and meaning the preceding message announced."""


@dataclass(frozen=True)
class Seals:
    """The MACs of both directions of an authenticated connection."""

    sends: Seal
    """For outgoing frames."""
    receives: Seal
    """For incoming frames."""


class Seal:
    """MACs of the frames of one direction, in order.

    Args:
        key: of this connection and direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def mac(self, header: bytes, contents: bytes | bytearray | memoryview) -> bytes:
        """Returns the MAC of the next frame."""
        digest = hashlib.blake2b(_NUMBER.pack(self._number), key=self._key, digest_size=MAC_BYTES)
        digest.update(header)
        digest.update(contents)
        # The number is implicit on both ends: an omitted or repeated frame has a wrong MAC.
        self._number += 1
        return digest.digest()

    def check(self, header: bytes, contents: bytes | bytearray | memoryview, mac: bytes) -> None:
        """Checks the MAC of the next frame.

        Raises:
            WireError: when it is wrong.
        """
        # Constant time: the position of the first wrong byte must not leak.
        if not hmac.compare_digest(self.mac(header, contents), mac):
            raise WireError("a frame's MAC is wrong: it was forged, changed, left out or repeated")


def frame_header(kind: FrameKind, size: int) -> bytes:
    """Returns the header of a frame."""
    return _HEADER.pack(VERSION, kind, size)


def read_header(data: bytes, most_bytes: int) -> tuple[FrameKind, int]:
    """Returns kind and size of a frame.

    Args:
        data: the header.
        most_bytes: largest accepted size.

    Raises:
        WireError: for another version, an unknown kind, or a frame that is too long.
    """
    version, kind, size = _HEADER.unpack(data)
    if version != VERSION or kind not in FrameKind.__members__.values():
        raise WireError(f"not a frame of this version: version {version}, kind {kind}")
    # Checked before anything is allocated for the contents.
    if size > most_bytes:
        raise WireError(f"a frame of {size} bytes came, where {most_bytes} are allowed")
    return FrameKind(kind), size


class ClientChallenge:
    """The handshake of the connecting end.

    Args:
        key: of the run.
        channel: the connection's purpose.
    """

    def __init__(self, key: RunKey, channel: Channel) -> None:
        self._key, self._channel, self._nonce = key, channel, secrets.token_bytes(NONCE_BYTES)
        self.hello = _HELLO.pack(MAGIC, VERSION, channel, self._nonce)
        """The first bytes to send."""

    def answer(self, challenge: bytes) -> tuple[bytes, Seals]:
        """Checks the server's proof; returns this end's proof, to be sent next, and the connection's MACs.

        Raises:
            WireError: when the server doesn't have the run's key.
        """
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        transcript = _transcript(self._channel, self._nonce, nonce)
        if not hmac.compare_digest(_hmac(self._key, b"server", transcript), proof):
            raise WireError("the other end doesn't have this run's key")
        return _hmac(self._key, b"client", transcript), _seals(self._key, transcript, server=False)


class ServerChallenge:
    """The handshake of the listening end.

    Args:
        key: of the run.
        channel: the listener's purpose.
        hello: the client's first bytes.

    Raises:
        WireError: for other bytes, or another channel.
    """

    def __init__(self, key: RunKey, channel: Channel, hello: bytes) -> None:
        magic, version, requested_channel, nonce = _HELLO.unpack(hello)
        if magic != MAGIC or version != VERSION or requested_channel != channel:
            raise WireError("its first bytes aren't those of this wire")
        # Fresh for each connection: an old proof can't be replayed.
        server_nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._transcript = key, _transcript(channel, nonce, server_nonce)
        self.challenge = server_nonce + _hmac(key, b"server", self._transcript)
        """The bytes to send next."""

    def accept(self, proof: bytes) -> Seals:
        """Checks the client's proof; returns the connection's MACs.

        Raises:
            WireError: when it doesn't have the run's key.
        """
        if not hmac.compare_digest(_hmac(self._key, b"client", self._transcript), proof):
            raise WireError("it doesn't have this run's key")
        return _seals(self._key, self._transcript, server=True)


def make_notice(key: RunKey, channel: Channel, contents: bytes) -> bytes:
    """Returns the bytes of a notice, a one-way message to a listener that may not be accepting yet.

    Without a challenge it can be replayed, so its contents must stay true: "rank 3 won't come for step 500".

    Args:
        key: of the run.
        channel: of the listener.
        contents: `NOTICE_BYTES` bytes.
    """
    head = _HELLO.pack(NOTICE_MAGIC, VERSION, channel, secrets.token_bytes(NONCE_BYTES))
    return head + contents + _hmac(key, b"notice", head + contents)


def is_notice(hello: bytes) -> bool:
    """Returns whether first bytes are those of a notice."""
    return hello.startswith(NOTICE_MAGIC)


def read_notice(key: RunKey, channel: Channel, hello: bytes, payload: bytes) -> bytes:
    """Returns the contents of a notice.

    Args:
        key: of the run.
        channel: of the listener.
        hello: its first `HELLO_BYTES`.
        payload: its other `NOTICE_REST_BYTES`.

    Raises:
        WireError: when it isn't of this run and channel.
    """
    contents, proof = payload[:NOTICE_BYTES], payload[NOTICE_BYTES:]
    _, version, requested_channel, _ = _HELLO.unpack(hello)
    proven = hmac.compare_digest(_hmac(key, b"notice", hello + contents), proof)
    if not proven or version != VERSION or requested_channel != channel:
        raise WireError("a notice came from who doesn't have this run's key")
    return contents


def _transcript(channel: Channel, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return MAGIC + bytes((VERSION, channel)) + client_nonce + server_nonce


def _hmac(key: RunKey, role: bytes, transcript: bytes) -> bytes:
    # The zero byte separates role and transcript, which could otherwise be shifted into each other.
    return hmac.digest(key.secret, role + b"\0" + transcript, "sha256")


def _seals(key: RunKey, transcript: bytes, server: bool) -> Seals:
    # Directions have keys of their own, so that a reflected frame fails.
    from_server, from_client = (
        Seal(_hmac(key, b"frames of the server", transcript)),
        Seal(_hmac(key, b"frames of the client", transcript)),
    )
    return Seals(from_server, from_client) if server else Seals(from_client, from_server)
