"""The keeper: a small process that outlives a killed supervisor, and writes the newest state in memory to disk.

The segments that ranks leave their state in go with the last process that holds them. The keeper holds them beside the
supervisor, computes nothing and wakes once a second; when the supervisor and all its ranks are gone it writes one
checkpoint, where memory is newer than the disk, and ends. It is ended with the supervisor otherwise, and by its own
limit at the latest. The same command, typed again, waits for it by a lock that the kernel lets go of when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.resilience.run_lock import FOLDER as OWNER

LOCK = "keeper"
"""The lock's file, in the folder of the run's owner."""
GONE_S = 10.0
"""For so long after the supervisor's end its ranks, which the kernel kills with it, may still be seen."""
_POLL_S = 1.0


class Keeper:
    """Waits in a process of its own for the supervisor's end.

    Args:
        run_dir: of the run.
        save: writes the newest state to disk; called once this process and all that it forks later have gone.
        limit_s: after which ``save`` is ended.
    """

    def __init__(self, run_dir: Path, save: Callable[[], None], limit_s: float) -> None:
        parent, path = os.getpid(), run_dir / OWNER / LOCK
        ended, self._alive = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._alive)
                _keep(parent, ended, path, save, limit_s)
            finally:
                os._exit(0)
        os.close(ended)

    def close(self) -> None:
        """Ends it, with nothing written; a second call does nothing."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._alive)
            self.pid = 0


def _keep(parent: int, ended: int, path: Path, save: Callable[[], None], limit_s: float) -> None:
    """Waits, saves and returns; in the forked process."""
    os.setpgid(0, 0)
    # Who ends the whole session politely is heard by the supervisor, which ends this process itself.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: the next command couldn't wait for what is written here
        return
    orphaned_at: float | None = None
    # The other end is held by the supervisor and by every rank: its end is the end of the last of them.
    while not select.select([ended], [], [], _POLL_S)[0]:
        if orphaned_at is None and os.getppid() != parent:
            orphaned_at = time.monotonic()
        if orphaned_at is not None and time.monotonic() - orphaned_at > GONE_S:
            break
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    save()


def await_keeper(run_dir: Path, limit_s: float, tell: Callable[[str], None]) -> None:
    """Waits until the keeper of a command that was killed has written what it holds.

    Args:
        run_dir: of the run, which nobody trains in.
        limit_s: for which it may write.
        tell: told once when there is something to wait for.

    Raises:
        LaunchError: when it is still there after its limit, which the kernel should have held it to.
    """
    path, end, told = run_dir / OWNER / LOCK, time.monotonic() + limit_s + GONE_S + 2 * _POLL_S, False
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    tell(f"{run_dir}: waiting for the state that a killed command left in memory to be written")
                told = True
            except OSError:
                break
            if time.monotonic() > end:
                raise LaunchError(f"{path} is still locked by the keeper of a killed command; end that process")
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            path.unlink()
    finally:
        os.close(lock)
