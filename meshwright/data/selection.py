"""Which documents are kept, which are held out, and how the work on them is cut: pure functions of their hashes."""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DOCUMENT = np.dtype([("split", "<u8"), ("order", "<u8"), ("bytes", "<i8")])
"""A document in the index of a shard: the two halves of its hash, and its UTF-8 bytes."""

_CUT = re.compile(rb"[!-~]\n(?=[!-~])")
_REACH = 1 << 16


def document_row(data: bytes) -> tuple[int, int, int]:
    """Returns a document's `DOCUMENT` row. The halves of the hash decide apart: one on the split, one on the order."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"), len(data)


def first_of_each(documents: NDArray[np.void]) -> NDArray[np.bool_]:
    """Marks the documents that no earlier one equals.

    Args:
        documents: (documents,) `DOCUMENT` rows in corpus order.
    """
    order = np.lexsort((documents["order"], documents["split"]))
    split, rank = documents["split"][order], documents["order"][order]
    fresh = np.ones(len(documents), dtype=bool)
    fresh[1:] = (split[1:] != split[:-1]) | (rank[1:] != rank[:-1])
    kept = np.zeros(len(documents), dtype=bool)
    kept[order[fresh]] = True  # lexsort is stable: the first of equal ones is the earliest
    return kept


def within_limit(documents: NDArray[np.void], kept: NDArray[np.bool_], limit_bytes: int) -> NDArray[np.bool_]:
    """Keeps documents in the order of their hashes as long as their bytes fit, and one at least."""
    places = np.flatnonzero(kept)
    places = places[np.argsort(documents["order"][places], kind="stable")]
    fitting = int(np.searchsorted(np.cumsum(documents["bytes"][places]), limit_bytes, side="right"))
    result = np.zeros(len(documents), dtype=bool)
    result[places[: max(1, fitting)]] = True
    return result


def held_out(documents: NDArray[np.void], kept: NDArray[np.bool_], share: float) -> NDArray[np.bool_]:
    """Marks the kept documents that belong to validation: those whose hash lies in the lowest share.

    When none or all of two or more documents do, the one with the lowest hash alone is, or the highest alone isn't.
    """
    chosen = kept & (documents["split"] < np.uint64(min(int(share * 2**64), 2**64 - 1)))
    places = np.flatnonzero(kept)
    if share > 0 and len(places) > 1:
        ranked = places[np.argsort(documents["split"][places], kind="stable")]
        chosen[ranked[0]] = True
        chosen[ranked[-1]] = False
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """A stretch of a shard's text that is encoded in one go: a document or a part of one."""

    shard: int
    """Number of the shard."""
    start: int
    """First byte in the shard's text."""
    stop: int
    """Byte after the last."""
    ends: bool
    """Whether the document ends here."""


def cut(text: mmap.mmap, piece: TextPiece, size: int) -> Iterator[TextPiece]:
    """Cuts a long document after lone newlines, into pieces of about ``size`` bytes.

    A cut lies after a newline between two visible ASCII characters, where `splits_at_newlines` holds and no character
    is torn apart.

    Args:
        text: the shard's bytes.
        piece: the whole document.
        size: bytes a piece.
    """
    start = piece.start
    while piece.stop - start > size:
        found, at = None, start + size
        while found is None and at < piece.stop:
            found = _CUT.search(text, at, min(at + _REACH, piece.stop))
            at += _REACH - 2
        if found is None:
            break
        yield TextPiece(shard=piece.shard, start=start, stop=found.end(), ends=False)
        start = found.end()
    yield TextPiece(shard=piece.shard, start=start, stop=piece.stop, ends=piece.ends)
