"""The courier: sends each new snapshot of a node's ranks to the next nodes, and receives those of the nodes before.

Protocol, per snapshot: the sender announces rank and size, sends the body, then the header; the receiver answers one
byte once the header is in place. A segment without a header holds no snapshot, so a copy cut short is never read.

Both ends of a connection authenticate by the run's key before a segment is touched or a lock is taken, and no snapshot
is longer than the plan allows. The courier is a process forked from the supervisor, so that copies cost training only
memory and network; they are received into segments that the supervisor holds.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.remote import serve
from meshwright.checkpoint.snapshot import HEADER_BYTES, Segment, Snapshot, parse_header, read_step
from meshwright.errors import CheckpointError
from meshwright.resilience.helper import Helper
from meshwright.train.faults import Faults
from meshwright.train.memory import PeerCopies
from meshwright.transport.connection import Connection, connect
from meshwright.transport.gate import Gate, Refused
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, WireError

_ANNOUNCEMENT = struct.Struct("<qq")
_STORED = b"+"
_POLL_S = 0.004
_RECONNECT_S = 0.2
STALL_S = 30.0
"""A transfer that stalls for so long is aborted, so that a restarted sender isn't blocked by its lock."""


def start_snapshot_server(
    listener: socket.socket, snapshots: Sequence[Snapshot], key: RunKey, refused: Refused | None = None
) -> Helper:
    """Starts a process from which other nodes read snapshots (`checkpoint.remote.Shelf`)."""
    keyed_snapshots = [((snapshot.generation, snapshot.step, snapshot.rank), snapshot) for snapshot in snapshots]
    return Helper(lambda: serve(listener, keyed_snapshots, key, refused))


@dataclass(frozen=True, kw_only=True)
class CourierInbox:
    """Where and under which limits a courier receives snapshots of the preceding nodes."""

    segments: Mapping[int, Sequence[Segment]]
    """Segments for the snapshots of each of their ranks, by rank."""
    max_bytes: int
    """Size of the largest snapshot that is accepted."""
    key: RunKey
    """The run's secret."""
    refused: Refused | None = None
    """Called for connections without the key, and for invalid snapshots."""


def start_courier(
    listener: socket.socket,
    targets: Sequence[tuple[str, int]],
    local_segments: Mapping[int, Sequence[Segment]],
    inbox: CourierInbox,
    copied: PeerCopies,
    faults: Callable[[], Faults] | None = None,
) -> Helper:
    """Starts a node's courier.

    Args:
        listener: socket to which the couriers of the preceding nodes connect.
        targets: addresses of the next nodes' couriers.
        local_segments: each local rank's segments by rank, in order of local ranks.
        inbox: where to receive snapshots, and the run's key.
        copied: notified of what has arrived at each of the next nodes, in their order.
        faults: makes the injected faults.
    """

    def work() -> None:
        # Threads suffice in a process that only copies: socket calls release the GIL.
        _start_thread(_receive_forever, listener, inbox)
        for target_index, address in enumerate(targets[1:], 1):
            _start_thread(_send_forever, address, inbox.key, local_segments, copied, target_index, None)
        # Faults strike once: on the way to the nearest.
        _send_forever(targets[0], inbox.key, local_segments, copied, 0, faults() if faults is not None else None)

    return Helper(work)


def _start_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _send_forever(
    address: tuple[str, int],
    key: RunKey,
    local_segments: Mapping[int, Sequence[Segment]],
    copied: PeerCopies,
    target_index: int,
    faults: Faults | None,
) -> None:
    """Connects to another node's courier, and sends snapshots; reconnects for ever."""
    while True:
        with contextlib.suppress(OSError), connect(address, key, Channel.COURIER) as connection:
            _send_new_snapshots(connection, local_segments, copied, target_index, faults)
        time.sleep(_RECONNECT_S)


def _send_new_snapshots(
    connection: Connection,
    local_segments: Mapping[int, Sequence[Segment]],
    copied: PeerCopies,
    target_index: int,
    faults: Faults | None,
) -> None:
    """Sends every snapshot that is newer than the last one sent of its rank; returns only by an `OSError`."""
    # Per connection: after a reconnection every rank's newest snapshot is sent again.
    sent = dict.fromkeys(local_segments, -1)
    maps: dict[int, mmap.mmap] = {}
    while True:
        idle = True
        for local_rank, (rank, segments) in enumerate(local_segments.items()):
            # A rank may write several snapshots while one is in transit: only the newest is sent.
            newest = _newest_snapshot(segments, maps)
            if newest is None or newest[0] <= sent[rank]:
                continue
            if faults is not None:
                faults.begin_step(newest[0])
            if _send_snapshot(connection, rank, newest[1], faults):
                sent[rank], idle = newest[0], False
                copied.record(local_rank, newest[0], target_index)
        if idle:
            time.sleep(_POLL_S)


