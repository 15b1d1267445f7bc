"""The lock of a run directory: one command trains there at a time, recorded in a file with a lease.

The file is numbered and created by linking a finished one to its name, which succeeds for one process alone, on network
file systems too. On its own host an owner is alive while its process is; on other hosts, while a small process beside
it renews the file. So a killed command can be restarted at once, and a dead host costs seconds.

In a run over several nodes each node's command locks its node number: a second command with the same number is refused,
while a lost node may come back. Multi-node commands and single-node commands exclude each other: each creates its own
file first and checks for the other kind then, so that of two at once at most one trains.
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

from meshwright.errors import ConfigError
from meshwright.forking import die_with_parent
from meshwright.records import parse_json

FOLDER = "owner"
LEASE_S = 10.0
"""An owner on another host that hasn't renewed its file for so long, by this host's clock, counts as dead."""
RENEW_S = 1.0
_NODE = "node-"
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The contents of the lock file."""

    host: str
    """Name of its host."""
    machine: str
    """The host's boot id and pid namespace: a container has its own namespace."""
    pid: int
    """The command's process id."""
    started: str
    """The process's start time in kernel ticks, because process ids are reused."""
    since: str
    """When it began to train, by its own clock."""
    node: int | None = None
    """Its node's number in a run over several; None for a run of one node."""

    @classmethod
    def myself(cls, node: int | None = None) -> Self:
        """Returns the owner that this process is."""
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        pid, machine = os.getpid(), _machine_id()
        return cls(
            host=socket.gethostname(), machine=machine, pid=pid, started=_start_time(pid), since=since, node=node
        )  # fmt: skip

    @property
    def lives(self) -> bool | None:
        """Whether its process is alive; None where this host can't know."""
        if self.machine != _machine_id():
            return None
        return bool(self.started) and _start_time(self.pid) == self.started


