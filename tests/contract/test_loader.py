"""The loader's contract: a pure function of (fingerprint, seed, step, index, count) over a stream with documents."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.loader import IGNORED, Loader, evaluation_batches, evaluation_steps
from meshwright.data.tokens import TokenStream
from meshwright.errors import DataError
from meshwright.spec.layout import Layout
from meshwright.train.feed import TokenFeed


def make_split(length: int = 5003, documents: int = 60, fingerprint: str = "f", seed: int = 0) -> TokenStream:
    """A stream whose tokens are their own places, so that a test reads off where each came from."""
    inner = np.random.default_rng(seed).choice(np.arange(1, length), documents - 1, replace=False)
    return TokenStream(
        name="train",
        tokens=np.arange(length, dtype="<u4"),
        ends=np.sort(np.append(inner, length)).astype(np.int64),
        text_bytes=length * 3,
        fingerprint=fingerprint,
    )


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_any_number_of_readers_gives_the_same_global_batch(count: int, masked: bool) -> None:
    split = make_split()
    whole = Loader(split, rows=24, sequence=16, seed=5, mask_documents=masked)
    readers = [
        Loader(split, rows=24, sequence=16, seed=5, index=i, count=count, mask_documents=masked) for i in range(count)
    ]
    for step in (0, 3, 12, 13, 999):  # 12 and 13 hold the border of the first epoch
        expected, parts = whole.batch(step), [reader.batch(step) for reader in readers]
        for field in ("tokens", "targets", "positions", "row_ids"):
            assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(expected, field))
        assert sum(part.targets_count for part in parts) == expected.targets_count == whole.global_targets(step)
        assert all(reader.global_targets(step) == expected.targets_count for reader in readers)


def test_uneven_shares_give_the_same_global_batch() -> None:
    split = make_split()
    expected = Loader(split, rows=10, sequence=16, seed=5).batch(7)
    parts = [
        Loader(split, rows=10, sequence=16, seed=5, row_range=bounds).batch(7) for bounds in ((0, 1), (1, 7), (7, 10))
    ]
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), expected.tokens)
    assert np.array_equal(np.concatenate([part.row_ids for part in parts]), expected.row_ids)


def test_an_epoch_has_every_window_once_and_the_next_another_order_and_origin() -> None:
    split = make_split()
    loader = Loader(split, rows=1, sequence=16, seed=1)
    rows = loader.epoch_rows
    first, second = (
        np.array([loader.batch(step).tokens[0, 0] for step in range(e * rows, (e + 1) * rows)]) for e in (0, 1)
    )
    for starts in (first, second):
        assert np.array_equal(np.sort(starts), starts.min() + 16 * np.arange(rows))
        assert starts.max() + 17 <= len(split.tokens)
    assert first.min() != second.min()
    assert not np.array_equal(np.argsort(first), np.argsort(second))
    assert loader.epoch(rows) == 1.0


def test_windows_are_consecutive_tokens_and_targets_the_next_ones() -> None:
    batch = Loader(make_split(), rows=6, sequence=32, seed=2, mask_documents=False).batch(4)
    assert np.array_equal(batch.tokens, batch.tokens[:, :1] + np.arange(32))
    assert np.array_equal(batch.targets, batch.tokens + 1)
    assert np.array_equal(batch.positions, np.tile(np.arange(32), (6, 1)))
    assert batch.targets_count == 6 * 32
    assert {array.dtype for array in (batch.tokens, batch.targets, batch.positions)} == {np.dtype(np.int64)}


def test_masks_and_positions_follow_the_documents() -> None:
    """Against the definition, token by token."""
    split = make_split(documents=400)
    ends = set(split.ends.tolist())
    for step in range(12):
        batch = Loader(split, rows=8, sequence=24, seed=3).batch(step)
        for tokens, targets, positions in zip(batch.tokens, batch.targets, batch.positions):
            position = -1
            for column, place in enumerate(tokens.tolist()):
                position = 0 if column == 0 or place in ends else position + 1
                assert positions[column] == position
                assert targets[column] == (IGNORED if place + 1 in ends else place + 1)
        assert batch.targets_count == int((batch.targets != IGNORED).sum())


def test_the_order_depends_on_seed_and_text_and_nothing_else() -> None:
    def order(seed: int, fingerprint: str) -> list[int]:
        loader = Loader(make_split(fingerprint=fingerprint), rows=16, sequence=16, seed=seed)
        return loader.batch(0).tokens[:, 0].tolist()

    assert order(1, "f") == order(1, "f")
    assert len({tuple(order(*pair)) for pair in ((1, "f"), (2, "f"), (1, "g"))}) == 3


def test_the_order_is_written_down() -> None:
    """Frozen: a run that resumes with a later version must go on with the same rows."""
    batch = Loader(make_split(), rows=6, sequence=16, seed=1).batch(100)
    assert batch.row_ids.tolist() == [600, 601, 602, 603, 604, 605]
    assert batch.tokens[:, 0].tolist() == [3832, 280, 4744, 4216, 2616, 4856]


def test_a_resumed_loader_goes_on_with_the_same_rows() -> None:
    from meshwright.data.prefetch import Prefetcher

    loader = Loader(make_split(), rows=4, sequence=16, seed=9)
    with Prefetcher(loader, to_device=lambda batch: batch) as reader:
        seen = [next(reader).tokens.tolist() for _ in range(8)]
        state = reader.step
    with Prefetcher(loader, start_step=5, to_device=lambda batch: batch) as reader:
        assert [next(reader).tokens.tolist() for _ in range(3)] == seen[5:]
        assert reader.step == state == 8


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 34])
def test_a_split_of_hardly_one_row_stays_inside(length: int) -> None:
    loader = Loader(make_split(length, 2), rows=2, sequence=16, seed=0)
    assert loader.epoch_rows >= 1
    for step in range(20):
        assert loader.batch(step).tokens.max() + 1 < length


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("length", [2, 17, 257, 1000])
def test_evaluation_covers_the_split_exactly_once(length: int, count: int) -> None:
    split = make_split(length, 2)
    readers = [list(evaluation_batches(split, rows=8, sequence=16, index=i, count=count)) for i in range(count)]
    assert {len(batches) for batches in readers} == {evaluation_steps(split, 8, 16)}
    batches = [batch for reader in readers for batch in reader]
    assert {batch.tokens.shape for batch in batches} == {(8 // count, 16)}
    targets = np.concatenate([batch.targets[batch.targets != IGNORED] for batch in batches])
    assert np.array_equal(np.sort(targets), np.arange(1, length))
    for batch in batches:
        assert np.array_equal((batch.tokens + 1)[batch.targets != IGNORED], batch.targets[batch.targets != IGNORED])
        assert batch.targets_count == int((batch.targets != IGNORED).sum())
        assert np.array_equal(batch.positions[0], np.arange(16))
        assert np.array_equal(batch.row_ids == -1, (batch.targets == IGNORED).all(axis=1))


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 1000])
def test_every_layout_evaluates_the_same_rows(rows: int) -> None:
    """As many as are asked for, whatever a layout's micro-batches hold; what fills up a batch has no targets."""
    token_set: Any = SimpleNamespace(train=make_split(), validation=make_split(161, 2))
    for text in ("replicate=1", "replicate=2,microbatches=2", "replicate=4,microbatches=2", "replicate=2,rows=3-1"):
        layout, found, counts = Layout.parse(text), [], set()
        for rank in range(layout.world):
            with closing(
                TokenFeed(
                    token_set,
                    rows=8,
                    sequence=16,
                    seed=0,
                    span=layout.span(rank, 8),
                    micro=layout.microbatches,
                    mask_documents=True,
                    device=torch.device("cpu"),
                )
            ) as feed:
                batches = list(feed.evaluation(rows))
            counts.add(len(batches))
            found += [token for batch in batches for token in batch.targets[batch.targets != IGNORED].tolist()]
        assert sorted(found) == list(range(1, 1 + min(rows * 16, 160))) and len(counts) == 1


