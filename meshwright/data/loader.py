"""Batches of a token stream: a pure function of (fingerprint, seed, step, index, count), whose state is the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing import LearnedTokens, PackedRows, Packing, learned_tokens
from meshwright.data.shuffle import derive_key, mix, permute
from meshwright.data.tokens import TokenStream
from meshwright.errors import DataError

IGNORED = -100
"""Target that the loss ignores: `ignore_index` of torch's cross_entropy and of transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One reader's rows of a global batch."""

    step: int
    """Number of the global batch, from 0."""
    tokens: NDArray[np.int64]
    """(rows, S) int64 token ids."""
    targets: NDArray[np.int64]
    """(rows, S) int64, the token after each, already shifted; -100 where it is ignored."""
    positions: NDArray[np.int64]
    """(rows, S) int64 positions, from 0 at the row's start and, with masked documents, at each document's."""
    row_ids: NDArray[np.int64]
    """(rows,) int64, row numbers counted over the whole run; -1 for padding."""
    targets_count: int
    """Targets of this reader that are not ignored."""


def share(rows: int, index: int, count: int) -> tuple[int, int]:
    """Returns a reader's rows of a global batch, as (start, stop).

    Args:
        rows: rows of the global batch (B).
        index: of the reader.
        count: number of readers, which share the batch evenly.

    Raises:
        DataError: when the batch doesn't divide, or no reader has this index.
    """
    if count < 1 or not 0 <= index < count:
        raise DataError(f"reader index {index} of {count}: the index must be 0 to count - 1")
    if rows < 1 or rows % count:
        # Suggest the nearest batch that divides.
        near = max(count, round(rows / count) * count)
        raise DataError(f"a global batch of {rows} rows doesn't divide among {count} readers; use {near} rows")
    return index * rows // count, (index + 1) * rows // count


class Loader:
    """Computes the batch of any step directly; the rows are the same for any number of readers.

    Rows are windows of S + 1 tokens, S apart, over the concatenated documents, whose origin each epoch shifts; or those
    of `PackedRows`. Each epoch permutes them; every row comes once an epoch, and an epoch may end inside a batch.
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
        packing: Packing = "stream",
    ) -> None:
        """Binds a token stream and this reader's rows of each batch.

        Args:
            split: the tokens.
            rows: rows of the global batch (B).
            sequence: tokens a row (S).
            seed: another seed gives another order.
            index: of this reader; its rows are index * B / count to (index + 1) * B / count.
            count: number of readers.
            row_range: (start, stop) of an uneven share, instead of index and count.
            mask_documents: ignore targets across a document's end and restart positions there.
            packing: ``stream`` cuts rows from all documents; ``whole`` fills rows with whole documents, which are kept
                apart too; ``single`` puts one in each.

        Raises:
            DataError: when the batch doesn't divide, or the split is shorter than a row, or has nothing to learn.
        """
        if row_range is None:
            self.row_start, self.row_stop = share(rows, index, count)
        else:
            self.row_start, self.row_stop = row_range
            if (index, count) != (0, 1):
                raise DataError(f"index {index} of {count} has no effect beside row_range {row_range}; give one")
            if not 0 <= self.row_start < self.row_stop <= rows:
                raise DataError(f"row range {row_range} must lie inside the {rows} rows of the global batch")
        self.rows, self.sequence, self.mask_documents = rows, sequence, mask_documents
        self._split = split
        # Keys derive from the contents, so that the order is the same on any machine and with any number of readers.
        self._order_key = np.uint64(derive_key("order", split.fingerprint, seed))
        self._packed = PackedRows(split, sequence, single=packing == "single") if packing != "stream" else None
        if self._packed is not None:
            self.epoch_rows = self._packed.count
            return
        self._learned = learned_tokens(split)
        length = len(split.tokens)
        if sequence < 1 or length < sequence + 1:
            raise DataError(
                f"the {split.name} split has {length} tokens, a row of sequence {sequence} needs {sequence + 1}; "
                "give more text or a shorter data.sequence"
            )
        if mask_documents:
            split.check_index()
        # A shifted origin needs S spare tokens: at most the tokens beyond the last full window.
        self._shifts = min(sequence, length - sequence)
        # Windows that fit behind the largest shift, so that every epoch has the same number of rows.
        self.epoch_rows = (length - self._shifts) // sequence
        self._shift_key = np.uint64(derive_key("shift", split.fingerprint, seed))

    def epoch(self, step: int) -> float:
        """Returns the number of passes over the rows before a step."""
        return step * self.rows / self.epoch_rows

    def batch(self, step: int, row_range: tuple[int, int] | None = None) -> Batch:
        """Returns this reader's rows of a step.

        Args:
            step: number of the global batch, from 0 without limit.
            row_range: (start, stop) of other rows of it than this reader's.
        """
        row_ids, epochs, indices = self._rows_of(step, *(row_range or (self.row_start, self.row_stop)))
        if self._packed is not None:
            return _packed_batch(self._packed, step, row_ids, indices)
        starts = self._window_starts(epochs, indices)
        windows = _read_windows(self._split, starts, self.sequence + 1)
        # Targets are copied since they are masked; tokens stay a view of the windows.
        tokens, targets = windows[:, :-1], windows[:, 1:].copy()
        positions = np.broadcast_to(np.arange(self.sequence), tokens.shape)
        if self._learned is not None:
            _ignore_unlearned(targets, self._learned, starts + 1)
        if self.mask_documents:
            document_starts = _mark_document_starts(self._split.ends, starts, self.sequence)
            # The token that starts a document is no target of the one before it.
            targets[document_starts[:, 1:]] = IGNORED
            # Running maximum of the start positions: the start of the document that each token is in.
            start_positions = np.maximum.accumulate(np.where(document_starts[:, :-1], positions, 0), axis=1)
            positions = positions - start_positions
        return Batch(
            step=step,
            tokens=np.ascontiguousarray(tokens),
            targets=targets,
            positions=np.require(positions, requirements=("C", "W")),
            row_ids=row_ids,
            targets_count=int(np.count_nonzero(targets != IGNORED)),
        )

    def global_targets(self, step: int, row_range: tuple[int, int] | None = None) -> int:
        """Counts the targets of all readers in a step, from the index alone without reading tokens; 1 for none at all.

        Args:
            step: number of the global batch.
            row_range: (start, stop) of some of its rows; None for all.
        """
        start, stop = row_range or (0, self.rows)
        _, epochs, indices = self._rows_of(step, start, stop)
        if self._packed is not None:
            return int(self._packed.targets[indices].sum())
        starts = self._window_starts(epochs, indices)
        if self._learned is not None:
            # A batch whose rows hold questions alone has nothing to learn; its sums are divided by one.
            return max(1, int(self._learned.count(starts + 1, starts + 1 + self.sequence).sum()))
        if not self.mask_documents:
            return (stop - start) * self.sequence
        crossing = _index_ranges(self._split.ends, starts, self.sequence)
        return (stop - start) * self.sequence - int((crossing[1] - crossing[0]).sum())

    def _rows_of(
        self, step: int, row_start: int, row_stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
        """Computes which rows are [row_start, row_stop) of a step.

        Returns:
            row numbers over the whole run, (rows,) int64; their epochs, (rows,) uint64; their numbers among the rows of
            an epoch, (rows,) int64.
        """
        # Row numbers run over all epochs: quotient and remainder give epoch and position in it.
        row_ids = np.arange(row_start, row_stop, dtype=np.int64) + step * self.rows
        epochs, epoch_positions = np.divmod(row_ids, self.epoch_rows)
        keys = epochs.astype(np.uint64)
        # The epoch keys the permutation, so that a step is computed without walking through those before it.
        return row_ids, keys, permute(epoch_positions, self.epoch_rows, mix(keys + self._order_key))

    def _window_starts(self, epochs: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first tokens of windows, (rows,) int64, of (rows,) epochs and numbers in them."""
        # Each epoch has its own origin, or windows would begin at the same tokens in every epoch.
        shifts = mix(epochs + self._shift_key) % np.uint64(self._shifts)
        return indices * self.sequence + shifts.astype(np.int64)


def _ignore_unlearned(targets: NDArray[np.int64], learned: LearnedTokens, starts: NDArray[np.int64]) -> None:
    """Ignores targets that aren't learned.

    Args:
        targets: (rows, S) int64.
        learned: which tokens are.
        starts: (rows,) int64, the token of each row's first target.
    """
    for row, start in zip(targets, starts.tolist()):
        row[~learned.mask(start, start + len(row))] = IGNORED


def _packed_batch(packed: PackedRows, step: int, row_ids: NDArray[np.int64], indices: NDArray[np.int64]) -> Batch:
    """Builds a batch of packed rows, numbered by (rows,) int64 ``indices``; those from their count on are padding."""
    read = [packed.read(row, IGNORED) for row in indices.tolist()]
    tokens, targets, positions = (np.stack(fields) for fields in zip(*read))
    return Batch(
        step=step,
        tokens=tokens,
        targets=targets,
        positions=positions,
        row_ids=row_ids,
        targets_count=int(np.count_nonzero(targets != IGNORED)),
    )


def _read_windows(split: TokenStream, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Copies windows out of the mapped stream.

    Args:
        split: the tokens.
        starts: (rows,) int64, first token of each window.
        length: tokens of a window.

    Returns:
        (rows, length) int64.
    """
    windows = np.empty((len(starts), length), dtype=np.int64)
    for window, start in zip(windows, starts.tolist()):
        window[:] = split.read(start, start + length)
    return windows


def _index_ranges(
    document_ends: NDArray[np.int64], starts: NDArray[np.int64], sequence: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds the document ends that lie on each row's targets.

    Args:
        document_ends: (documents,) int64, ascending; the token after each document's last.
        starts: (rows,) int64, first token of each row.
        sequence: tokens a row (S).

    Returns:
        start and stop, each (rows,) int64: ranges of entries of ``document_ends``.
    """
    return (
        # An end equal to the start belongs to the previous document: side="right" skips it.
        np.searchsorted(document_ends, starts, side="right").astype(np.int64),
        np.searchsorted(document_ends, starts + sequence, side="right").astype(np.int64),
    )


def _mark_document_starts(
    document_ends: NDArray[np.int64], starts: NDArray[np.int64], sequence: int
) -> NDArray[np.bool_]:
    """Marks the tokens of each window that start a document, except for the window's first: (rows, S + 1) bool."""
    first_entry, stop_entry = _index_ranges(document_ends, starts, sequence)
    document_starts = np.zeros((len(starts), sequence + 1), dtype=bool)
    # Only rows with a document end inside need Python; most rows of long documents have none.
    for row in np.flatnonzero(stop_entry > first_entry):
        # Index of the token after each end, relative to the window's start.
        document_starts[row, document_ends[first_entry[row] : stop_entry[row]] - starts[row]] = True
    return document_starts


def evaluation_steps(split: TokenStream, rows: int, sequence: int) -> int:
    """Returns the number of global batches that cover a split once."""
    # Rounded up: the last window is padded.
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
    packed: PackedRows | None = None,
) -> Iterator[Batch]:
    """Yields batches in which every token of a split but its first is a target exactly once, in order.

    Where only answers are learned, they alone are targets. All readers get the same number of batches, each reader
    always of the same shape; rows beyond the text are padded with ignored targets. Targets across a document's end
    count here, so that the losses sum to the cost of the text; packed rows have the targets that they have in training.

    Args:
        split: the tokens.
        rows: rows of the global batch (B).
        sequence: tokens a row (S).
        index: of this reader.
        count: number of readers.
        row_range: (start, stop) of an uneven share, instead of index and count.
        packed: the split's rows where they are packed; windows of the stream when None.

    Raises:
        DataError: when the batch doesn't divide, or there is nothing to evaluate.
    """
    row_start, row_stop = row_range or share(rows, index, count)
    length = len(split.tokens)
    if sequence < 1 or length < 2:
        raise DataError(
            f"the {split.name} split has {length} tokens, nothing to evaluate; raise data.validation_share or give "
            "more text"
        )
    own_rows = np.arange(row_start, row_stop, dtype=np.int64)
    if packed is not None:
        for step in range(-(-packed.count // rows)):
            indices = own_rows + step * rows
            yield _packed_batch(packed, step, np.where(indices < packed.count, indices, -1), indices)
        return
    learned = learned_tokens(split)
    # Every token but the first is a target, so windows cover length - 1 of them.
    windows = -(-(length - 1) // sequence)
    for step in range(evaluation_steps(split, rows, sequence)):
        yield _evaluation_batch(split, learned, step, own_rows + step * rows, windows, sequence)


def _evaluation_batch(
    split: TokenStream,
    learned: LearnedTokens | None,
    step: int,
    row_ids: NDArray[np.int64],
    windows: int,
    sequence: int,
) -> Batch:
    """Builds an evaluation batch.

    Args:
        split: the tokens.
        learned: which of them are targets; None for all but the first.
        step: number of the batch.
        row_ids: (rows,) int64, indices of windows; those from ``windows`` on are padding.
        windows: number of windows of the split.
        sequence: tokens a row (S).
    """
    tokens = np.zeros((len(row_ids), sequence), dtype=np.int64)
    targets = np.full((len(row_ids), sequence), IGNORED, dtype=np.int64)
    for row, window_index in enumerate(row_ids.tolist()):
        # Rows beyond the last window stay padding: zeros with ignored targets.
        if window_index < windows:
            # One token more than a row, for the target of its last token.
            window = split.read(window_index * sequence, (window_index + 1) * sequence + 1)
            tokens[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
    if learned is not None:
        _ignore_unlearned(targets, learned, row_ids * sequence + 1)
    return Batch(
        step=step,
        tokens=tokens,
        targets=targets,
        positions=np.tile(np.arange(sequence), (len(row_ids), 1)),
        row_ids=np.where(row_ids < windows, row_ids, -1),
        targets_count=int(np.count_nonzero(targets != IGNORED)),
    )
