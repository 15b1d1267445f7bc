"""A process that a supervisor forks for work beside the ranks, and that may answer once, at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from meshwright.errors import LaunchError
from meshwright.forking import die_with_parent


class Helper:
    """A forked process that works for a supervisor, and dies with it.

    Args:
        work: runs in the forked process; returns its answer, None without one.
        nice: how much the process stands back behind the ranks on the same cores.

    Raises:
        LaunchError: when this process can't fork; nothing stays open then.
    """

    def __init__(self, work: Callable[[], bytes | None], nice: int = 0) -> None:
        parent, self._received = os.getpid(), bytearray()
        descriptors: tuple[int, ...] = ()
        try:
            descriptors = self._pipe, answer_fd = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                _work_in_child(work, nice, answer_fd, parent)
            os.set_blocking(self._pipe, False)
            descriptors = (answer_fd,)
        except OSError as error:
            raise LaunchError(f"a process beside the ranks can't be started: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        if self.pid:
            self._read()
        return not self.pid

    @property
    def answer(self) -> bytes:
        """What it answered, once it has `has_ended`; empty when it was killed, or had nothing to say."""
        return bytes(self._received)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._pipe, 1 << 20)
            except BlockingIOError:
                return
            self._received += chunk
            if not chunk:
                # End of file: the process exited or was killed.
                self._reap()
                return

    def _reap(self) -> None:
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def close(self) -> None:
        """Kills it; a second call does nothing."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()


def _work_in_child(work: Callable[[], bytes | None], nice: int, answer_fd: int, parent: int) -> None:
    """Works, answers and exits: the process must never return into the supervisor's code."""
    try:
        # Its own process group: Ctrl-C in the terminal reaches the supervisor alone.
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A scheduler sends SIGTERM to all of a node's processes: the supervisor answers, and kills this one at the end.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.nice(nice)
        # The pipe may be smaller than the answer: write until all is taken.
        answer = memoryview(work() or b"")
        while answer:
            answer = answer[os.write(answer_fd, answer) :]
    finally:
        os._exit(0)
