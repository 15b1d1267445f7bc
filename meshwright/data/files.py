"""Atomic files: written under a temporary name, synced, renamed; a full disk becomes a message with its cure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from meshwright.errors import FAILED, DataError
from meshwright.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Turns "no space left" into a `DataError` with its cure; other errors pass.

    Args:
        directory: that the block writes to.

    Raises:
        DataError: when the disk or the quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # Measured now, for the message; the quota may be smaller than the disk.
        free = shutil.disk_usage(directory).free if directory.exists() else 0
        disk_error = DataError(
            f"disk full while writing under {directory} ({format_bytes(free)} free); prepared text takes about three "
            "times the bytes of the text while it is being made. Free some space or set data.cache to another disk, "
            "and run the same command again: finished parts are kept"
        )
        disk_error.exit_status = FAILED  # nothing was wrong with what was asked for
        raise disk_error from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that gets its name only when the block has ended without an error.

    Args:
        path: final name; the bytes go to ``<name>.tmp<pid>`` beside it.

    Raises:
        DataError: when the disk is full; the temporary file is removed then.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with full_disk(path.parent):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                # Contents before the name: a crash between the two must not leave an empty file under it.
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settle(temporary: Path, path: Path) -> None:
    """Renames a finished directory to its final name and syncs its parent, so that it survives a power cut."""
    os.rename(temporary, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def lone_writer(path: Path, wait_s: float) -> Iterator[None]:
    """Holds a lock file, so that two commands never prepare the same set at once; the system frees a dead holder's.

    Args:
        path: lock file.
        wait_s: how long to wait for another holder, seconds.

    Raises:
        DataError: when another process held the lock all that time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise DataError(f"cannot write under {path.parent}: {error.strerror}; set data.cache to a directory") from None
    deadline = time.monotonic() + wait_s
    with open(path, "wb") as file:
        while True:
            try:
                # flock belongs to the open file: the kernel drops it when its process dies.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process has been preparing {path.name.removesuffix('.lock')} for more than "
                        f"{wait_s:.0f} s (lock {path}); wait for it, or end it and run again"
                    ) from None
                time.sleep(0.1)
        yield