@pytest.mark.parametrize("masked", [True, False])
def test_micro_batches_have_the_positions_of_their_documents(masked: bool) -> None:
    """Those of the loader where a row has several documents that are kept apart; none where no mask is needed."""
    token_set: Any = SimpleNamespace(train=make_split())
    settings = {"rows": 8, "sequence": 16, "seed": 2, "mask_documents": masked}
    expected = Loader(token_set.train, **settings).batch(0)
    assert (expected.positions[:, -1] != 15).any() == masked
    with closing(TokenFeed(token_set, span=(0, 8), micro=2, device=torch.device("cpu"), **settings)) as feed:
        for part, rows in zip(feed.micro_batches(0), (slice(0, 4), slice(4, 8)), strict=True):
            assert np.array_equal(part.tokens, expected.tokens[rows])
            assert np.array_equal(part.targets, expected.targets[rows])
            if masked:
                assert np.array_equal(part.positions, expected.positions[rows])
            else:
                assert part.positions is None


def test_bad_shapes_are_refused_with_numbers() -> None:
    split = make_split()
    with pytest.raises(DataError, match="10 rows doesn't divide among 4 readers; use 8 rows"):
        Loader(split, rows=10, sequence=16, seed=0, index=0, count=4)
    with pytest.raises(DataError, match="reader index 4 of 4"):
        Loader(split, rows=8, sequence=16, seed=0, index=4, count=4)
    with pytest.raises(DataError, match=r"row range \(3, 9\) must lie inside the 8 rows"):
        Loader(split, rows=8, sequence=16, seed=0, row_range=(3, 9))
    with pytest.raises(DataError, match="has no effect beside row_range"):
        Loader(split, rows=8, sequence=16, seed=0, index=1, count=2, row_range=(0, 4))
    with pytest.raises(DataError, match="has 16 tokens, a row of sequence 16 needs 17"):
        Loader(make_split(16, 2), rows=1, sequence=16, seed=0)
    with pytest.raises(DataError, match="doesn't divide"):
        next(evaluation_batches(split, rows=3, sequence=16, index=0, count=2))
    with pytest.raises(DataError, match="nothing to evaluate"):
        next(evaluation_batches(make_split(1, 1), rows=2, sequence=16))
