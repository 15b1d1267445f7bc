"""Answers in tokens: which tokens of a text are to be learned where only answers are, as runs of a token stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.selection import TextSpan
from meshwright.data.shards import shard_answers, shard_documents

NO_RUNS: NDArray[np.int64] = np.empty((0, 2), dtype="<i8")
"""Runs of no token."""


class AnswerMarks:
    """Marks the tokens of a unit, span after span.

    A token is an answer's where one of its characters is, as in transformers' `apply_chat_template`; the first of a
    document never is, since nothing is there to predict it from.
    """

    def __init__(self, directory: Path, begin_count: int = 0) -> None:
        """Begins without a token.

        Args:
            directory: the working directory.
            begin_count: tokens that go before a document that needs them.
        """
        self._directory, self._begin_count = directory, begin_count
        self._shard = -1
        self._document_starts: frozenset[int] = frozenset()
        self._answers = NO_RUNS
        self._answers_at_end = False
        self._marks: list[NDArray[np.bool_]] = []

    def add(self, span: TextSpan, text: str, offsets: NDArray[np.int64]) -> None:
        """Marks the tokens of a span.

        Args:
            span: the text's place in its shard.
            text: of the span.
            offsets: (tokens, 2), of each token the first character of the text and the one after its last.
        """
        self._load(span.shard)
        first = int(np.searchsorted(self._answers[:, 1], span.start, side="right"))
        after = int(np.searchsorted(self._answers[:, 0], span.stop, side="left"))
        starts, stops = _characters(text, self._answers[first:after] - span.start).T
        # An answer without a character, which is at the end of its text: its end token alone is learned.
        ends_empty = after < len(self._answers) and bool((self._answers[after] == span.stop).all())
        # The first range that ends behind the token's start is the only one that it may touch.
        nearest = np.searchsorted(stops, offsets[:, 0], side="right")
        may_touch = np.flatnonzero(nearest < len(starts))
        is_answer = np.zeros(len(offsets), dtype=bool)
        is_answer[may_touch] = starts[nearest[may_touch]] < offsets[may_touch, 1]
        begins = self._begin_count if span.needs_begin else 0
        if len(is_answer) and not begins and span.start in self._document_starts:
            is_answer[0] = False
        self._marks += [np.zeros(begins, dtype=bool), is_answer]
        self._answers_at_end = ends_empty or (len(stops) > 0 and int(stops[-1]) >= len(text.rstrip()))

    def add_end(self) -> None:
        """Marks the end token behind the last span, which is learned where that ends with an answer."""
        self._marks.append(np.array([self._answers_at_end]))

    def runs(self) -> NDArray[np.int64]:
        """Returns the marked tokens as (runs, 2) int64: first token of each run and the one after its last."""
        marks = np.concatenate([[False], *self._marks, [False]])
        return np.flatnonzero(marks[1:] != marks[:-1]).reshape(-1, 2).astype("<i8")

    def _load(self, shard: int) -> None:
        """Loads a shard's answers, (ranges, 2) int64 bytes of its text, and the first bytes of its documents."""
        if shard == self._shard:
            return
        sizes = shard_documents(self._directory, shard)["bytes"]
        self._document_starts = frozenset((np.cumsum(sizes) - sizes).tolist())
        self._answers = np.fromfile(shard_answers(self._directory, shard), dtype="<i8").reshape(-1, 2)
        self._shard = shard


def _characters(text: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the characters of a text that some bytes begin, of any shape; those of bytes outside are its ends."""
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    # Every byte but those that continue a character begins one.
    begun = np.concatenate([[0], np.cumsum((data & 0xC0) != 0x80)])
    return np.asarray(begun[np.clip(places, 0, len(data))], dtype=np.int64)
