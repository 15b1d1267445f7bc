"""Durable files and folders: checksums computed while writing, fsync, atomic rename and removal."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

from meshwright.checkpoint.contract import FileRecord

_BLOCK_BYTES = 1 << 20


class Checksum:
    """A running checksum: crc32 for large files, sha256 for small ones."""

    def __init__(self, algorithm: str) -> None:
        self._sha = hashlib.sha256() if algorithm == "sha256" else None
        self._crc = 0
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        self.size += memoryview(data).nbytes
        if self._sha is not None:
            self._sha.update(data)
        else:
            self._crc = zlib.crc32(data, self._crc)

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the bytes added so far."""
        text = f"sha256:{self._sha.hexdigest()}" if self._sha is not None else f"crc32:{self._crc:08x}"
        return FileRecord(self.size, text)


class ChecksumWriter(io.BufferedWriter):
    """A new file, written front to back; it updates a checksum with each write and syncs when it is closed."""

    def __init__(self, path: Path, algorithm: str) -> None:
        """Creates the file.

        Args:
            path: its name.
            algorithm: ``crc32`` or ``sha256``.

        Raises:
            FileExistsError: when the name exists; no file is ever overwritten.
        """
        super().__init__(io.FileIO(path, "xb"), _BLOCK_BYTES)
        self._checksum = Checksum(algorithm)

    def write(self, data: Any, /) -> int:
        """Writes bytes at the end."""
        self._checksum.update(data)
        return super().write(data)

    def seek(self, *_: object) -> int:
        """Refuses: the running checksum is only valid for bytes written in order."""
        raise io.UnsupportedOperation("checkpoint files are written front to back")

    def close(self) -> None:
        """Flushes, syncs and closes; the second call does nothing."""
        if not self.closed:
            try:
                self.flush()
                # A close without fsync may lose data in a power cut although every write succeeded.
                os.fsync(self.fileno())
            finally:
                super().close()

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the bytes written."""
        return self._checksum.record


def measure(path: Path, algorithm: str, *, cold: bool = False) -> FileRecord:
    """Reads a file and returns its size and checksum.

    Args:
        path: the file.
        algorithm: ``crc32`` or ``sha256``.
        cold: drop the file's (synced) pages from memory first, where the system can, so that the disk is read.

    Raises:
        OSError: when it can't be read.
    """
    checksum = Checksum(algorithm)
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as stream:
        # Verifying from the page cache would miss what the disk got wrong.
        if cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := stream.readinto(block):
            checksum.update(block[:count])
    return checksum.record


def find_damage(path: Path, expected: FileRecord, *, contents: bool = True, cold: bool = False) -> str | None:
    """Compares a file with its record; returns the fault as a sentence, or None.

    Args:
        path: the file.
        expected: its size and checksum when it was written.
        contents: whether to read it; false compares the size only.
        cold: read it from the disk, not from memory.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes instead of {expected.size}"
        algorithm = expected.checksum.partition(":")[0]
        if contents and (actual := measure(path, algorithm, cold=cold)) != expected:
            return f"{path.name} is damaged: its checksum is {actual.checksum} instead of {expected.checksum}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror or error}"
    return None


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that names created, renamed or removed in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a folder atomically: a kill midway never leaves an incomplete folder under its name.

    Raises:
        OSError: when it can't be removed.
    """
    doomed = folder.with_name(f".removed-{folder.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
    # Rename first: removal of many files isn't atomic, the rename is.
    os.rename(folder, doomed)
    shutil.rmtree(doomed)