def _newest_snapshot(segments: Sequence[Segment], maps: dict[int, mmap.mmap]) -> tuple[int, mmap.mmap] | None:
    candidates = []
    for segment in segments:
        # Segments get their size with the first snapshot, and keep it: one mapping serves for ever.
        if segment.fd not in maps and segment.size:
            maps[segment.fd] = mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_READ)
        memory = maps.get(segment.fd)
        fields = parse_header(memory) if memory is not None else None
        if memory is not None and fields is not None:
            candidates.append((fields[1], memory))
    return max(candidates, key=lambda candidate: candidate[0], default=None)


def _send_snapshot(connection: Connection, rank: int, memory: mmap.mmap, faults: Faults | None = None) -> bool:
    """Sends a snapshot; returns False when its rank overwrote it meanwhile."""
    header_bytes = memory[:HEADER_BYTES]
    view = memoryview(memory)
    # The header is sampled before the body and compared after it: a rank writes without waiting for the courier.
    connection.send(_ANNOUNCEMENT.pack(rank, len(view)))
    connection.send_parcel(view[HEADER_BYTES:])
    if faults is not None:
        faults.reach("send")
    unchanged = memory[:HEADER_BYTES] == header_bytes
    connection.send(header_bytes if unchanged else bytes(HEADER_BYTES))
    return bytes(connection.receive(len(_STORED))) == _STORED and unchanged


def _receive_forever(listener: socket.socket, inbox: CourierInbox) -> None:
    """Receives snapshots over the oldest segment of each rank, so that a complete one exists at any moment."""
    # One lock for each rank: an old and a new connection may both deliver the same rank.
    locks = {rank: threading.Lock() for rank in inbox.segments}
    gate = Gate(listener, inbox.key, Channel.COURIER, inbox.refused)
    while True:
        for connection in gate.poll(1.0):
            _start_thread(_receive_from, connection, inbox, locks, gate)


def _receive_from(connection: Connection, inbox: CourierInbox, locks: Mapping[int, threading.Lock], gate: Gate) -> None:
    with connection:
        try:
            while True:
                # Between snapshots a connection may be idle for minutes.
                connection.limit(None)
                rank, size = _receive_announcement(connection, inbox)
                # The bytes of a courier that died may still be arriving when its successor sends the same rank.
                with locks[rank]:
                    connection.limit(STALL_S)
                    _receive_snapshot(connection, inbox.segments[rank], size)
                connection.send(_STORED)
        except (WireError, CheckpointError) as error:
            # An authenticated peer that sends garbage is a bug or an attack: reported, and disconnected.
            gate.report_refusal(connection.address, str(error))
        except OSError:
            return


def _receive_announcement(connection: Connection, inbox: CourierInbox) -> tuple[int, int]:
    """Returns the announced (rank, size) of the next snapshot.

    Raises:
        WireError: when this node doesn't receive such a snapshot.
    """
    contents = connection.receive(_ANNOUNCEMENT.size)
    if len(contents) != _ANNOUNCEMENT.size:
        raise WireError("not the beginning of a snapshot")
    rank, size = _ANNOUNCEMENT.unpack(contents)
    if rank not in inbox.segments:
        raise WireError(f"a snapshot of rank {rank} came, which this node doesn't take in")
    if not HEADER_BYTES <= size <= inbox.max_bytes:
        raise WireError(f"a snapshot of {size} bytes came, where the plan allows {inbox.max_bytes}")
    return rank, size


def _receive_snapshot(connection: Connection, segments: Sequence[Segment], size: int) -> None:
    # The segment with the oldest or no snapshot is overwritten.
    segment = min(segments, key=lambda candidate: (read_step(candidate) or (-1, -1))[1])
    memory = segment.map(size)
    # Invalidate first, header last: a reader sees the old snapshot, none, or the complete new one.
    memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
    connection.receive_parcel(memoryview(memory)[HEADER_BYTES:])
    header_bytes = bytes(connection.receive(HEADER_BYTES))
    # A header of zeros cancels: the sender's rank overwrote the snapshot during the transfer.
    if len(header_bytes) == HEADER_BYTES and any(header_bytes):
        memory[:HEADER_BYTES] = header_bytes
