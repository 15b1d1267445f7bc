"""The rows of a training job as anyone would read them off a prepared set, one at a time.

They share no code with data/: the order of rows and how documents are packed are written down here a second time, from
their documentation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

IGNORED = -100
PlainRow: TypeAlias = tuple[list[int], list[int], list[int]]
"""Tokens, targets and positions, each S long."""
_WORD = 2**64
_ROUNDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainBatch:
    """Rows of text."""

    tokens: torch.Tensor
    """(B, S) int64."""
    targets: torch.Tensor
    """(B, S) int64, the token after each; -100 where nothing is predicted."""
    positions: torch.Tensor | None
    """(B, S) int64, from 0 at each document's begin; None where every row counts from 0 without a break."""


class PlainRows:
    """The rows of a prepared set in the order of training, found one at a time.

    The text is cut into windows of S tokens after a shift of the epoch; a keyed permutation (a Feistel network that is
    walked until it lands inside) puts the windows of an epoch in order. Keys: first 8 bytes of SHA-256 over what names
    them; mixing: SplitMix64 (Steele, Lea, Flood 2014).

    Args:
        folder: the prepared set.
        rows: of a global batch.
        sequence: S, tokens a row.
        seed: of the run.
        documents: whether attention and targets end with each document.
        packing: ``stream`` for windows; else rows hold documents from their start: ``whole`` as many as fit, ``single``
            one each.
    """

    def __init__(
        self, folder: Path, *, rows: int, sequence: int, seed: int, documents: bool, packing: str = "stream"
    ) -> None:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._tokens = np.fromfile(folder / "train.bin", dtype=manifest["dtype"])
        self._held_out = np.fromfile(folder / "validation.bin", dtype=manifest["dtype"])
        self._document_ends = np.fromfile(folder / "train.idx", dtype="<u8").tolist()
        self._learned, self._held_out_learned = (
            _read_learned(folder / f"{name}.answers", len(tokens))
            for name, tokens in (("train", self._tokens), ("validation", self._held_out))
        )
        self._packed: list[PlainRow] = []
        self._held_out_packed: list[PlainRow] = []
        if packing != "stream":
            held_out_ends = np.fromfile(folder / "validation.idx", dtype="<u8").tolist()
            self._packed = _pack(self._tokens, self._learned, self._document_ends, sequence, packing)
            self._held_out_packed = _pack(self._held_out, self._held_out_learned, held_out_ends, sequence, packing)
        self._rows, self._sequence, self._documents = rows, sequence, documents
        self._shifts = min(sequence, len(self._tokens) - sequence)
        self._windows = (len(self._tokens) - self._shifts) // sequence
        self._order = _hash_key("order", manifest["fingerprint"], seed)
        self._shift = _hash_key("shift", manifest["fingerprint"], seed)

    def batch(self, step: int) -> PlainBatch:
        """Returns a step's global batch."""
        numbers = range(step * self._rows, (step + 1) * self._rows)
        return _batch([self._packed_row(n) if self._packed else self._row(self._start(n)) for n in numbers])

    def validation_batches(self, rows: int) -> Iterator[PlainBatch]:
        """Yields the first ``rows`` rows of the held-out text, one at a time; a last window may be short."""
        if self._packed:
            yield from (_batch([row]) for row in self._held_out_packed[:rows])
            return
        for row in range(rows):
            text = self._held_out[row * self._sequence : (row + 1) * self._sequence + 1].astype(np.int64).tolist()
            if len(text) < 2:
                return
            learned = self._held_out_learned[row * self._sequence + 1 :]
            targets = [token if is_learned else IGNORED for token, is_learned in zip(text[1:], learned)]
            yield PlainBatch(tokens=torch.tensor([text[:-1]]), targets=torch.tensor([targets]), positions=None)

    def _start(self, number: int) -> int:
        """Returns where in the text the run's row of this number begins."""
        epoch, position = divmod(number, self._windows)
        window = _shuffled(position, self._windows, _mix((epoch + self._order) % _WORD))
        return window * self._sequence + _mix((epoch + self._shift) % _WORD) % self._shifts

    def _packed_row(self, number: int) -> PlainRow:
        """Returns the run's row of this number, of those that hold whole documents; each comes once an epoch."""
        epoch, position = divmod(number, len(self._packed))
        return self._packed[_shuffled(position, len(self._packed), _mix((epoch + self._order) % _WORD))]

    def _row(self, start: int) -> PlainRow:
        """Returns (tokens, targets, positions) of a row; a document's last token predicts nothing."""
        text = self._tokens[start : start + self._sequence + 1].astype(np.int64).tolist()
        tokens, positions = text[:-1], list(range(self._sequence))
        learned = self._learned[start + 1 :]
        targets = [token if is_learned else IGNORED for token, is_learned in zip(text[1:], learned)]
        if self._documents:
            document_starts = {
                document_end - start
                for document_end in self._document_ends
                if start < document_end <= start + self._sequence
            }
            position = 0
            for index in range(self._sequence):
                position = 0 if index in document_starts or index == 0 else position + 1
                positions[index] = position
                if index + 1 in document_starts:  # the last token of a document predicts nothing of the next one
                    targets[index] = IGNORED
        return tokens, targets, positions


