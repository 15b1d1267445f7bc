"""The key of a run: 32 random bytes in a file that its owner alone may read; who can't show it is a stranger."""

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
"""Of the file in a run directory."""
KEY_BYTES = 32
"""Length of a key. Source: RFC 2104, section 3: no shorter than the hash's output, 32 bytes for SHA-256."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SEEN_S = 10.0
"""How long a file that another node just made may take to be seen on a network file system."""


@dataclass(frozen=True)
class RunKey:
    """What the processes of a run, and they alone, know."""

    secret: bytes = field(repr=False)
    """The bytes."""

    def __post_init__(self) -> None:
        """Refuses a key of another length."""
        if len(self.secret) != KEY_BYTES:
            raise LaunchError(f"a run's key has {KEY_BYTES} bytes, and this one {len(self.secret)}")

    @classmethod
    def fresh(cls) -> RunKey:
        """Returns a new one, from the operating system's random numbers."""
        return cls(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> RunKey:
    """Reads a key: 64 hexadecimal digits.

    Raises:
        LaunchError: when the file can't be read, belongs to another user, others may read it, or it holds no key.
    """
    try:
        # Not a link that somebody else put there, and looked at through the descriptor that is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LaunchError(f"the run's key {path} can't be read: {error.strerror}; give --key-file FILE") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise LaunchError(f"the run's key {path} isn't this user's own file; give a copy: --key-file FILE")
        if facts.st_mode & _OTHERS:
            raise LaunchError(
                f"others may read or write the run's key {path} (mode {stat.S_IMODE(facts.st_mode):04o}); whoever has "
                f"it commands the run; chmod 600 {path}, or remove it where somebody may have read it"
            )
        text = file.read(2 * KEY_BYTES + 2)
    try:
        return RunKey(bytes.fromhex(text.decode("ascii").strip()))
    except (ValueError, LaunchError):
        raise LaunchError(
            f"{path} holds no key of a run, {2 * KEY_BYTES} hexadecimal digits; openssl rand -hex {KEY_BYTES} makes one"
        ) from None


def run_key(run_dir: Path, key_file: Path | None = None) -> RunKey:
    """Returns the key of a run: of the file that the user named, or the run directory's, which the first node makes.

    Args:
        run_dir: shared by all nodes.
        key_file: of this node, where the run directory's own isn't to be used.

    Raises:
        LaunchError: as `read_key` does, and where none can be made.
    """
    if key_file is not None:
        return read_key(key_file)
    path = run_dir / NAME
    if not path.exists():
        _make(path)
    end = time.monotonic() + _SEEN_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return read_key(path)


def _make(path: Path) -> None:
    """Makes the file, unless another node does at the same moment; it is whole when it appears."""
    beside = path.with_name(f".{NAME}-{uuid.uuid4().hex}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"the run's key {path} can't be made: {error.strerror}; give --key-file FILE") from None
