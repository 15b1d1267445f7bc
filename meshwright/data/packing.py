"""Packing: documents into rows that hold each from its start, by best fit, and which tokens of a stream are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.data.tokens import TokenStream
from meshwright.errors import DataError

Packing: TypeAlias = Literal["stream", "whole", "single"]
"""Rows are cut from all documents, or hold as many as fit from their start, or one each."""


class LearnedTokens:
    """Which tokens of a stream are learned: those of answers.

    Args:
        runs: (runs, 2) int64, ascending, of each run the first token and the one after its last.
    """

    def __init__(self, runs: NDArray[np.int64]) -> None:
        self._starts, self._stops = runs[:, 0], runs[:, 1]
        self._before = np.concatenate([[0], np.cumsum(self._stops - self._starts)])

    def count(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts learned tokens in ranges [start, stop), both (ranges,) int64; returns (ranges,) int64."""
        return self._count_before(stops) - self._count_before(starts)

    def _count_before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        run = np.searchsorted(self._starts, places, side="left")
        # The last run that begins before the place may reach beyond it.
        beyond = np.maximum(self._stops[run - 1] - places, 0) if len(self._stops) else np.zeros_like(places)
        return self._before[run] - np.where(run > 0, beyond, 0)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns which of the tokens [start, stop) are learned: (stop - start,) bool."""
        first = np.searchsorted(self._stops, start, side="right")
        after = np.searchsorted(self._starts, stop, side="left")
        is_learned = np.zeros(stop - start, dtype=bool)
        for run_start, run_stop in zip(self._starts[first:after].tolist(), self._stops[first:after].tolist()):
            is_learned[max(run_start - start, 0) : run_stop - start] = True
        return is_learned


def learned_tokens(split: TokenStream) -> LearnedTokens | None:
    """Returns which tokens of a split are learned; None for all.

    Raises:
        DataError: when its answers are damaged.
    """
    split.check_answers()
    return None if split.answers is None else LearnedTokens(split.answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What packing leaves out of a split."""

    cut: int
    """Documents that are longer than a row, of which only the beginning is in one."""
    unlearned: int
    """Documents without a target within a row but with one behind it, which are in none."""
    without: int
    """Documents without any target, which are in none."""
    targets: int
    """Targets that are in no row, because of both."""
    all_targets: int
    """Targets of the split."""


class PackedRows:
    """Rows of S tokens that hold documents from their start, in corpus order, and are filled up behind them.

    A document of L tokens takes L - 1 places, since nothing follows its last token; one of more than S + 1 is cut. Each
    goes to the fullest row with room for it, the longest first (best fit decreasing: Johnson 1974, "Fast algorithms for
    bin packing"), of equally full ones the last that one went to, so that rows depend on the text and S alone.
    """

    def __init__(self, split: TokenStream, sequence: int, single: bool = False) -> None:
        """Packs a split; an error where no document has a target.

        Args:
            split: the documents.
            sequence: tokens a row (S).
            single: put one document into each row.

        Raises:
            DataError: when a row can't hold any target.
        """
        split.check_index()
        learned = learned_tokens(split)
        stops = np.asarray(split.ends, dtype=np.int64)
        starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
        places = np.minimum(stops - starts - 1, sequence)

        def targets_within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
            return lengths if learned is None else learned.count(starts + 1, starts + 1 + lengths)

        targets, all_targets = targets_within(np.maximum(places, 0)), targets_within(np.maximum(stops - starts - 1, 0))
        kept = np.flatnonzero(targets > 0)
        self.left_out = LeftOut(
            cut=int(np.count_nonzero(stops - starts - 1 > sequence)),
            unlearned=int(np.count_nonzero((targets == 0) & (all_targets > 0))),
            without=int(np.count_nonzero(all_targets == 0)),
            targets=int(all_targets.sum() - targets.sum()),
            all_targets=int(all_targets.sum()),
        )
        if not len(kept):
            raise DataError(
                f"no document of the {split.name} split has a target in its first {sequence + 1} tokens; give longer "
                "rows (data.sequence), or other text"
            )
        row = np.arange(len(kept)) if single else _best_fit(places[kept], sequence)
        order = np.argsort(row, kind="stable")
        self.count = int(row.max()) + 1
        self.targets = np.bincount(row, weights=targets[kept], minlength=self.count).astype(np.int64)
        """(rows,) int64 targets."""
        self._starts, self._places = starts[kept][order], places[kept][order]
        self.filled = int(places[kept].sum()) / (self.count * sequence)
        """Share of the places that hold a document's tokens."""
        self._first = np.searchsorted(row[order], np.arange(self.count + 1))
        self._split, self._sequence, self._learned = split, sequence, learned

    def read(self, row: int, ignored: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Reads a row.

        Args:
            row: its number; from `count` on there is nothing in it.
            ignored: target of what isn't learned.

        Returns:
            tokens, targets and positions, each (S,) int64. Positions begin at each document and go on behind the last,
            where tokens are 0: they see what is before them, and nothing sees them.
        """
        tokens = np.zeros(self._sequence, dtype=np.int64)
        targets = np.full(self._sequence, ignored, dtype=np.int64)
        positions = np.arange(self._sequence)
        at = 0
        for document in range(*self._first[row : row + 2].tolist()) if row < self.count else ():
            start, places = int(self._starts[document]), int(self._places[document])
            window = self._split.read(start, start + places + 1)
            tokens[at : at + places] = window[:-1]
            targets[at : at + places] = window[1:]
            if self._learned is not None:
                targets[at : at + places][~self._learned.mask(start + 1, start + 1 + places)] = ignored
            positions[at:] -= positions[at]
            at += places
        return tokens, targets, positions


def _best_fit(lengths: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
    """Returns the row of each of (documents,) lengths: (documents,) int64, rows of S places."""
    rows_by_room: list[list[int]] = [[] for _ in range(sequence + 1)]
    # Bit r: some row has room for exactly r places. So the fullest that fits is the lowest bit from a length on.
    rooms, rows = 0, 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    sizes = lengths.tolist()
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[document]
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            row, room, rows = rows, sequence, rows + 1
        row_of[document] = row
        if left := room - size:
            rows_by_room[left].append(row)
            rooms |= 1 << left
    return row_of
