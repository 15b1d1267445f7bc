"""Rows out of a token stream: a pure function of (fingerprint, seed, step, index, count), whose state is the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.shuffle import derive_key, mix, permute
from meshwright.data.tokens import TokenStream
from meshwright.errors import DataError

IGNORED = -100
"""Target that takes no part in the loss, as torch's cross_entropy and transformers have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One reader's rows of a global batch."""

    step: int
    """Number of the global batch, from 0."""
    tokens: NDArray[np.int64]
    """(rows, S) token ids."""
    targets: NDArray[np.int64]
    """(rows, S) the token after each, already shifted; -100 where it is ignored."""
    positions: NDArray[np.int64]
    """(rows, S) positions, from 0 at the row's start and, with masked documents, at each document's."""
    row_ids: NDArray[np.int64]
    """(rows,) numbers of the rows, counted over the whole run; -1 for padding."""
    targets_count: int
    """Targets of this reader that are not ignored."""


def share(rows: int, index: int, count: int) -> tuple[int, int]:
    """Returns a reader's stretch of a global batch, as (first row, row after the last).

    Args:
        rows: rows of the global batch (B).
        index: which reader.
        count: how many readers share the batch evenly.

    Raises:
        DataError: when the batch doesn't divide, or there is no such reader.
    """
    if count < 1 or not 0 <= index < count:
        raise DataError(f"reader index {index} of {count}: the index must be 0 to count - 1")
    if rows < 1 or rows % count:
        near = max(count, round(rows / count) * count)
        raise DataError(f"a global batch of {rows} rows doesn't divide among {count} readers; use {near} rows")
    return index * rows // count, (index + 1) * rows // count


class Loader:
    """Gives any step's batch of a split at once, the same rows for any number of readers.

    Rows are windows of S + 1 tokens, S apart, over the concatenated documents. Each epoch shifts the windows' origin
    and puts them into another order; every window comes once an epoch, and an epoch may end inside a batch.
    """

    def __init__(
        self,
        split: TokenStream,
        *,
        rows: int,
        sequence: int,
        seed: int,
        index: int = 0,
        count: int = 1,
        row_range: tuple[int, int] | None = None,
        mask_documents: bool = True,
    ) -> None:
        """Takes the stream and this reader's place in it.

        Args:
            split: the tokens.
            rows: rows of the global batch (B).
            sequence: tokens a row (S).
            seed: another seed gives another order.
            index: which reader this is; it takes rows index * B / count to (index + 1) * B / count.
            count: number of readers.
            row_range: (first row, row after the last) of an uneven share, instead of index and count.
            mask_documents: ignore targets across a document's end and start positions anew there.

        Raises:
            DataError: when the batch doesn't divide, or the split is shorter than a row.
        """
        if row_range is None:
            self.first, self.last = share(rows, index, count)
        else:
            self.first, self.last = row_range
            if (index, count) != (0, 1):
                raise DataError(f"index {index} of {count} has no effect beside row_range {row_range}; give one")
            if not 0 <= self.first < self.last <= rows:
                raise DataError(f"row range {row_range} must lie inside the {rows} rows of the global batch")
        length = len(split.tokens)
        if sequence < 1 or length < sequence + 1:
            raise DataError(
                f"the {split.name} split has {length} tokens, a row of sequence {sequence} needs {sequence + 1}; "
                "give more text or a shorter data.sequence"
            )
        if mask_documents:
            split.check_index()
        self.rows, self.sequence, self.mask_documents = rows, sequence, mask_documents
        self._split = split
        self._shifts = min(sequence, length - sequence)
        self.epoch_rows = (length - self._shifts) // sequence
        self._order_key = np.uint64(derive_key("order", split.fingerprint, seed))
        self._shift_key = np.uint64(derive_key("shift", split.fingerprint, seed))

    def epoch(self, step: int) -> float:
        """Returns how many passes over the windows lie before a step."""
        return step * self.rows / self.epoch_rows

    def batch(self, step: int) -> Batch:
        """Returns this reader's rows of a step.

        Args:
            step: from 0, without end.
        """
        row_ids, starts = self._starts(step, self.first, self.last)
        windows = _windows(self._split, starts, self.sequence + 1)
        tokens, targets = windows[:, :-1], windows[:, 1:].copy()
        positions = np.broadcast_to(np.arange(self.sequence), tokens.shape)
        ignored = 0
        if self.mask_documents:
            begins = _begins(self._split.ends, starts, self.sequence)
            targets[begins[:, 1:]] = IGNORED
            ignored = int(np.count_nonzero(begins[:, 1:]))
            last = np.maximum.accumulate(np.where(begins[:, :-1], positions, 0), axis=1)
            positions = positions - last
        return Batch(
            step=step,
            tokens=np.ascontiguousarray(tokens),
            targets=targets,
            positions=np.require(positions, requirements=("C", "W")),
            row_ids=row_ids,
            targets_count=targets.size - ignored,
        )

    def global_targets(self, step: int) -> int:
        """Returns the targets that all readers together have in a step; it reads the index only, no tokens."""
        if not self.mask_documents:
            return self.rows * self.sequence
        _, starts = self._starts(step, 0, self.rows)
        crossing = _crossings(self._split.ends, starts, self.sequence)
        return self.rows * self.sequence - int((crossing[1] - crossing[0]).sum())

    def _starts(self, step: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        row_ids = np.arange(first, last, dtype=np.int64) + step * self.rows
        epochs, places = np.divmod(row_ids, self.epoch_rows)
        keys = epochs.astype(np.uint64)
        windows = permute(places, self.epoch_rows, mix(keys + self._order_key))
        shifts = mix(keys + self._shift_key) % np.uint64(self._shifts)
        return row_ids, windows * self.sequence + shifts.astype(np.int64)


def _windows(split: TokenStream, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Copies windows out of the mapped stream: (rows, length)."""
    windows = np.empty((len(starts), length), dtype=np.int64)
    for row, start in zip(windows, starts.tolist()):
        row[:] = split.read(start, start + length)
    return windows


