"""SHA-256 digests of a corpus' files, cached so that an unchanged file is not read again.

A digest needs every byte: about a second a GiB and core, so minutes for a TB, once. Digests are cached in
``digests.json`` beside the prepared sets, by path, size, inode and times of change, and are valid while these stay.
Files behind a URL are known by what their store says of them, each time (`remote.remote_digest`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright.data.files import lone_writer, sha256, whole_file
from meshwright.data.remote import is_remote, remote_digest
from meshwright.data.sources import CorpusFile
from meshwright.errors import DataError
from meshwright.records import parse_json

DIGESTS = "digests.json"
LOCK_S = 6 * 3600.0
"""Longest wait for another process that reads the same corpus."""
THREADED_BYTES = 256 << 20
"""Bytes from which files are read by several threads: hashing releases the GIL."""
SETTLED_NS = 2 * 10**9
"""A file changed less than this ago may change again within one tick of its file system's clock: not cached."""
_REMOTE_CALLS = 16
"""Questions to stores at a time."""

DigestRecords = dict[str, list[Any]]
"""Path to (size, inode, time of the last write, time of the last change, digest)."""


def digest_sources(
    sources: Sequence[CorpusFile], folder: Path, report: Callable[[int], None] | None = None
) -> list[str]:
    """Returns a digest of each file: the SHA-256 of its bytes, or what its store says of them.

    Args:
        sources: the files.
        folder: of ``digests.json``; nothing is cached where it can't be written.
        report: called with the bytes read so far, after each file.

    Raises:
        DataError: when a file can't be read.
    """
    with ThreadPoolExecutor(_REMOTE_CALLS) as pool:
        urls = [source.path for source in sources if is_remote(source.path)]
        remote_digests = dict(zip(urls, pool.map(remote_digest, urls)))
    begun_ns = time.time_ns()
    states = {source.path: _state(source) for source in sources if not is_remote(source.path)}
    records = _read_records(folder / DIGESTS)
    # Look without a lock first: normally every digest is cached.
    if any(_is_outdated(records, path, state) for path, state in states.items()):
        with _exclusive_lock(folder):
            records = _read_records(folder / DIGESTS)  # another process may have read the same files meanwhile
            unread_paths = [path for path, state in states.items() if _is_outdated(records, path, state)]
            records |= (new_records := _digest_files(unread_paths, states, report))
            # Size and times of a file that still changes may equal those of its next contents.
            unsettled = {path for path in new_records if max(states[path][2:]) > begun_ns - SETTLED_NS}
            _write_records(
                folder / DIGESTS, {path: record for path, record in records.items() if path not in unsettled}
            )
    return [remote_digests.get(source.path) or records[source.path][-1] for source in sources]


def _state(source: CorpusFile) -> list[int]:
    try:
        status = os.stat(source.path)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}; check the path and its permissions") from None
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _is_outdated(records: DigestRecords, path: str, state: list[int]) -> bool:
    return records.get(path, [None])[:-1] != state


def _digest_files(
    paths: Sequence[str], states: dict[str, list[int]], report: Callable[[int], None] | None
) -> DigestRecords:
    """Reads files and returns their records; small ones in this thread, since threads make a later fork unsafe."""
    total = sum(states[path][0] for path in paths)
    read_bytes, new_records = 0, {}
    with contextlib.ExitStack() as stack:
        # Threads only for large input: they make a later fork of the process unsafe.
        threaded = total >= THREADED_BYTES
        pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0)))) if threaded else None
        for path, digest in zip(paths, (pool.map if pool else map)(_digest_file, paths)):
            new_records[path] = [*states[path], digest]
            read_bytes += states[path][0]
            if report is not None:
                report(read_bytes)
    return new_records


def _digest_file(path: str) -> str:
    try:
        return sha256(Path(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds a lock, so that only one process of a node reads the corpus; without one where it can't be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            stack.enter_context(lone_writer(folder / (DIGESTS + ".lock"), LOCK_S))
        yield


def _read_records(path: Path) -> DigestRecords:
    """Returns the cached records; a damaged cache counts as empty, since all of it can be computed again."""
    try:
        contents = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = contents.items() if isinstance(contents, dict) else ()
    return {
        name: record
        for name, record in entries
        if isinstance(record, list) and len(record) == 5 and isinstance(record[-1], str)
    }


def _write_records(path: Path, records: DigestRecords) -> None:
    # Entries of deleted files are dropped, so that the cache doesn't grow forever.
    existing = {name: row for name, row in records.items() if os.path.exists(name)}
    # DataError: the disk is full. A cache is no reason to fail.
    with contextlib.suppress(OSError, DataError), whole_file(path) as file:
        file.write(json.dumps(existing, sort_keys=True).encode("utf-8"))
