"""Names of files that a file gives: plain ones, so that nothing outside of its own folder is read or written."""

from __future__ import annotations

from meshwright.errors import MeshwrightError

MOST_BYTES = 255
"""Of a name. Source: limits.h, NAME_MAX."""


def plain_name(name: object, where: object, kind: type[MeshwrightError]) -> str:
    """Returns a file's name that another file gave.

    Every reader of a manifest, an index or another listing asks this before it makes a path of what it read.

    Args:
        name: what stands there.
        where: the file that it stands in, for the message.
        kind: of the error.

    Raises:
        MeshwrightError: of that kind, for anything that isn't the name of a file in the same folder: a path, ``..``, a
            name with control characters, or something that isn't a text.
    """
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(sign in "/\\:" or not sign.isprintable() for sign in name)
        and len(name.encode("utf-8", errors="replace")) <= MOST_BYTES
    )
    if not plain:
        raise kind(f"{where} names the file {str(name)[:80]!r}; only plain names of files beside it are read")
    return str(name)
