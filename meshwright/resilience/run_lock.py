"""Who trains in a run directory: one command at a time, which a file says, with a lease that other hosts can read.

The file has a number and is made by linking a finished one to its name, which succeeds for one process alone, on
network file systems too. On its own host an owner is alive as long as its process is; elsewhere as long as a small
process beside it renews the file, so that a killed command can be typed again at once and a dead host costs seconds.

Of a run over several nodes each node's command owns its own number of node: a second one with the same number is
refused, while a node that was lost may come back. Such nodes and a command of one node exclude each other: each makes
its own file first, and looks for those of the other kind then, so that of two at once never both train.
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

FOLDER = "owner"
LEASE_S = 10.0
"""An owner on another host that hasn't renewed its file for so long, by this host's clock, is taken for dead."""
RENEW_S = 1.0
_NODE = "node-"
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
    node: int | None = None
    """Its node's number in a run over several; None for a run of one node."""

    @classmethod
    def myself(cls, node: int | None = None) -> Self:
        """Returns the owner that this process is."""
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        pid, machine = os.getpid(), _machine()
        return cls(
            host=socket.gethostname(), machine=machine, pid=pid, started=_started(pid), since=since, node=node
        )  # fmt: skip

    @property
    def lives(self) -> bool | None:
        """Whether its process does; None where that can't be seen from this host."""
        if self.machine != _machine():
            return None
        return bool(self.started) and _started(self.pid) == self.started


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
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = self._helper = 0
        end = time.monotonic() + wait_s
        while not self._taken():
            owner = self._held()
            if owner is not None and time.monotonic() >= end:
                raise self._refusal(owner)
            time.sleep(_POLL_S if owner is not None else 0.0)
        self._helper = self._renewing()
        try:
            while (owner := self._other_kind()) is not None:
                if time.monotonic() >= end:
                    raise self._refusal(owner)
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
            self._folder.rmdir()
            self._run_dir.rmdir()

    def _refusal(self, owner: Owner) -> ConfigError:
        place = "" if owner.node is None else f" as node {owner.node} of several"
        return ConfigError(
            f"run = {self._run_dir}: process {owner.pid} on {owner.host} trains there{place} since {owner.since}, and "
            "two would remove each other's checkpoints; end it, give another --run, or wait for it with "
            "launch.owner_s = 3600"
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._prefix}{number:06d}"

    def _numbers(self) -> list[int]:
        """Returns the numbers of this command's kind and node that there are."""
        with contextlib.suppress(FileNotFoundError):
            names = [path.name.removeprefix(self._prefix) for path in self._folder.glob(f"{self._prefix}*")]
            return [int(name) for name in names if name.isdigit()]
        return []

    def _held(self) -> Owner | None:
        """Returns the owner that trains here in this command's place; None when nobody does."""
        return _living([self._path(max(self._numbers(), default=0))])

    def _other_kind(self) -> Owner | None:
        """Returns an owner that trains here as one node, where this command is one of several, or the reverse.

        What dead ones of these left is removed: who comes now makes a file of a higher number.
        """
        paths = [path for path in self._folder.iterdir() if path.name[-1:].isdigit()]
        others = [path for path in paths if path.name.startswith(_NODE) == (self._node is None)]
        owner = _living(others)
        for path in others if owner is None else ():
            path.unlink(missing_ok=True)
        return owner

    def _taken(self) -> bool:
        """Makes the next number's file when nobody trains here; returns whether it was this process that did."""
        number = max(self._numbers(), default=0)
        if self._held() is not None:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = self._folder / f".{uuid.uuid4().hex}"
        try:
            beside.write_text(json.dumps(asdict(Owner.myself(self._node))), encoding="utf-8")
            os.link(beside, self._path(number + 1))
        except (FileExistsError, FileNotFoundError):  # another was faster, or has just let go of the folder
            return False
        finally:
            beside.unlink(missing_ok=True)
        self._number = number + 1
        for before in self._numbers():
            if before <= number:
                self._path(before).unlink(missing_ok=True)
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


def _living(paths: Iterable[Path]) -> Owner | None:
    """Returns the owner of one of some files that lives; None when none does.

    Those of other hosts are looked at together, for as long as a lease: what clocks say differs.
    """
    stamps: dict[Path, tuple[Owner, int]] = {}
    for path in paths:
        try:
            owner = Owner(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if owner.lives:
            return owner
        if owner.lives is None and (stamp := _stamp(path)):
            stamps[path] = (owner, stamp)
    end = time.monotonic() + LEASE_S
    while stamps and time.monotonic() < end:
        time.sleep(_POLL_S)
        for path, (owner, first) in list(stamps.items()):
            stamp = _stamp(path)
            if not stamp:
                del stamps[path]  # it has let go
            elif stamp != first:
                return owner
    return None


def _stamp(path: Path) -> int:
    # Opened, not looked up: a network file system then asks its server.
    with contextlib.suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0


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
