"""A file for appending that survives a temporarily full disk: chunks that don't fit wait in memory."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

LIMIT_BYTES = 8 << 20
"""Most bytes that wait in memory: hours of a run's metrics."""
PAUSE_S = 0.25
"""Seconds between two attempts."""
LAST_S = 5.0
"""Seconds of attempts when the file is closed."""
_TRANSIENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EFBIG, errno.EROFS, errno.ENOLINK)
"""Errors of a disk that may end by themselves; any other means that the file can never be written."""


class RetryingFile:
    """Appends chunks completely and in order; a full disk raises no error.

    Args:
        path: of the file, which is created where it is missing.
        shared: whether other processes append lines to it too. A chunk written in part is truncated away; where another
            process has appended behind it meanwhile, the torn line is terminated instead. A line that another process
            is writing while the file is opened looks torn too: the extra newline makes an empty line, which readers
            skip.

    Raises:
        OSError: when the file can't be opened for another reason than a full or failing disk.
    """

    def __init__(self, path: Path, shared: bool) -> None:
        self.path, self._shared = path, shared
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._next_attempt = 0.0
        self._failing_since: float | None = None
        self._has_torn_line = False
        self._fd = -1
        self.dropped = 0
        """Chunks that were dropped because the buffer was full."""
        self.error = ""
        """Text of the last failure."""
        self._open()

    def write(self, data: bytes) -> float | None:
        """Appends a chunk, now or later.

        Returns:
            Duration in seconds of a disk failure that ended with this call; else None.
        """
        # A full buffer drops new chunks, not old ones: the file has no gap in the middle.
        if self._pending_bytes + len(data) > LIMIT_BYTES:
            self.dropped += 1
        else:
            self._pending.append(data)
            self._pending_bytes += len(data)
        # While the disk fails, an attempt a step would cost more than the step.
        if self._failing_since is not None and time.monotonic() < self._next_attempt:
            return None
        return self._flush()

    def close(self) -> int:
        """Writes pending chunks, with attempts for `LAST_S` seconds, and closes; returns the number of lost chunks."""
        deadline = time.monotonic() + LAST_S
        self._flush()
        while self._pending and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
            self._flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        lost_count, self._pending_bytes = self.dropped + len(self._pending), 0
        self._pending.clear()
        self.dropped = 0
        return lost_count

    def _open(self) -> None:
        """Opens the file for appending, and notes a line that a kill has torn."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            # A file that doesn't end with a newline has a line torn by a kill.
            self._has_torn_line = self._shared and size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as error:
            self._record_failure(error)

    def _flush(self) -> float | None:
        """Writes pending chunks; returns the duration of a disk failure that ended now, else None."""
        if self._fd < 0:
            self._open()
        while self._pending and self._fd >= 0:
            # Removed from the queue only after it was written completely.
            chunk = self._pending[0]
            try:
                self._append(b"\n" + chunk if self._has_torn_line else chunk)
            except OSError as error:
                self._record_failure(error)
                return None
            self._has_torn_line = False
            self._pending_bytes -= len(self._pending.popleft())
        if self._fd < 0 or self._failing_since is None:
            return None
        since, self._failing_since = self._failing_since, None
        return time.monotonic() - since

    def _append(self, chunk: bytes) -> None:
        """Writes one chunk, or truncates the file to its end before the chunk and raises."""
        written = os.write(self._fd, chunk)
        if written == len(chunk):
            return
        # In append mode the offset lies behind our bytes; a larger file means that another process wrote behind them.
        end_offset = os.lseek(self._fd, 0, os.SEEK_CUR)
        self._has_torn_line = self._shared and os.fstat(self._fd).st_size != end_offset
        if not self._has_torn_line:
            os.ftruncate(self._fd, end_offset - written)
        raise OSError(errno.ENOSPC, f"{written} of {len(chunk)} bytes fitted on the disk")

    def _record_failure(self, error: OSError) -> None:
        """Records a failure and schedules the next attempt.

        Raises:
            OSError: when it isn't transient.
        """
        if error.errno not in _TRANSIENT_ERRORS:
            raise error
        self.error = error.strerror or str(error)
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._next_attempt = now + PAUSE_S
