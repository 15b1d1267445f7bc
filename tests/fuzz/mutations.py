"""What becomes of a file that is damaged, or written by somebody who means harm."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../../etc/passwd", "/etc/passwd",
    "os:system", "a\0b", "\ud800", [], {}, [[]], {"": {}}, "9" * 5000,
)  # fmt: skip
"""Values that stand where others should."""


def mutations(data: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """Yields damaged forms of a file: bytes of it, all of it, and, of JSON, values of it."""
    yield from (b"", b"\0", b"\n", b"{}", b"[]", b"null", b"\xff\xfe\x00")
    yield from (b"[" * 100_000, b'{"a":' * 50_000, os.urandom(300))
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        tree = None
    for number in range(count):
        if tree is not None and number % 2:
            text = json.dumps(changed(json.loads(data), draw), indent=1).encode("utf-8", errors="surrogatepass")
            yield text
        else:
            yield damaged(data, draw)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Returns the bytes with one of the usual accidents."""
    found, kind = bytearray(data), draw.randrange(6)
    at = draw.randrange(max(1, len(found)))
    if kind == 0 and found:
        found[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del found[at:]
    elif kind == 2:
        found[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 40)))
    elif kind == 3:
        found[at : at + draw.randrange(1, 60)] = bytes(draw.randrange(1, 60))
    elif kind == 4:
        found[at : at + 8] = b"\xff" * 8
    else:
        found += found[: draw.randrange(1, 200)]
    return bytes(found)


def changed(tree: Any, draw: random.Random) -> Any:
    """Returns a JSON value in which one value is another, missing, or there twice."""
    places = list(_places(tree))
    if not places:
        return draw.choice(ODD)
    holder, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(draw.choice(ODD))] = holder[key]
    else:
        holder[key] = draw.choice(ODD)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from _places(value)