class RunLock:
    """Keeps other commands out of a run directory while this one trains there.

    Args:
        run_dir: made where it isn't there.
        wait_s: how long to wait for another command's end.
        node: this node's number in a run over several; None for a run of one node.

    Raises:
        ConfigError: naming who trains there, and since when.
    """

    def __init__(self, run_dir: Path, wait_s: float = 0.0, node: int | None = None) -> None:
        self._run_dir, self._folder, self._node = run_dir, run_dir / FOLDER, node
        self._prefix = "" if node is None else f"{_NODE}{node}-"
        self._number = self._helper = 0
        deadline = time.monotonic() + wait_s
        while not self._acquire_in_folder():
            owner = self._current_owner()
            if owner is not None and time.monotonic() >= deadline:
                raise self._refusal_error(owner)
            time.sleep(_POLL_S if owner is not None else 0.0)
        # Renew from now on: the check below may wait longer than a lease.
        self._helper = self._start_renewing()
        try:
            while (owner := self._owner_of_other_kind()) is not None:
                if time.monotonic() >= deadline:
                    raise self._refusal_error(owner)
                time.sleep(_POLL_S)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        """Returns the lock, which the block's end lets go of."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets other commands in."""
        os.kill(self._helper, signal.SIGKILL)
        os.waitpid(self._helper, 0)
        with contextlib.suppress(OSError):
            self._path(self._number).unlink()
            if self._node is None:
                (self._folder / "keeper").unlink(missing_ok=True)
            # Only an empty folder is removed: other nodes' files keep it.
            self._folder.rmdir()
            self._run_dir.rmdir()

    def _acquire_in_folder(self) -> bool:
        """Makes the folder, and returns whether the lock was free; refuses a directory that can't be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._try_acquire()
        except OSError as error:
            raise ConfigError(
                f"run = {self._run_dir}: it can't be written ({error.strerror}: {error.filename}); give another --run"
            ) from None

    def _refusal_error(self, owner: Owner) -> ConfigError:
        role = "" if owner.node is None else f" as node {owner.node} of several"
        return ConfigError(
            f"run = {self._run_dir}: process {owner.pid} on {owner.host} trains there{role} since {owner.since}, and "
            "two would remove each other's checkpoints; end it, give another --run, or wait for it with "
            "launch.owner_s = 3600"
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._prefix}{number:06d}"

    def _numbers(self) -> list[int]:
        """Returns the numbers of the lock files of this command's kind and node."""
        with contextlib.suppress(FileNotFoundError):
            names = [path.name.removeprefix(self._prefix) for path in self._folder.glob(f"{self._prefix}*")]
            return [int(name) for name in names if name.isdigit()]
        return []

    def _current_owner(self) -> Owner | None:
        """Returns the live owner of this command's kind and node; None without one."""
        return _living_owner([self._path(max(self._numbers(), default=0))])

    def _owner_of_other_kind(self) -> Owner | None:
        """Returns a live owner of the other kind: single-node for a multi-node command, and the reverse.

        Files of dead owners are removed; that is safe, because a new command creates a file of a higher number.
        """
        paths = [path for path in self._folder.iterdir() if path.name[-1:].isdigit()]
        other_paths = [path for path in paths if path.name.startswith(_NODE) == (self._node is None)]
        owner = _living_owner(other_paths)
        for path in other_paths if owner is None else ():
            path.unlink(missing_ok=True)
        return owner

    def _try_acquire(self) -> bool:
        """Creates the next number's file if nobody trains here; returns whether this process acquired the lock."""
        number = max(self._numbers(), default=0)
        if self._current_owner() is not None:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{uuid.uuid4().hex}"
        try:
            temporary.write_text(json.dumps(asdict(Owner.myself(self._node))), encoding="utf-8")
            # link fails if the number exists: of several commands one succeeds.
            os.link(temporary, self._path(number + 1))
        except (FileExistsError, FileNotFoundError):  # another command was faster, or has just removed the folder
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self._number = number + 1
        for older_number in self._numbers():
            if older_number <= number:
                self._path(older_number).unlink(missing_ok=True)
        return True

    def _start_renewing(self) -> int:
        """Starts the process that renews the file while this one lives; returns its process id."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, also of OpenBLAS's; this process computes nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._renew_forever(parent)
        return pid

    def _renew_forever(self, parent: int) -> NoReturn:
        """Renews the file, and kills the run when another command took it over; runs in the forked process."""
        try:
            die_with_parent(parent)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                with contextlib.suppress(OSError):
                    os.utime(self._path(self._number))
                if self._path(self._number + 1).exists():
                    os.write(2, f"{self._run_dir} was taken over by another command; this one ends\n".encode())
                    # SIGKILL, since both commands would write the same checkpoints by now.
                    os.kill(parent, signal.SIGKILL)
                time.sleep(RENEW_S)
        finally:
            os._exit(0)


def has_locks(run_dir: Path) -> bool:
    """Returns whether a command has locked a run directory and not let go of it, as one that is killed never does."""
    return any(path.name[-1:].isdigit() for path in (run_dir / FOLDER).glob("*"))


def lock_stamps(run_dir: Path) -> dict[int, int]:
    """Returns a stamp by node of a run over several, which changes while the command that holds the lock lives."""
    stamps: dict[int, int] = {}
    for path in (run_dir / FOLDER).glob(f"{_NODE}*"):
        node, _, number = path.name.removeprefix(_NODE).partition("-")
        if node.isdigit() and number.isdigit():
            stamps[int(node)] = max(stamps.get(int(node), 0), _change_time_ns(path))
    return stamps


def living_owners(run_dir: Path) -> list[Owner]:
    """Returns who trains in a run directory; waits some seconds where an owner is on another host."""
    paths = [path for path in (run_dir / FOLDER).glob("*") if path.name[-1:].isdigit()]
    return [owner for path in sorted(paths) if (owner := _living_owner([path])) is not None]


def _living_owner(paths: Iterable[Path]) -> Owner | None:
    """Returns a live owner among those of some files; None when none lives.

    Owners on other hosts are watched for a whole lease: a changed stamp proves life without comparing clocks.
    """
    stamps: dict[Path, tuple[Owner, int]] = {}
    for path in paths:
        try:
            owner = Owner(**parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if owner.lives:
            return owner
        if owner.lives is None and (stamp := _change_time_ns(path)):
            stamps[path] = (owner, stamp)
    deadline = time.monotonic() + LEASE_S
    while stamps and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for path, (owner, first_stamp) in list(stamps.items()):
            stamp = _change_time_ns(path)
            if not stamp:
                del stamps[path]  # it has let go
            elif stamp != first_stamp:
                return owner
    return None


def _change_time_ns(path: Path) -> int:
    # Opened instead of stat'ed: an open makes NFS revalidate its cached attributes with the server.
    with contextlib.suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0


def _machine_id() -> str:
    """Returns an identifier of the host's boot and pid namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_time(pid: int) -> str:
    """Returns when a process was started, in the kernel's ticks; empty when it isn't there or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
