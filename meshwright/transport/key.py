"""The key of a run: 32 random bytes in a file that only its owner may read, by which its processes authenticate."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import LaunchError

NAME = "key"
"""Name of the key's file in a run directory."""
KEY_BYTES = 32
"""Length of a key. Source: RFC 2104, section 3: no shorter than the hash's output, 32 bytes for SHA-256."""
_NON_OWNER_BITS = stat.S_IRWXG | stat.S_IRWXO
_VISIBLE_S = 10.0
"""Time for a file that another node just created to become visible on a network file system."""


@dataclass(frozen=True)
class RunKey:
    """The shared secret of a run's processes."""

    secret: bytes = field(repr=False)
    """`KEY_BYTES` random bytes."""

    def __post_init__(self) -> None:
        """Refuses a key of another length."""
        if len(self.secret) != KEY_BYTES:
            raise LaunchError(f"a run's key has {KEY_BYTES} bytes, and this one {len(self.secret)}")

    @classmethod
    def fresh(cls) -> RunKey:
        """Returns a new key from the operating system's random numbers."""
        return cls(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> RunKey:
    """Reads a key: 64 hexadecimal digits.

    Raises:
        LaunchError: when the file can't be read, belongs to another user, others may read it, or it holds no key.
    """
    try:
        # No symbolic link, and the checks use the descriptor that is read: the path can't be swapped in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LaunchError(f"the run's key {path} can't be read: {error.strerror}; give --key-file FILE") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise LaunchError(f"the run's key {path} isn't this user's own file; give a copy: --key-file FILE")
        if status.st_mode & _NON_OWNER_BITS:
            raise LaunchError(
                f"others may read or write the run's key {path} (mode {stat.S_IMODE(status.st_mode):04o}); whoever has "
                f"it commands the run; chmod 600 {path}, or remove it where somebody may have read it"
            )
        text = file.read(2 * KEY_BYTES + 2)
    try:
        return RunKey(bytes.fromhex(text.decode("ascii").strip()))
    except (ValueError, LaunchError):
        raise LaunchError(
            f"{path} holds no key of a run, {2 * KEY_BYTES} hexadecimal digits; openssl rand -hex {KEY_BYTES} makes one"
        ) from None


def run_key(run_dir: Path, key_file: Path | None = None, name: str = NAME) -> RunKey:
    """Returns a run's key from the user's file, or from the run directory, where the first node creates it.

    Args:
        run_dir: shared by all nodes.
        key_file: the user's key file on this node; None for the run directory's.
        name: of the file in the run directory.

    Raises:
        LaunchError: as `read_key`, and when none can be created.
    """
    if key_file is not None:
        return read_key(key_file)
    path = run_dir / name
    if not path.exists():
        _create_key_file(path)
    deadline = time.monotonic() + _VISIBLE_S
    # A network file system may cache the absence of a file.
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return read_key(path)


def _create_key_file(path: Path) -> None:
    """Creates the key file, unless another node was faster; linking a finished file makes it appear complete."""
    temporary = path.with_name(f".{NAME}-{uuid.uuid4().hex}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            # Another node was faster: its key counts.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"the run's key {path} can't be made: {error.strerror}; give --key-file FILE") from None
