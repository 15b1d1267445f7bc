"""Selects documents for training and validation, and splits long ones: pure functions of documents' hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DOCUMENT = np.dtype([("split", "<u8"), ("order", "<u8"), ("bytes", "<i8"), ("needs_end", "?"), ("needs_begin", "?")])
"""A document in the index of a shard: the two halves of its hash, its UTF-8 bytes, whether the end token follows, and
whether the tokens go before it that begin every text."""

_LONE_NEWLINE = re.compile(rb"[!-~]\n(?=[!-~])")
_SEARCH_BYTES = 1 << 16


def document_row(
    data: bytes, needs_end: bool = True, needs_begin: bool = False, answers: Sequence[tuple[int, int]] = ()
) -> tuple[int, int, int, bool, bool]:
    """Returns a document's `DOCUMENT` row; one half of its hash decides on the split, the other on the order.

    Args:
        data: its text.
        needs_end: whether the end token follows.
        needs_begin: whether the tokens that begin every text go before it.
        answers: ranges of its bytes that are learned. Equal texts with other answers are other documents, and go to the
            same split.
    """
    digest = hashlib.blake2b(data, digest_size=16).digest()
    # Two independent 64-bit values out of one 128-bit hash.
    split, order = digest[:8], digest[8:]
    if answers:
        order = hashlib.blake2b(digest + json.dumps(answers).encode(), digest_size=8).digest()
    return int.from_bytes(split, "little"), int.from_bytes(order, "little"), len(data), needs_end, needs_begin


def mark_first_copies(documents: NDArray[np.void]) -> NDArray[np.bool_]:
    """Marks the documents that equal no earlier one.

    Args:
        documents: (documents,) `DOCUMENT` rows in corpus order.

    Returns:
        (documents,) bool.
    """
    order = np.lexsort((documents["order"], documents["split"]))
    split_hash, order_hash = documents["split"][order], documents["order"][order]
    # Equal hashes are neighbours after the sort; the first of each run differs from its predecessor.
    differs_from_previous = np.ones(len(documents), dtype=bool)
    differs_from_previous[1:] = (split_hash[1:] != split_hash[:-1]) | (order_hash[1:] != order_hash[:-1])
    first_copies = np.zeros(len(documents), dtype=bool)
    first_copies[order[differs_from_previous]] = True  # lexsort is stable: the first of equal ones is the earliest
    return first_copies


def within_limit(documents: NDArray[np.void], candidates: NDArray[np.bool_], limit_bytes: int) -> NDArray[np.bool_]:
    """Selects candidates in the order of their hashes while their bytes fit, and at least one.

    Args:
        documents: (documents,) `DOCUMENT` rows.
        candidates: (documents,) bool.
        limit_bytes: most bytes of text.

    Returns:
        (documents,) bool, a subset of ``candidates``.
    """
    indices = np.flatnonzero(candidates)
    # The order's half of the hash is independent of the split's, so a limit doesn't change the shares.
    indices = indices[np.argsort(documents["order"][indices], kind="stable")]
    # Prefix sums of bytes: the number of documents that fit.
    fitting_count = int(np.searchsorted(np.cumsum(documents["bytes"][indices]), limit_bytes, side="right"))
    selected = np.zeros(len(documents), dtype=bool)
    selected[indices[: max(1, fitting_count)]] = True
    return selected


def held_out(documents: NDArray[np.void], candidates: NDArray[np.bool_], share: float) -> NDArray[np.bool_]:
    """Marks the candidates of the validation split: those whose hash lies in the lowest share.

    Of two or more candidates at least one is in each split: the lowest hash in validation, the highest in training.

    Args:
        documents: (documents,) `DOCUMENT` rows.
        candidates: (documents,) bool.
        share: of the hashes' range, from 0 to 1.

    Returns:
        (documents,) bool, a subset of ``candidates``.
    """
    # A threshold on the hash: adding documents moves none of the others between splits.
    validation = candidates & (documents["split"] < np.uint64(min(int(share * 2**64), 2**64 - 1)))
    indices = np.flatnonzero(candidates)
    if share > 0 and len(indices) > 1:
        by_hash = indices[np.argsort(documents["split"][indices], kind="stable")]
        validation[by_hash[0]] = True
        validation[by_hash[-1]] = False
    return validation


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpan:
    """A range of a shard's text that is encoded in one call: a document, or a range of one."""

    shard: int
    """Number of the shard."""
    start: int
    """First byte in the shard's text."""
    stop: int
    """Byte after the last."""
    ends_document: bool
    """Whether the document ends with this span."""
    needs_end: bool = True
    """Whether the end token follows the document."""
    needs_begin: bool = False
    """Whether the tokens that begin every text go before it; of a document's first span alone."""


def split_document(text: mmap.mmap, document: TextSpan, span_bytes: int) -> Iterator[TextSpan]:
    """Splits a long document after lone newlines, into spans of about ``span_bytes`` bytes.

    A boundary lies after a newline between two visible ASCII characters: there `splits_at_newlines` guarantees the same
    tokens, and no UTF-8 character is divided.

    Args:
        text: the shard's bytes.
        document: the span of the whole document.
        span_bytes: bytes of a span.
    """
    start = document.start
    while document.stop - start > span_bytes:
        boundary, search_start = None, start + span_bytes
        # No boundary within the window: search on until the document ends.
        while boundary is None and search_start < document.stop:
            boundary = _LONE_NEWLINE.search(text, search_start, min(search_start + _SEARCH_BYTES, document.stop))
            # Search in windows that overlap by two bytes: the pattern is three bytes long.
            search_start += _SEARCH_BYTES - 2
        if boundary is None:
            break
        yield dataclasses.replace(document, start=start, stop=boundary.end(), ends_document=False)
        document = dataclasses.replace(document, needs_begin=False)
        start = boundary.end()
    yield dataclasses.replace(document, start=start)