def _crossings(
    ends: NDArray[np.int64], starts: NDArray[np.int64], sequence: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns, for each row, which entries of the index lie on its targets: from the first to before the second."""
    return (
        np.searchsorted(ends, starts, side="right").astype(np.int64),
        np.searchsorted(ends, starts + sequence, side="right").astype(np.int64),
    )


def _begins(ends: NDArray[np.int64], starts: NDArray[np.int64], sequence: int) -> NDArray[np.bool_]:
    """Marks the tokens of each window that begin a document, the window's first one left out: (rows, S + 1)."""
    low, high = _crossings(ends, starts, sequence)
    begins = np.zeros((len(starts), sequence + 1), dtype=bool)
    for row in np.flatnonzero(high > low):
        begins[row, ends[low[row] : high[row]] - starts[row]] = True
    return begins


def evaluation_steps(split: TokenStream, rows: int, sequence: int) -> int:
    """Returns how many global batches cover a split once."""
    windows = -(-max(0, len(split.tokens) - 1) // sequence)
    return -(-windows // rows)


def evaluation_batches(
    split: TokenStream,
    *,
    rows: int,
    sequence: int,
    index: int = 0,
    count: int = 1,
    row_range: tuple[int, int] | None = None,
) -> Iterator[Batch]:
    """Yields batches in which every token of a split but its first is a target exactly once, in order.

    All readers get the same number of batches, each reader always of the same shape: what is over is padded with
    ignored targets.
    Targets across a document's end count here, so that the sum of the losses is the cost of the whole text.

    Args:
        split: the tokens.
        rows: rows of the global batch (B).
        sequence: tokens a row (S).
        index: which reader this is.
        count: number of readers.
        row_range: (first row, row after the last) of an uneven share, instead of index and count.

    Raises:
        DataError: when the batch doesn't divide, or there is nothing to evaluate.
    """
    first, last = row_range or share(rows, index, count)
    length = len(split.tokens)
    if sequence < 1 or length < 2:
        raise DataError(
            f"the {split.name} split has {length} tokens, nothing to evaluate; raise data.validation_share or give "
            "more text"
        )
    windows = -(-(length - 1) // sequence)
    for step in range(evaluation_steps(split, rows, sequence)):
        yield _evaluation_batch(split, step, np.arange(first, last, dtype=np.int64) + step * rows, windows, sequence)


def _evaluation_batch(split: TokenStream, step: int, row_ids: NDArray[np.int64], windows: int, sequence: int) -> Batch:
    tokens = np.zeros((len(row_ids), sequence), dtype=np.int64)
    targets = np.full((len(row_ids), sequence), IGNORED, dtype=np.int64)
    counted = 0
    for row, number in enumerate(row_ids.tolist()):
        if number < windows:
            window = split.read(number * sequence, (number + 1) * sequence + 1)
            tokens[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
            counted += len(window) - 1
    return Batch(
        step=step,
        tokens=tokens,
        targets=targets,
        positions=np.tile(np.arange(sequence), (len(row_ids), 1)),
        row_ids=np.where(row_ids < windows, row_ids, -1),
        targets_count=counted,
    )
