"""The check ``file system``: the run directory has what recovery relies on, tried by recovery's own functions."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.files import ChecksumWriter, remove, sync_folder
from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.doctor.time_limit import call_with_limit
from meshwright.resilience.claims import Claim, Claims

_LOCK_S = 5.0
_STAMP_S = 3.0
"""Time for a renewed file to show another change time; file systems count in ticks of up to 2 s (FAT)."""


def examine(subject: Subject) -> Observation:
    """Tries each operation in a folder of its own below the run directory."""
    folder, findings = subject.scratch, []
    try:
        folder.mkdir()
    except OSError as error:
        return Observation(
            value="can't be written",
            findings=(f"{subject.folder} can't be written: {error.strerror}; give another --run",),
        )
    try:
        for name, (attempt, consequence) in _OPERATIONS.items():
            try:
                fault = attempt(folder)
            except OSError as error:
                fault = str(error.strerror or error)
            if fault:
                findings.append(
                    f"{subject.folder}: {name} doesn't work ({fault}), {consequence}; put the run on a local disk, "
                    "NFS 4 or another POSIX file system"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = len(_OPERATIONS) - len(findings)
    return Observation(value=f"{good} of {len(_OPERATIONS)} operations work", findings=tuple(findings))


def _hard_link(folder: Path) -> str:
    """Claims a generation twice: the first succeeds, and the second doesn't."""
    claims = Claims(folder)
    claim = Claim(generation=0, node=0, session="doctor", host="", port=0)
    if not claims.try_claim(claim):
        return "the first of two claims failed"
    return "two claims of one name both succeeded" if claims.try_claim(claim) else ""


def _atomic_rename(folder: Path) -> str:
    """Replaces a file as `jobs/run_directory.py` does, and a folder as a checkpoint gets its name."""
    old, new = folder / "plan", folder / ".plan.new"
    old.write_text("old", encoding="utf-8")
    new.write_text("new", encoding="utf-8")
    new.replace(old)
    if old.read_text(encoding="utf-8") != "new" or new.exists():
        return "a replaced file keeps its old contents"
    (folder / "step.new").mkdir()
    (folder / "step.new" / "weights").write_bytes(b"1")
    os.rename(folder / "step.new", folder / "step")
    if not (folder / "step" / "weights").is_file():
        return "a renamed folder lost its files"
    remove(folder / "step")
    return ""


def _sync(folder: Path) -> str:
    """Syncs a file and its folder as checkpoints do."""
    with ChecksumWriter(folder / "synced", "crc32") as file:
        file.write(b"1")
    sync_folder(folder)
    return ""


def _lock(folder: Path) -> str:
    """Locks a file, finds it locked from another process, and free once its holder is dead."""
    path = folder / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if call_with_limit(lambda: _try_lock(path), _LOCK_S).value is not False:
            return "two processes hold one lock"
    return "" if call_with_limit(lambda: _try_lock(path), _LOCK_S).value is True else "a lock outlives its holder"


def _try_lock(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _change_time(folder: Path) -> str:
    """Renews a file as a leader its lease, until the change shows."""
    path = folder / "lease"
    path.touch()
    first, deadline_s = path.stat().st_mtime_ns, time.monotonic() + _STAMP_S
    while time.monotonic() < deadline_s:
        os.utime(path)
        if path.stat().st_mtime_ns != first:
            return ""
        time.sleep(0.01)
    return "a touched file keeps its change time"


_OPERATIONS: dict[str, tuple[Callable[[Path], str], str]] = {
    "a hard link": (_hard_link, "by which one command alone gets the lock of a run and one node leads"),
    "an atomic rename": (_atomic_rename, "by which checkpoints and configs appear whole"),
    "fsync": (_sync, "without which a power cut takes finished checkpoints"),
    "flock": (_lock, "by which a new command waits for what a killed one still writes"),
    "a change time": (_change_time, "by which nodes see that the leader lives"),
}
"""Each operation with what tries it, which returns the fault or an empty text, and what a run needs it for."""
CHECK = Check(
    name="file system", purpose="hard links, atomic renames, fsync and locks work", limit_s=60.0, examine=examine
)
