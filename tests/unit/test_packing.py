"""Packed rows: every document once from its start, its targets, and rows as full as best fit makes them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.data.loader import IGNORED, Loader, evaluation_batches
from meshwright.data.packing import LearnedTokens, PackedRows
from meshwright.data.tokens import TokenStream
from meshwright.errors import DataError


def drawn(seed: int, documents: int = 80, longest: int = 40, answers: bool = True) -> TokenStream:
    """A stream whose tokens are their own places, with runs of answers drawn at any place."""
    draw = random.Random(seed)
    ends = np.cumsum([draw.randint(1, longest) for _ in range(documents)])
    length = int(ends[-1])
    edges = np.array(sorted(draw.sample(range(1, length), 2 * (length // 12)))).reshape(-1, 2)
    return TokenStream(
        name="train",
        tokens=np.arange(length, dtype="<u4"),
        ends=ends.astype(np.int64),
        text_bytes=length,
        fingerprint=str(seed),
        answers=edges.astype(np.int64) if answers else None,
    )


def plainly(split: TokenStream, sequence: int) -> dict[int, list[int]]:
    """By the first token of each document that is in a row: its targets there, one after the other."""
    learned = np.ones(len(split.tokens), dtype=bool)
    if split.answers is not None:
        learned[:] = False
        for start, stop in split.answers.tolist():
            learned[start:stop] = True
    rows, start = {}, 0
    for end in split.ends.tolist():
        targets = [at if learned[at] else IGNORED for at in range(start + 1, min(end, start + 1 + sequence))]
        if any(target != IGNORED for target in targets):
            rows[start] = targets
        start = end
    return rows


def unpacked(
    tokens: NDArray[np.int64], targets: NDArray[np.int64], positions: NDArray[np.int64]
) -> dict[int, list[int]]:
    """Takes a row apart again by its positions, without what fills it up."""
    starts = [*np.flatnonzero(positions == 0).tolist(), len(tokens)]
    found = {}
    for begin, end in itertools.pairwise(starts):
        first = int(tokens[begin])
        assert np.array_equal(positions[begin:end], np.arange(end - begin))
        places = int(np.count_nonzero(tokens[begin:end] == first + np.arange(end - begin)))
        assert not targets[begin + places : end].tolist() or (targets[begin + places : end] == IGNORED).all()
        found[first] = targets[begin : begin + places].tolist()
    return found


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_every_document_with_a_target_is_in_one_row_with_its_targets(seed: int, answers: bool) -> None:
    sequence = 8 + 5 * seed
    split = drawn(seed, answers=answers)
    packed, found = PackedRows(split, sequence), {}
    for row in range(packed.count):
        tokens, targets, positions = packed.read(row, IGNORED)
        assert len(tokens) == len(targets) == len(positions) == sequence
        assert int(np.count_nonzero(targets != IGNORED)) == packed.targets[row] > 0
        documents = unpacked(tokens, targets, positions)
        assert not documents.keys() & found.keys()
        found |= documents
    expected = plainly(split, sequence)
    assert found == expected
    whole = plainly(split, 1 << 20)
    count = sum(target != IGNORED for targets in whole.values() for target in targets)
    assert packed.left_out.all_targets == count
    assert packed.left_out.targets == count - int(packed.targets.sum())
    assert packed.left_out.without == len(split.ends) - len(whole)
    assert packed.left_out.unlearned == len(whole) - len(expected)
    assert packed.filled == pytest.approx(sum(map(len, expected.values())) / packed.count / sequence)


def learned_first(split: TokenStream) -> list[bool]:
    """Of each document whether its first token is in a run, which preparation never leaves there."""
    assert split.answers is not None
    starts = [0, *split.ends.tolist()[:-1]]
    return [any(run <= start < stop for run, stop in split.answers.tolist()) for start in starts]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_as_few_as_best_fit_decreasing_promises(seed: int) -> None:
    split = drawn(seed, documents=500, answers=False)
    packed = PackedRows(split, 64)
    lengths = np.diff(split.ends, prepend=0) - 1
    # Source: Johnson 1974: at most 11/9 of the fewest rows, and 4.
    fewest = -(-int(lengths.sum()) // 64)
    assert fewest <= packed.count <= 11 / 9 * fewest + 4
    assert packed.filled > 0.97


@pytest.mark.parametrize("seed", range(6))
def test_learned_tokens_are_counted_and_marked_in_any_range(seed: int) -> None:
    split = drawn(seed)
    assert split.answers is not None
    # Runs that touch, as two units leave them.
    runs = np.concatenate([split.answers, [[len(split.tokens) - 1, len(split.tokens)]]])
    marks = np.zeros(len(split.tokens), dtype=bool)
    for start, stop in runs.tolist():
        marks[start:stop] = True
    learned, draw = LearnedTokens(runs), random.Random(seed)
    starts = np.array([draw.randrange(len(marks)) for _ in range(200)])
    stops = np.array([draw.randrange(start, len(marks) + 1) for start in starts.tolist()])
    expected = [marks[start:stop] for start, stop in zip(starts.tolist(), stops.tolist())]
    assert learned.count(starts, stops).tolist() == [int(part.sum()) for part in expected]
    for start, stop, part in zip(starts.tolist(), stops.tolist(), expected):
        assert np.array_equal(learned.mask(start, stop), part)
    nothing = LearnedTokens(np.empty((0, 2), dtype=np.int64))
    assert nothing.count(starts, stops).sum() == 0 and not nothing.mask(3, 9).any()


@pytest.mark.parametrize("packs_whole", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_readers_gives_the_same_batches_and_counts(count: int, packs_whole: bool) -> None:
    split = drawn(3, documents=300)
    whole = Loader(split, rows=8, sequence=32, seed=5, packing="whole" if packs_whole else "stream")
    readers = [
        Loader(
            split, rows=8, sequence=32, seed=5, index=index, count=count, packing="whole" if packs_whole else "stream"
        )
        for index in range(count)
    ]
    for step in (0, 1, whole.epoch_rows // 8, 999):
        expected, parts = whole.batch(step), [reader.batch(step) for reader in readers]
        for field in ("tokens", "targets", "positions", "row_ids"):
            assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(expected, field))
        counts = int(np.count_nonzero(expected.targets != IGNORED))
        assert sum(part.targets_count for part in parts) == counts == expected.targets_count
        if packs_whole or not any(learned_first(split)):
            assert whole.global_targets(step) == counts


def test_an_epoch_has_every_packed_row_once_and_the_next_another_order() -> None:
    split = drawn(1)
    loader = Loader(split, rows=1, sequence=32, seed=1, packing="whole")
    epochs = [
        [loader.batch(epoch * loader.epoch_rows + row).tokens.tobytes() for row in range(loader.epoch_rows)]
        for epoch in (0, 1)
    ]
    assert set(epochs[0]) == set(epochs[1]) and len(set(epochs[0])) == loader.epoch_rows and epochs[0] != epochs[1]


def test_a_stream_ignores_what_is_no_answer_and_a_batch_of_questions_alone_counts_one() -> None:
    split = drawn(2)
    loader = Loader(split, rows=4, sequence=16, seed=0, mask_documents=False)
    assert split.answers is not None
    learned = LearnedTokens(split.answers)
    for step in range(8):
        batch = loader.batch(step)
        for tokens, targets in zip(batch.tokens, batch.targets):
            marks = learned.mask(int(tokens[0]) + 1, int(tokens[-1]) + 2)
            assert np.array_equal(targets, np.where(marks, tokens + 1, IGNORED))
        assert loader.global_targets(step) == batch.targets_count
    questions = TokenStream(
        name="train", tokens=split.tokens, ends=split.ends, text_bytes=1, fingerprint="q",
        answers=np.array([[len(split.tokens) - 1, len(split.tokens)]]),
    )  # fmt: skip
    empty = [step for step in range(5) if not Loader(questions, rows=1, sequence=16, seed=0).batch(step).targets_count]
    assert empty and Loader(questions, rows=1, sequence=16, seed=0).global_targets(empty[0]) == 1


@pytest.mark.parametrize("packs_whole", [True, False])
def test_evaluation_has_every_target_once(packs_whole: bool) -> None:
    split = drawn(4)
    packed = PackedRows(split, 64) if packs_whole else None
    targets = [
        target
        for index in range(2)
        for batch in evaluation_batches(split, rows=4, sequence=64, index=index, count=2, packed=packed)
        for target in batch.targets[batch.targets != IGNORED].tolist()
    ]
    assert split.answers is not None
    learned = [at for start, stop in split.answers.tolist() for at in range(start, stop)]
    firsts = {0, *split.ends.tolist()} if packs_whole else {0}
    assert sorted(targets) == sorted(set(learned) - firsts) and len(targets) == len(set(targets))


def test_rows_without_any_target_are_refused() -> None:
    split = drawn(0)
    nothing = TokenStream(
        name="validation", tokens=split.tokens, ends=split.ends, text_bytes=1, fingerprint="n",
        answers=np.empty((0, 2), dtype=np.int64),
    )  # fmt: skip
    with pytest.raises(DataError, match="no document of the validation split has a target in its first 17 tokens"):
        PackedRows(nothing, 16)


@pytest.mark.parametrize("runs", [[[0, 3]], [[5, 5]], [[5, 4]], [[3, 9], [8, 12]], [[3, 1 << 40]]])
def test_runs_that_cant_be_are_refused(runs: list[list[int]]) -> None:
    split = drawn(0)
    damaged = TokenStream(
        name="train", tokens=split.tokens, ends=split.ends, text_bytes=1, fingerprint="d",
        answers=np.array(runs, dtype=np.int64),
    )  # fmt: skip
    for packs_whole in (True, False):
        with pytest.raises(DataError, match="answers aren't runs of"):
            Loader(damaged, rows=1, sequence=16, seed=0, packing="whole" if packs_whole else "stream")


def test_single_rows_hold_one_document_each_and_count_positions_without_a_break() -> None:
    split = drawn(5)
    packed, expected = PackedRows(split, 24, single=True), plainly(split, 24)
    assert packed.count == len(expected)
    for row, (first, targets) in enumerate(expected.items()):
        tokens, row_targets, positions = packed.read(row, IGNORED)
        assert tokens[0] == first and row_targets.tolist() == targets + [IGNORED] * (24 - len(targets))
        assert positions.tolist() == list(range(24))
