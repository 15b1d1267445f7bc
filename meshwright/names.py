"""Validation of file names read from other files: only plain names, so that no path outside their folder is used."""

from __future__ import annotations

from meshwright.errors import MeshwrightError

MOST_BYTES = 255
"""Longest name. Source: limits.h, NAME_MAX."""


def plain_name(name: object, where: object, kind: type[MeshwrightError]) -> str:
    """Returns a file name that was read from another file, if it is plain.

    Every reader of a manifest, an index or another listing calls it before it builds a path from the contents.

    Args:
        name: the value that was read.
        where: the file that contains it, for the message.
        kind: class of the error.

    Raises:
        MeshwrightError: of that kind, for anything that isn't the name of a file in the same folder: a path, ``..``, a
            name with control characters, or something that isn't a text.
    """
    # Separators of POSIX and Windows, and the colon of a drive, in one rule for all systems.
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(sign in "/\\:" or not sign.isprintable() for sign in name)
        and len(name.encode("utf-8", errors="replace")) <= MOST_BYTES
    )
    if not plain:
        raise kind(f"{where} names the file {str(name)[:80]!r}; only plain names of files beside it are read")
    return str(name)
