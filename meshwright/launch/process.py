"""One rank's process as its launcher sees it: the pipe that its outcome comes through, its end, and signals to it."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

from meshwright.launch.failure import RankFailure, describe_status


class RankProcess:
    """One forked process, as the launcher sees it."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        """Takes over a process that has just been forked.

        Args:
            rank: global rank.
            pid: its process id, which is its process group's too.
            pipe: non-blocking read end of the pipe that its outcome comes through.
        """
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.buffer = bytearray()
        self.outcome: tuple[bool, Any] | None = None
        self.reported_at = 0.0
        self.status: int | None = None
        self.open = True

    def read(self) -> None:
        """Takes what the pipe holds; an empty read means that the rank closed it."""
        try:
            chunk = os.read(self.pipe, 1 << 20)
        except BlockingIOError:
            return
        self.buffer += chunk
        if not chunk:
            self.close()
        if self.outcome is None and len(self.buffer) >= 8:
            size = int.from_bytes(self.buffer[:8], "little")
            if len(self.buffer) >= 8 + size:
                self.outcome = self._unpack(bytes(self.buffer[8 : 8 + size]))
                self.reported_at = time.monotonic()
                self.buffer.clear()

    def _unpack(self, data: bytes) -> tuple[bool, Any]:
        try:
            good, content = pickle.loads(data)
        except Exception as error:
            summary = f"sent a result that the launcher can't read: {type(error).__name__}: {error}"
            return False, RankFailure(self.rank, summary, time=time.monotonic())
        return good, content

    def close(self) -> None:
        """Closes the launcher's end of the pipe."""
        if self.open:
            self.open = False
            os.close(self.pipe)

    def reap(self) -> bool:
        """Returns True once the process has ended, and clears away what it left in its process group."""
        if self.status is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            # Before the process is reaped, so that its group's number can't belong to somebody else.
            self.signal(signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._drain()
        return True

    def _drain(self) -> None:
        """Takes what is left in the pipe; a process that the rank started may still hold the other end."""
        while self.open:
            before = len(self.buffer)
            self.read()
            if self.open and len(self.buffer) == before:
                self.close()

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and to the processes that it started."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            if self.status is None:
                self._signal_alone(number)

    def _signal_alone(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def failure(self) -> RankFailure | None:
        """Returns how the rank failed, or None when it works on or is done."""
        if self.outcome is not None:
            good, content = self.outcome
            return None if good else content
        if self.status is not None:
            return describe_status(self.rank, self.status, time.monotonic())
        return None
