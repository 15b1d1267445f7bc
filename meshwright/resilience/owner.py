"""Who trains in a run directory: one command at a time, which a file says, with a lease that other hosts can read.

The file has a number and is made by linking a finished one to its name, which succeeds for one process alone, on
network file systems too. On its own host an owner is alive as long as its process is; elsewhere as long as a small
process beside it renews the file, so that a killed command can be typed again at once and a dead host costs seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import time
import uuid
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

from meshwright.errors import ConfigError
from meshwright.forking import die_with_parent

FOLDER = "owner"
LEASE_S = 10.0
"""An owner on another host that hasn't renewed its file for so long, by this host's clock, is taken for dead."""
RENEW_S = 1.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What the file says."""

    host: str
    """Name of its host."""
    machine: str
    """The host's boot, and its space of process ids: a container has its own."""
    pid: int
    """The command's process."""
    started: str
    """When the kernel started it: ids are used again."""
    since: str
    """When it began to train, as its own clock has it."""

    @classmethod
    def myself(cls) -> Self:
        """Returns the owner that this process is."""
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(host=socket.gethostname(), machine=_machine(), pid=pid, started=_started(pid), since=since)


class RunLock:
    """Keeps other commands out of a run directory while this one trains there.

    Args:
        run_dir: made where it isn't there.
        wait_s: how long to wait for another command's end.

    Raises:
        ConfigError: naming who trains there, and since when.
    """

    def __init__(self, run_dir: Path, wait_s: float = 0.0) -> None:
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = self._helper = 0
        end = time.monotonic() + wait_s
        while not self._taken():
            held = self._held()
            if held is not None and time.monotonic() >= end:
                owner = held[1]
                raise ConfigError(
                    f"run = {run_dir}: process {owner.pid} on {owner.host} trains there since {owner.since}, and two "
                    "would remove each other's checkpoints; end it, give another --run, or wait for it with "
                    "launch.owner_s = 3600"
                )
            time.sleep(_POLL_S if held is not None else 0.0)
        self._helper = self._renewing()

    def __enter__(self) -> Self:
        """Returns the lock, which the block's end lets go of."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets other commands in."""
        os.kill(self._helper, signal.SIGKILL)
        os.waitpid(self._helper, 0)
        with contextlib.suppress(OSError):
            self._path(self._number).unlink()
            self._folder.rmdir()
            self._run_dir.rmdir()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"

    def _newest(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return max((int(path.name) for path in self._folder.iterdir() if path.name.isdigit()), default=0)
        return 0

    def _held(self) -> tuple[int, Owner] | None:
        """Returns the number and the owner that trains here; None when nobody does."""
        number = self._newest()
        try:
            owner = Owner(**json.loads(self._path(number).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if owner.machine == _machine():
            return (number, owner) if owner.started and _started(owner.pid) == owner.started else None
        return (number, owner) if self._renewed(number) else None

    def _renewed(self, number: int) -> bool:
        """Whether another host renews its file: looked at for as long as its lease, since clocks differ."""
        first, end = self._stamp(number), time.monotonic() + LEASE_S
        while first and time.monotonic() < end:
            time.sleep(_POLL_S)
            if self._stamp(number) != first:
                return True
        return False

    def _stamp(self, number: int) -> int:
        # Opened, not looked up: a network file system then asks its server.
        with contextlib.suppress(OSError), self._path(number).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _taken(self) -> bool:
        """Makes the next number's file when nobody trains here; returns whether it was this process that did."""
        number = self._newest()
        if self._held() is not None:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = self._folder / f".{uuid.uuid4().hex}"
        try:
            beside.write_text(json.dumps(asdict(Owner.myself())), encoding="utf-8")
            os.link(beside, self._path(number + 1))
        except (FileExistsError, FileNotFoundError):  # another was faster, or has just let go of the folder
            return False
        finally:
            beside.unlink(missing_ok=True)
        self._number = number + 1
        for path in self._folder.iterdir():
            if path.name.isdigit() and int(path.name) <= number:
                path.unlink(missing_ok=True)
        return True

    def _renewing(self) -> int:
        """Starts the process that renews the file while this one lives; returns its id."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, also of OpenBLAS's; this process computes nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._renew(parent)
        return pid

    def _renew(self, parent: int) -> NoReturn:
        """Renews the file; ends the run when another command has taken it over meanwhile. In the forked process."""
        try:
            die_with_parent(parent)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                with contextlib.suppress(OSError):
                    os.utime(self._path(self._number))
                if self._path(self._number + 1).exists():
                    os.write(2, f"{self._run_dir} was taken over by another command; this one ends\n".encode())
                    os.kill(parent, signal.SIGKILL)
                time.sleep(RENEW_S)
        finally:
            os._exit(0)


def _machine() -> str:
    """Returns what tells boots and process-id spaces of hosts apart."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _started(pid: int) -> str:
    """Returns when a process was started, in the kernel's ticks; empty when it isn't there or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
