"""A file that is appended to and outlives a disk that is full for a while: what doesn't fit waits in memory."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

LIMIT_BYTES = 8 << 20
"""What waits in memory at most: hours of a run's metrics."""
PAUSE_S = 0.25
"""Between two tries."""
LAST_S = 5.0
"""How long the last try of all goes on, when the file is closed."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EFBIG, errno.EROFS, errno.ENOLINK)
"""Errors of a disk that may be over in a moment; others say that the file can never be written."""


class RetryingFile:
    """Appends chunks whole and in order; none raises for a disk that is full.

    Args:
        path: of the file, made where it isn't there.
        shared: whether other processes append lines to it too. What was cut short is taken back; where another process
            has appended to it meanwhile, the line is ended instead. A line that another process is writing as the file
            is opened looks cut short too: the end leaves an empty line, which readers of lines pass over.

    Raises:
        OSError: when the file can't be opened for another reason than a full or failing disk.
    """

    def __init__(self, path: Path, shared: bool) -> None:
        self.path, self._shared = path, shared
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._next = 0.0
        self._since: float | None = None
        self._torn = False
        self._fd = -1
        self.dropped = 0
        """Chunks that didn't fit into memory either."""
        self.error = ""
        """What was wrong last."""
        self._open()

    def write(self, data: bytes) -> float | None:
        """Appends a chunk, now or later.

        Returns:
            For how many seconds nothing could be written, when that is over now; else None.
        """
        if self._bytes + len(data) > LIMIT_BYTES:
            self.dropped += 1
        else:
            self._waiting.append(data)
            self._bytes += len(data)
        if self._since is not None and time.monotonic() < self._next:
            return None
        return self._flush()

    def close(self) -> int:
        """Writes what waits, tries that for `LAST_S` seconds, and closes; returns the chunks that are lost."""
        end = time.monotonic() + LAST_S
        self._flush()
        while self._waiting and time.monotonic() < end:
            time.sleep(PAUSE_S)
            self._flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        lost, self._bytes = self.dropped + len(self._waiting), 0
        self._waiting.clear()
        self.dropped = 0
        return lost

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            self._torn = self._shared and size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as error:
            self._failed(error)

    def _flush(self) -> float | None:
        if self._fd < 0:
            self._open()
        while self._waiting and self._fd >= 0:
            chunk = self._waiting[0]
            try:
                self._append(b"\n" + chunk if self._torn else chunk)
            except OSError as error:
                self._failed(error)
                return None
            self._torn = False
            self._bytes -= len(self._waiting.popleft())
        if self._fd < 0 or self._since is None:
            return None
        since, self._since = self._since, None
        return time.monotonic() - since

    def _append(self, chunk: bytes) -> None:
        written = os.write(self._fd, chunk)
        if written == len(chunk):
            return
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        self._torn = self._shared and os.fstat(self._fd).st_size != end
        if not self._torn:
            os.ftruncate(self._fd, end - written)
        raise OSError(errno.ENOSPC, f"{written} of {len(chunk)} bytes fitted on the disk")

    def _failed(self, error: OSError) -> None:
        """Takes note of a failure.

        Raises:
            OSError: when waiting can't mend it.
        """
        if error.errno not in _PASSING:
            raise error
        self.error = error.strerror or str(error)
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._next = now + PAUSE_S
