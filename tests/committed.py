"""Which step of a run is committed, read from outside: of which every rank's snapshot is whole in living processes."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tests.runs import events

_HEADER = struct.Struct("<8sqqqqqqI")
"""Of a snapshot: magic, generation, step, bytes of the table, ... (`checkpoint/snapshot.py`)."""
_TABLE_AT = 64
_NAME = "meshwright-snapshot"
"""Of its memory file."""


def committed_before_restore(run: Path, limit_s: float = 60.0) -> int:
    """Returns the newest step that is committed until a run goes on from one, after a node's loss."""
    newest, end = committed_step(run), time.monotonic() + limit_s
    while not events(run, "restored") and time.monotonic() < end:
        newest = max(newest, committed_step(run))
        time.sleep(0.02)
    return newest


def run_processes(run: Path) -> list[int]:
    """Returns the living processes whose command line names a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                names_run = str(run).encode() in (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if names_run:
                found.append(int(entry.name))
    return found


def committed_step(run: Path) -> int:
    """Returns the newest step of which living processes hold every rank's whole snapshot; -1 without one."""
    holders: dict[tuple[int, int], tuple[int, set[int]]] = {}
    for memory in {inode: path for path, inode in _snapshot_files(run)}.values():
        try:
            # Meanwhile its number may be that of another file: reading a pipe would wait for ever.
            descriptor = os.open(memory, os.O_RDONLY | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if _NAME not in os.readlink(f"/proc/self/fd/{descriptor}"):
                    continue
                magic, generation, step, table_bytes, *_ = _HEADER.unpack(file.read(_HEADER.size))
                file.seek(_TABLE_AT)
                table = json.loads(file.read(table_bytes)) if magic == b"meshsnap" else None
        except (OSError, ValueError, struct.error):
            continue  # written just now
        if table is not None:
            holders.setdefault((generation, step), (table["ranks"], set()))[1].add(table["rank"])
    return max((step for (_, step), (count, ranks) in holders.items() if len(ranks) == count), default=-1)


def _snapshot_files(run: Path) -> Iterator[tuple[Path, int]]:
    """Yields each open memory file for snapshots, and its inode."""
    for pid in run_processes(run):
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if _NAME in os.readlink(descriptor):
                    yield descriptor, descriptor.stat().st_ino
        except OSError:  # it ended, or closed it
            continue
