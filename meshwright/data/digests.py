"""What the files of a corpus contain, as digests; a file that hasn't changed since is not read again.

A digest needs every byte: about a second a GiB and core, so minutes for a TB, once. What came of it is kept in
``digests.json`` beside the prepared sets, by path, size, inode and times of change, and taken as long as these stay.
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
from meshwright.data.sources import CorpusFile
from meshwright.errors import DataError
from meshwright.records import parse_json

DIGESTS = "digests.json"
LOCK_S = 6 * 3600.0
"""Longest wait for another process that reads the same corpus."""
THREADED_BYTES = 256 << 20
"""Bytes from which files are read by several threads: hashing lets go of the interpreter."""
SETTLED_NS = 2 * 10**9
"""A file changed less than this ago may change again within one tick of its file system's clock: not remembered."""

Known = dict[str, list[Any]]
"""Path to (size, inode, time of the last write, time of the last change, digest)."""


def digest_sources(
    sources: Sequence[CorpusFile], folder: Path, report: Callable[[int], None] | None = None
) -> list[str]:
    """Returns the SHA-256 of each file.

    Args:
        sources: the files.
        folder: where ``digests.json`` lies; where it can't be written, nothing is remembered.
        report: called with the bytes read so far, after each file.

    Raises:
        DataError: when a file can't be read.
    """
    begun_ns = time.time_ns()
    states = {source.path: _state(source) for source in sources}
    known = _read(folder / DIGESTS)
    if any(_lacks(known, path, state) for path, state in states.items()):
        with _alone(folder):
            known = _read(folder / DIGESTS)  # another process may have read the same files meanwhile
            lacking = [path for path, state in states.items() if _lacks(known, path, state)]
            known |= (fresh := _digests(lacking, states, report))
            unsettled = {path for path in fresh if max(states[path][2:]) > begun_ns - SETTLED_NS}
            _write(folder / DIGESTS, {path: row for path, row in known.items() if path not in unsettled})
    return [known[source.path][-1] for source in sources]


def _state(source: CorpusFile) -> list[int]:
    try:
        state = os.stat(source.path)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}; check the path and its permissions") from None
    return [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]


def _lacks(known: Known, path: str, state: list[int]) -> bool:
    return known.get(path, [None])[:-1] != state


def _digests(paths: Sequence[str], states: dict[str, list[int]], report: Callable[[int], None] | None) -> Known:
    """Reads the files; in this thread where they are small, since threads cost a fork later."""
    total = sum(states[path][0] for path in paths)
    done, found = 0, {}
    with contextlib.ExitStack() as stack:
        threaded = total >= THREADED_BYTES
        pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0)))) if threaded else None
        for path, digest in zip(paths, (pool.map if pool else map)(_digest, paths)):
            found[path] = [*states[path], digest]
            done += states[path][0]
            if report is not None:
                report(done)
    return found


def _digest(path: str) -> str:
    try:
        return sha256(Path(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets the ranks of a node read a corpus once together, where the folder can be written."""
    with contextlib.ExitStack() as stack:
        if os.access(folder if folder.exists() else folder.parent, os.W_OK):
            stack.enter_context(lone_writer(folder / (DIGESTS + ".lock"), LOCK_S))
        yield


def _read(path: Path) -> Known:
    """Returns what is remembered; a damaged file counts as none, since all of it can be read again."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    return {name: row for name, row in rows if isinstance(row, list) and len(row) == 5 and isinstance(row[-1], str)}


def _write(path: Path, known: Known) -> None:
    rows = {name: row for name, row in known.items() if os.path.exists(name)}
    with contextlib.suppress(OSError), whole_file(path) as file:
        file.write(json.dumps(rows, sort_keys=True).encode("utf-8"))
