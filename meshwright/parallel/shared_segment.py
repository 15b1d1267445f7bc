"""Memory that the ranks of one machine share: a ring of bytes that each rank writes, and the counters of all.

The memory is an anonymous file (memfd) that has no name in any file system: it ends with the last process that maps it,
however that process dies, and a small /dev/shm doesn't limit it. The other ranks open it through ``/proc`` of the rank
that made it. Each segment has a random token, so nobody takes another generation's segment for its own.

Each rank holds a POSIX lock on a byte of the file. The kernel releases it when the process ends, before anybody has
reaped it and without a signal, so any rank can ask whether another is alive.

A rank that waits sleeps in the kernel on a counter (futex) until the rank that moves it wakes it, as a socket would.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RING_BYTES = 4 * 2**20
"""Bytes of a rank's ring: what it may send before its peers have read it. Only pages that are written take memory."""
ALIGNMENT = 64
"""Every message begins at a multiple of these bytes: a cache line, and a multiple of every element's size."""
_TOKEN_BYTES = 16
_COUNTER_WORDS = ALIGNMENT // 8
"""A counter has a cache line of its own: a rank that polls one doesn't slow the writer of another."""
_LOCK = struct.Struct("hhqqi4x")
"""Source: struct flock of Linux on 64 bits, fcntl(2): type, whence, start, length, pid."""
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1
"""Source: Linux, syscall_64.tbl and futex(2); of x86_64, as `ORDERED_MACHINES` are."""
ORDERED_MACHINES = ("x86_64", "AMD64")
"""Processors whose stores are seen in program order, so that a counter that has moved says that the data before it is
there. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3, section 8.2.2. Others need
fences, which Python can't write."""


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where another process of this machine finds a segment."""

    pid: int
    """Process that made it."""
    descriptor: int
    """Its descriptor there."""
    token: str
    """Hexadecimal token at the segment's start."""


class SharedSegment:
    """A mapped segment of ``ranks`` ranks.

    A rank's ring is a stream of bytes: position ``p`` of it lies at ``p % RING_BYTES``. ``counters`` holds how many
    bytes each rank has published, and how many of each stream each rank has read.

    Args:
        descriptor: of the file; the segment closes it.
        ranks: their number.
        token: that the file must begin with.

    Raises:
        OSError: when it can't be mapped, or is another file.
    """

    def __init__(self, descriptor: int, ranks: int, token: str) -> None:
        self.ranks, self.token = ranks, token
        self._descriptor = descriptor
        size = segment_bytes(ranks)
        if os.fstat(descriptor).st_size != size:
            raise OSError(f"the shared memory has {os.fstat(descriptor).st_size} bytes instead of {size}")
        self._map = mmap.mmap(descriptor, size)
        if self._map[:_TOKEN_BYTES].hex() != token:
            raise OSError("the shared memory belongs to other ranks")
        header_bytes = _header_bytes(ranks)
        self.counters = memoryview(self._map)[ALIGNMENT:header_bytes].cast("q")
        """Words of 8 bytes; a store of one is a single instruction, so no reader sees half of it."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + ALIGNMENT
        self._system_call = ctypes.CDLL(None).syscall
        data = np.frombuffer(self._map, np.uint8)[header_bytes:]
        self.rings: list[NDArray[np.uint8]] = list(data.reshape(ranks, RING_BYTES))
        """The ring of each rank, (RING_BYTES,)."""

    @classmethod
    def create(cls, ranks: int) -> SharedSegment:
        """Makes a segment.

        Raises:
            OSError: where the kernel refuses.
        """
        descriptor = os.memfd_create("meshwright", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, segment_bytes(ranks))
            # Nobody can shrink it: a rank that touched a page beyond its end would die by SIGBUS.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(descriptor, token, 0)
            return cls(descriptor, ranks, token.hex())
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, address: SegmentAddress, ranks: int) -> SharedSegment:
        """Opens the segment of another process.

        Raises:
            OSError: when it can't be reached, as from another container, or is another one.
        """
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, ranks, address.token)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> SegmentAddress:
        """Where others find it, as long as this process keeps it."""
        return SegmentAddress(os.getpid(), self._descriptor, self.token)

    def published_at(self, rank: int) -> int:
        """Returns the index of the counter of bytes that ``rank`` has published."""
        return rank * (self.ranks + 1) * _COUNTER_WORDS

    def read_at(self, writer: int, reader: int) -> int:
        """Returns the index of the counter of bytes of ``writer``'s stream that ``reader`` needs no longer."""
        return self.published_at(writer) + (reader + 1) * _COUNTER_WORDS

    def sleep(self, counter: int, seen: int, limit_s: float) -> None:
        """Sleeps until a counter is woken; not at all if it isn't what it was.

        Args:
            counter: its index.
            seen: its value when this rank found that it has to wait.
            limit_s: longest sleep, below a second.
        """
        limit = (ctypes.c_long * 2)(0, int(limit_s * 1e9))
        # The kernel compares the lower half, in which any change of less than 4 GiB shows.
        self._system_call(
            ctypes.c_long(_FUTEX), ctypes.c_void_p(self._address + 8 * counter), ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(seen & 0xFFFFFFFF), limit, None, ctypes.c_int(0),
        )  # fmt: skip

    def wake(self, counter: int) -> None:
        """Wakes all that sleep on a counter, which has moved."""
        self._system_call(
            ctypes.c_long(_FUTEX), ctypes.c_void_p(self._address + 8 * counter), ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(_ALL), None, None, ctypes.c_int(0),
        )  # fmt: skip

    def hold(self, rank: int) -> None:
        """Marks a rank as alive until this process ends or closes the segment.

        Raises:
            OSError: when another process holds it.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def is_held(self, rank: int) -> bool:
        """Returns whether another process holds a rank; its end releases it."""
        query = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = _LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK

    def __del__(self) -> None:
        """Closes the descriptor; the mapping ends with its last view."""
        if hasattr(self, "rings"):
            os.close(self._descriptor)


def segment_bytes(ranks: int) -> int:
    """Returns the bytes of a segment, of which untouched pages take no memory."""
    return _header_bytes(ranks) + ranks * RING_BYTES


def _header_bytes(ranks: int) -> int:
    """Returns the bytes before the rings, whole pages: the token's line, then each rank's counters."""
    words_bytes = ALIGNMENT + ranks * (ranks + 1) * ALIGNMENT
    return -(-words_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def obstacle_to_sharing() -> str:
    """Returns why ranks of this machine can't share memory as this module does; empty where they can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    if platform.machine() not in ORDERED_MACHINES:
        return f"a {platform.machine()} processor may show stores out of order, and Python has no fence"
    return ""


def machine_identity() -> str:
    """Returns what two processes have in common that can share memory: kernel, processes and network that they see.

    Namespaces of the network are nodes to everything else in a run, so they are here too.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            kernel = boot.read().strip()
        return "/".join((kernel, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")))
    except OSError:
        return ""
