"""The courier: carries each new snapshot of a node's ranks to the next nodes, and takes in those of the nodes before.

Both ends of a connection have shown the run's key before a segment is touched or a lock is held, and what is taken in
is no longer than the plan says a snapshot may be.

It is a process of its own, forked from the supervisor, so that a node's copies cost training nothing but memory and
the network; what it takes in lies in segments that the supervisor holds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.remote import serve
from meshwright.checkpoint.snapshot import HEADER_BYTES, Segment, Snapshot, header, peek
from meshwright.errors import CheckpointError
from meshwright.forking import die_with_parent
from meshwright.train.faults import Faults
from meshwright.train.memory import Copied
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, WireError

_PARCEL = struct.Struct("<qq")
_STORED = b"+"
_POLL_S = 0.004
_AGAIN_S = 0.2
STALL_S = 30.0
"""A snapshot of which nothing came for so long is given up, so that what its sender sends anew isn't kept waiting."""


class Helper:
    """A process that works for a supervisor until it is ended, or the supervisor goes."""

    def __init__(self, work: Callable[[], None]) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                die_with_parent(parent)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                work()
            finally:
                os._exit(0)

    @property
    def died(self) -> bool:
        """Whether it has ended by itself, which it never should."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def close(self) -> None:
        """Ends it; a second call does nothing."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def start_shelf(
    listener: socket.socket, snapshots: Sequence[Snapshot], key: RunKey, refused: Refused | None = None
) -> Helper:
    """Starts a process from which other nodes read snapshots (`checkpoint.remote.Shelf`)."""
    held = [((one.generation, one.step, one.rank), one) for one in snapshots]
    return Helper(lambda: serve(listener, held, key, refused))


@dataclass(frozen=True, kw_only=True)
class Inlet:
    """What a courier takes in of the nodes before."""

    others: Mapping[int, Sequence[Segment]]
    """Rank of a node before to the segments that its snapshots are put in."""
    most_bytes: int
    """Of a snapshot; a longer one is none of this run."""
    key: RunKey
    """Of the run."""
    refused: Refused | None = None
    """Told of strangers, and of what is no snapshot."""


def start_courier(
    listener: socket.socket,
    to: Sequence[tuple[str, int]],
    own: Mapping[int, Sequence[Segment]],
    inlet: Inlet,
    copied: Copied,
    faults: Callable[[], Faults] | None = None,
) -> Helper:
    """Starts a node's courier.

    Args:
        listener: where the couriers of the nodes before connect.
        to: where those of the next nodes listen.
        own: rank to the segments it writes, in order of local ranks.
        inlet: what is taken in, and the run's key.
        copied: told of what has arrived at each of the next nodes, in their order.
        faults: makes what is to go wrong on purpose.
    """

    def work() -> None:
        _in_thread(_take_in, listener, inlet)
        for place, address in enumerate(to[1:], 1):
            _in_thread(_carry_on, address, inlet.key, own, copied, place, None)
        # Faults strike once: on the way to the nearest.
        _carry_on(to[0], inlet.key, own, copied, 0, faults() if faults is not None else None)

    return Helper(work)


def _in_thread(work: Callable[..., None], *given: object) -> None:
    threading.Thread(target=work, args=given, daemon=True).start()


def _carry_on(
    to: tuple[str, int],
    key: RunKey,
    own: Mapping[int, Sequence[Segment]],
    copied: Copied,
    place: int,
    faults: Faults | None,
) -> None:
    """Connects to another node's courier, again and again, and carries."""
    while True:
        with contextlib.suppress(OSError), connect(to, key, Channel.COURIER) as connection:
            _carry(connection, own, copied, place, faults)
        time.sleep(_AGAIN_S)


