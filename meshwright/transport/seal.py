"""The challenge that begins each connection, and the seal on each frame: bytes in, bytes out, without a socket.

    client                                            server
      magic, version, wire, nonce c          ->
                                             <-         nonce s, HMAC(key, server, wire, c, s)
      HMAC(key, client, wire, c, s)          ->
      frames, each with a MAC                <->        frames, each with a MAC

Both show that they have the run's key, neither sends it, and an answer is good for one connection alone: each end adds
a nonce of its own. Roles are part of what is hashed, so that an end can't be answered with its own words. Frames bear a
MAC under keys of this connection, one for each direction, over their number, header and contents: a frame that is
forged, changed, left out, repeated or sent back is no frame. Nothing is encrypted (docs/security.md).
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
"""Of challenge and frames; ends of another version don't talk."""
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sBB{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
NOTICE_BYTES = 24
"""Of what a notice says."""
NOTICE_REST_BYTES = NOTICE_BYTES + PROOF_BYTES
"""Of a notice after its first bytes, which are as long as a hello."""
_HEADER = struct.Struct("<BBxxI")
HEADER_BYTES = _HEADER.size
MAC_BYTES = 16
"""Of a frame's MAC, BLAKE2b with a key: one guess in 2**128 is right, the first wrong one ends it. Source: RFC 7693."""
_NUMBER = struct.Struct("<Q")
FRAME_BYTES = 1 << 20
"""Contents of the largest frame of a parcel; what is longer goes in several."""


class WireError(ConnectionError):
    """The other end doesn't have the run's key, or what it sends is no frame of this connection."""


class Channel(enum.IntEnum):
    """What a connection is for; an end that means another one is turned away."""

    SUPERVISORS = 1
    """Messages between the supervisors of two nodes."""
    COURIER = 2
    """Snapshots on their way to another node."""
    SHELF = 3
    """Snapshots that another node reads."""
    WRITERS = 4
    """How writers of a checkpoint agree."""


class FrameKind(enum.IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    """A record as JSON."""
    PARCEL = 2
    """Bytes, of whose number and meaning a message before told."""


@dataclass(frozen=True)
class Seals:
    """The two directions of a connection that has shown the key at both ends."""

    sends: Seal
    """Of frames that go out."""
    takes: Seal
    """Of frames that come in."""


class Seal:
    """MACs of the frames of one direction, in order.

    Args:
        key: of this connection and direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def mac(self, header: bytes, contents: bytes | bytearray | memoryview) -> bytes:
        """Returns the MAC of the next frame."""
        made = hashlib.blake2b(_NUMBER.pack(self._number), key=self._key, digest_size=MAC_BYTES)
        made.update(header)
        made.update(contents)
        self._number += 1
        return made.digest()

    def check(self, header: bytes, contents: bytes | bytearray | memoryview, mac: bytes) -> None:
        """Compares the MAC of the next frame.

        Raises:
            WireError: when it is another.
        """
        if not hmac.compare_digest(self.mac(header, contents), mac):
            raise WireError("a frame's MAC is wrong: it was forged, changed, left out or repeated")


def frame_header(kind: FrameKind, size: int) -> bytes:
    """Returns what stands before a frame's contents."""
    return _HEADER.pack(VERSION, kind, size)


def read_header(data: bytes, most: int) -> tuple[FrameKind, int]:
    """Returns kind and size of a frame.

    Args:
        data: the header.
        most: bytes that are taken at most.

    Raises:
        WireError: for another version, an unknown kind, or a frame that is too long.
    """
    version, kind, size = _HEADER.unpack(data)
    if version != VERSION or kind not in FrameKind.__members__.values():
        raise WireError(f"not a frame of this version: version {version}, kind {kind}")
    if size > most:
        raise WireError(f"a frame of {size} bytes came, where {most} are allowed")
    return FrameKind(kind), size


class ClientChallenge:
    """The end that connects.

    Args:
        key: of the run.
        wire: what the connection is for.
    """

    def __init__(self, key: RunKey, wire: Channel) -> None:
        self._key, self._wire, self._nonce = key, wire, secrets.token_bytes(NONCE_BYTES)
        self.hello = _HELLO.pack(MAGIC, VERSION, wire, self._nonce)
        """What goes out first."""

    def answer(self, challenge: bytes) -> tuple[bytes, Seals]:
        """Checks the server's proof; returns this end's, which goes out next.

        Raises:
            WireError: when the server doesn't have the run's key.
        """
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        said = _said(self._wire, self._nonce, nonce)
        if not hmac.compare_digest(_hmac(self._key, b"server", said), proof):
            raise WireError("the other end doesn't have this run's key")
        return _hmac(self._key, b"client", said), _seals(self._key, said, server=False)


class ServerChallenge:
    """The end that listens.

    Args:
        key: of the run.
        wire: what it listens for.
        hello: what the client sent first.

    Raises:
        WireError: for other bytes, or another wire.
    """

    def __init__(self, key: RunKey, wire: Channel, hello: bytes) -> None:
        magic, version, asked, nonce = _HELLO.unpack(hello)
        if magic != MAGIC or version != VERSION or asked != wire:
            raise WireError("its first bytes aren't those of this wire")
        own = secrets.token_bytes(NONCE_BYTES)
        self._key, self._said = key, _said(wire, nonce, own)
        self.challenge = own + _hmac(key, b"server", self._said)
        """What goes out next."""

    def accept(self, proof: bytes) -> Seals:
        """Checks the client's proof.

        Raises:
            WireError: when it doesn't have the run's key.
        """
        if not hmac.compare_digest(_hmac(self._key, b"client", self._said), proof):
            raise WireError("it doesn't have this run's key")
        return _seals(self._key, self._said, server=True)


def make_notice(key: RunKey, wire: Channel, contents: bytes) -> bytes:
    """Returns what tells something to a listener that may not be at work yet: nobody answers, so nobody need wait.

    It can be repeated by who saw it, so it must say what stays true: "rank 3 won't come for step 500".

    Args:
        key: of the run.
        wire: of the listener.
        contents: `NOTICE_BYTES` of them.
    """
    head = _HELLO.pack(NOTICE_MAGIC, VERSION, wire, secrets.token_bytes(NONCE_BYTES))
    return head + contents + _hmac(key, b"notice", head + contents)


def is_notice(hello: bytes) -> bool:
    """Returns whether first bytes are those of a notice."""
    return hello.startswith(NOTICE_MAGIC)


def read_notice(key: RunKey, wire: Channel, hello: bytes, rest: bytes) -> bytes:
    """Returns what a notice says.

    Raises:
        WireError: when it is none of this run and wire.
    """
    contents, proof = rest[:NOTICE_BYTES], rest[NOTICE_BYTES:]
    _, version, asked, _ = _HELLO.unpack(hello)
    proven = hmac.compare_digest(_hmac(key, b"notice", hello + contents), proof)
    if not proven or version != VERSION or asked != wire:
        raise WireError("a notice came from who doesn't have this run's key")
    return contents


def _said(wire: Channel, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return MAGIC + bytes((VERSION, wire)) + client_nonce + server_nonce


def _hmac(key: RunKey, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key.secret, role + b"\0" + said, "sha256")


def _seals(key: RunKey, said: bytes, server: bool) -> Seals:
    down, up = Seal(_hmac(key, b"frames of the server", said)), Seal(_hmac(key, b"frames of the client", said))
    return Seals(down, up) if server else Seals(up, down)