def _batch(rows: list[PlainRow]) -> PlainBatch:
    tokens, targets, positions = zip(*rows)
    has_documents = any(row[-1] != len(row) - 1 for row in positions)
    return PlainBatch(
        tokens=torch.tensor(tokens),
        targets=torch.tensor(targets),
        positions=torch.tensor(positions) if has_documents else None,
    )


def _read_learned(path: Path, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns of each token whether it is learned, (count,) bool: all, unless a file says which are."""
    if not path.exists():
        return np.ones(count, dtype=np.bool_)
    learned = np.zeros(count, dtype=np.bool_)
    for start, stop in np.fromfile(path, dtype="<u8").reshape(-1, 2).tolist():
        learned[start:stop] = True
    return learned


def _pack(
    tokens: np.ndarray[Any, Any],
    learned: np.ndarray[Any, np.dtype[np.bool_]],
    ends: list[int],
    sequence: int,
    packing: str,
) -> list[PlainRow]:
    """Returns rows that hold documents from their start; one of more than S + 1 tokens is cut there.

    The longest is placed first, in the fullest row that has room for it; of rows that are equally full in the one that
    was last added to, and in a new row where none has room. In a row they stand in the order of the text.
    """
    documents = []
    for start, stop in zip([0, *ends], ends):
        text = tokens[start : min(stop, start + sequence + 1)].astype(np.int64).tolist()
        targets = [token if is_learned else IGNORED for token, is_learned in zip(text[1:], learned[start + 1 : stop])]
        if any(target != IGNORED for target in targets):
            documents.append((text[:-1], targets))
    if packing == "single":
        return [_filled_up([document], sequence) for document in documents]
    rows: list[list[int]] = []
    by_used: list[list[int]] = [[] for _ in range(sequence + 1)]  # rows by their tokens, the last added to at the end
    for number in sorted(range(len(documents)), key=lambda number: -len(documents[number][0])):
        length = len(documents[number][0])
        used = next((used for used in range(sequence - length, 0, -1) if by_used[used]), 0)
        if not used:
            rows.append([])
        row = by_used[used].pop() if used else len(rows) - 1
        rows[row].append(number)
        by_used[used + length].append(row)
    return [_filled_up([documents[number] for number in sorted(row)], sequence) for row in rows]


def _filled_up(documents: list[tuple[list[int], list[int]]], sequence: int) -> PlainRow:
    """Returns a row of documents, each with positions from 0; those of the last go on over what fills the row up."""
    tokens, targets, positions = list[int](), list[int](), list[int]()
    for text, predicted in documents:
        tokens, targets, positions = tokens + text, targets + predicted, positions + list(range(len(text)))
    spare = sequence - len(tokens)
    positions += range(positions[-1] + 1, positions[-1] + 1 + spare)
    return tokens + [0] * spare, targets + [IGNORED] * spare, positions


def _hash_key(*fields: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:8], "little")


def _mix(value: int) -> int:
    """Returns SplitMix64's output for a state. Source: Steele, Lea and Flood (2014), the 64-bit variant."""
    value = (value + 0x9E3779B97F4A7C15) % _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _WORD
    return value ^ (value >> 31)


def _shuffled(index: int, size: int, key: int) -> int:
    """Returns where a keyed permutation of 0 to ``size`` - 1 puts a place."""
    # The smallest near-square grid with at least `size` cells: halves of a Feistel network are its row and column.
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        column, row = index % width, index // width
        for round_index in range(_ROUNDS):
            salt = _mix((key + round_index) % _WORD)
            if round_index % 2:
                row = (row + _mix(column ^ salt) % height) % height
            else:
                column = (column + _mix(row ^ salt) % width) % width
        index = column + row * width
        # Cycle walking: a cell outside is shuffled again until one inside comes, which keeps it a permutation.
        if index < size:
            return index