def _carry(
    connection: Connection,
    own: Mapping[int, Sequence[Segment]],
    copied: Copied,
    place: int,
    faults: Faults | None,
) -> None:
    """Sends every snapshot that is newer than the last one sent of its rank, for ever."""
    sent = dict.fromkeys(own, -1)
    maps: dict[int, mmap.mmap] = {}
    while True:
        idle = True
        for local, (rank, segments) in enumerate(own.items()):
            newest = _newest(segments, maps)
            if newest is None or newest[0] <= sent[rank]:
                continue
            if faults is not None:
                faults.begin(newest[0])
            if _send(connection, rank, newest[1], faults):
                sent[rank], idle = newest[0], False
                copied.arrived(local, newest[0], place)
        if idle:
            time.sleep(_POLL_S)


def _newest(segments: Sequence[Segment], maps: dict[int, mmap.mmap]) -> tuple[int, mmap.mmap] | None:
    found = []
    for segment in segments:
        if segment.fd not in maps and segment.size:
            maps[segment.fd] = mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_READ)
        memory = maps.get(segment.fd)
        head = header(memory) if memory is not None else None
        if memory is not None and head is not None:
            found.append((head[1], memory))
    return max(found, key=lambda one: one[0], default=None)


def _send(connection: Connection, rank: int, memory: mmap.mmap, faults: Faults | None = None) -> bool:
    """Sends a snapshot; returns whether it stands at the other end, which it doesn't where it changed meanwhile."""
    before = memory[:HEADER_BYTES]
    view = memoryview(memory)
    connection.send(_PARCEL.pack(rank, len(view)))
    connection.send_parcel(view[HEADER_BYTES:])
    if faults is not None:
        faults.at("send")
    whole = memory[:HEADER_BYTES] == before
    connection.send(before if whole else bytes(HEADER_BYTES))
    return bytes(connection.receive(len(_STORED))) == _STORED and whole


def _take_in(listener: socket.socket, inlet: Inlet) -> None:
    """Puts what comes into segments, over the oldest, so that a whole snapshot stands at any moment."""
    locks = {rank: threading.Lock() for rank in inlet.others}
    gate = Gate(listener, inlet.key, Channel.COURIER, inlet.refused)
    while True:
        for connection in gate.poll(1.0):
            _in_thread(_store_all, connection, inlet, locks, gate)


def _store_all(connection: Connection, inlet: Inlet, locks: Mapping[int, threading.Lock], gate: Gate) -> None:
    with connection:
        try:
            while True:
                connection.limit(None)
                rank, size = _announced(connection, inlet)
                # What a courier that died had sent may still be on its way in when the next one sends.
                with locks[rank]:
                    connection.limit(STALL_S)
                    _store(connection, inlet.others[rank], size)
                connection.send(_STORED)
        except (WireError, CheckpointError) as error:
            gate.tell(connection.address, str(error))
        except OSError:
            return


def _announced(connection: Connection, inlet: Inlet) -> tuple[int, int]:
    """Returns rank and size of the snapshot that comes next.

    Raises:
        WireError: when it is none that this node takes in.
    """
    contents = connection.receive(_PARCEL.size)
    if len(contents) != _PARCEL.size:
        raise WireError("not the beginning of a snapshot")
    rank, size = _PARCEL.unpack(contents)
    if rank not in inlet.others:
        raise WireError(f"a snapshot of rank {rank} came, which this node doesn't take in")
    if not HEADER_BYTES <= size <= inlet.most_bytes:
        raise WireError(f"a snapshot of {size} bytes came, where the plan allows {inlet.most_bytes}")
    return rank, size


def _store(connection: Connection, segments: Sequence[Segment], size: int) -> None:
    segment = min(segments, key=lambda one: (peek(one) or (-1, -1))[1])
    memory = segment.map(size)
    memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
    connection.receive_parcel(memoryview(memory)[HEADER_BYTES:])
    head = bytes(connection.receive(HEADER_BYTES))
    if len(head) == HEADER_BYTES and any(head):
        memory[:HEADER_BYTES] = head
