"""The keeper: a small process that outlives a killed supervisor, and writes the newest state in memory to disk.

The ranks' segments vanish with the last process that holds them. The keeper holds them beside the supervisor, computes
nothing and wakes once a second. When the supervisor and all its ranks are gone, it writes one checkpoint if memory is
newer than the disk, and exits; a time limit bounds that. A supervisor that ends in order kills it. The same command,
started again, waits for it by a file lock that the kernel releases when the keeper exits.
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
"""Time after the supervisor's end within which its ranks, killed by the kernel with it, disappear."""
_POLL_S = 1.0


class Keeper:
    """Waits in a forked process for the supervisor's end.

    Args:
        run_dir: of the run.
        save: writes the newest state to disk; called once this process and all that it forks later are gone.
        limit_s: after which ``save`` is ended.

    Raises:
        LaunchError: when this process can't fork; nothing stays open then.
    """

    def __init__(self, run_dir: Path, save: Callable[[], None], limit_s: float) -> None:
        parent, path = os.getpid(), run_dir / OWNER / LOCK
        # Otherwise the child inherits buffered output, and may write it again.
        sys.stdout.flush()
        sys.stderr.flush()
        descriptors: tuple[int, ...] = ()
        try:
            descriptors = end_fd, self._lifetime_fd = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    os.close(self._lifetime_fd)
                    _keep_until_orphaned(parent, end_fd, path, save, limit_s)
                finally:
                    os._exit(0)
            descriptors = (end_fd,)
        except OSError as error:
            raise LaunchError(f"the process that keeps the state can't be started: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Kills it without saving; a second call does nothing."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._lifetime_fd)
            self.pid = 0


def _keep_until_orphaned(parent: int, end_fd: int, path: Path, save: Callable[[], None], limit_s: float) -> None:
    """Waits for the supervisor's end and saves; runs in the forked process."""
    os.setpgid(0, 0)
    # Polite signals to the whole session are handled by the supervisor, which then kills this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null_fd, descriptor)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Held until this process exits, however it ends: the next command waits on it.
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: the next command couldn't wait for what is written here
        return
    orphaned_at: float | None = None
    # The pipe's write end is inherited by every rank: it reads as closed once the last of them is gone.
    while not select.select([end_fd], [], [], _POLL_S)[0]:
        if orphaned_at is None and os.getppid() != parent:
            orphaned_at = time.monotonic()
        if orphaned_at is not None and time.monotonic() - orphaned_at > GONE_S:
            break
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # SIGALRM's default kills a save that hangs, which releases the lock.
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    save()


def await_keeper(run_dir: Path, limit_s: float, announce: Callable[[str], None]) -> None:
    """Waits until the keeper of a killed command has written its state.

    Args:
        run_dir: of the run, which nobody trains in.
        limit_s: for which it may write.
        announce: called once with a sentence when there is a keeper to wait for.

    Raises:
        LaunchError: when it is still there after its limit, which the kernel should have held it to.
    """
    path, deadline, announced = run_dir / OWNER / LOCK, time.monotonic() + limit_s + GONE_S + 2 * _POLL_S, False
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        while True:
            try:
                # Non-blocking, so that the wait has a limit and can be announced.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    announce(f"{run_dir}: waiting for the state that a killed command left in memory to be written")
                announced = True
            except OSError:
                break
            if time.monotonic() > deadline:
                raise LaunchError(f"{path} is still locked by the keeper of a killed command; end that process")
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            path.unlink()
    finally:
        os.close(lock)
