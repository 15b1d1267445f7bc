"""Shared memory of ranks: without a name, found by address and token alone, and locks that end with a process."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.parallel.shared_segment import RING_BYTES, SegmentAddress, SharedSegment, segment_bytes


def test_a_segment_has_no_name() -> None:
    """Nothing is left in any file system, however its processes end; and it takes no memory until it is written."""
    segment = SharedSegment.create(3)
    link = Path(f"/proc/self/fd/{segment.address.descriptor}")
    assert str(link.readlink()).startswith("/memfd:") and str(link.readlink()).endswith("(deleted)")
    assert os.fstat(segment.address.descriptor).st_blocks * 512 < RING_BYTES // 100


def test_it_cannot_shrink() -> None:
    """A rank that touched a page beyond the end would die."""
    segment = SharedSegment.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.address.descriptor, 4096)


def test_only_its_own_ranks_open_it() -> None:
    """Another generation's address leads to another token; a wrong number of ranks to another size."""
    segment = SharedSegment.create(2)
    twin = SharedSegment.open(segment.address, 2)
    segment.rings[1][5] = 7
    segment.counters[segment.read_at(1, 0)] = 12
    assert twin.rings[1][5] == 7 and twin.counters[twin.read_at(1, 0)] == 12
    with pytest.raises(OSError, match="other ranks"):
        SharedSegment.open(replace(segment.address, token="00" * 16), 2)
    with pytest.raises(OSError, match=f"{segment_bytes(2)} bytes instead of {segment_bytes(3)}"):
        SharedSegment.open(segment.address, 3)
    with pytest.raises(OSError):
        SharedSegment.open(SegmentAddress(os.getpid(), 2**20, segment.token), 2)


def test_counters_have_lines_of_their_own() -> None:
    """No two counters share a cache line, and none lies in a ring."""
    segment = SharedSegment.create(4)
    words = [segment.published_at(rank) for rank in range(4)]
    words += [segment.read_at(writer, reader) for writer in range(4) for reader in range(4)]
    lines = [word * 8 // 64 for word in words]
    assert len(set(lines)) == len(words) == 20 and max(words) < len(segment.counters)


def test_a_killed_process_holds_nothing_before_it_is_reaped() -> None:
    """The kernel releases the lock at the process's end, while its parent has not yet asked for its status."""
    segment = SharedSegment.create(2)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        segment.hold(1)
        os.write(write_end, b"h")
        signal.pause()
        os._exit(0)
    assert os.read(read_end, 1) == b"h"
    assert segment.is_held(1) and not segment.is_held(0)
    # Holding another byte, and a fork that ends, change nothing.
    segment.hold(0)
    other = os.fork()
    if not other:
        os._exit(0)
    os.waitpid(other, 0)
    assert segment.is_held(1)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not segment.is_held(1)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
