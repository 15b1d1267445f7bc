"""A rank's process from the launcher's side: the pipe of its outcome, its exit status, and signals to it."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

from meshwright.launch.failure import RankFailure, describe_status


class RankProcess:
    """The launcher's handle of a forked rank."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        """Takes over a process that has just been forked.

        Args:
            rank: global rank.
            pid: its process id, which is its process group's too.
            pipe: non-blocking read end of its outcome's pipe.
        """
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.buffer = bytearray()
        self.outcome: tuple[bool, Any] | None = None
        self.reported_at = 0.0
        self.status: int | None = None
        self.open = True

    def read(self) -> None:
        """Reads the available bytes of the outcome; closes the pipe when the rank has closed its end."""
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
        # A result may pickle in the rank and still fail to unpickle here.
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
        """Returns whether the process has ended; then kills what remains of its process group."""
        if self.status is None:
            # WNOWAIT: see the end without reaping, which would free the process and group id.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            # Signalled before the process is reaped: afterwards its process group id could be reused.
            self.signal(signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._drain()
        return True

    def _drain(self) -> None:
        """Reads the pipe's remaining bytes without waiting: a child of the rank may still hold its write end."""
        while self.open:
            previous_size = len(self.buffer)
            self.read()
            if self.open and len(self.buffer) == previous_size:
                self.close()

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and to the processes that it started."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            if self.status is None:
                self.signal_alone(number)

    def signal_alone(self, number: int) -> None:
        """Sends a signal to the rank and to none of the processes that it started, such as compilers."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def failure(self) -> RankFailure | None:
        """Returns the rank's failure; None while it runs or after it succeeded."""
        if self.outcome is not None:
            good, content = self.outcome
            return None if good else content
        if self.status is not None:
            return describe_status(self.rank, self.status, time.monotonic())
        return None
