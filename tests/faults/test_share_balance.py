"""Rows move away from a rank that another program slows down and back to it, and training stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data.loader import Loader
from meshwright.data.tokens import MANIFEST, TokenSet
from meshwright.train import share_balance
from meshwright.train.feed import TokenFeed
from meshwright.train.step import Stepper
from tests.runs import call, curve, events, words, write_corpus
from tests.tiers import cases

ROW_S = 0.02
"""Seconds that a row takes on a rank that nobody slows down: far above what the tiny model takes."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("balance")
    write_corpus(root / "corpus.txt")
    return root


def slowed(until_step: int, factor: float, slow_reader: int, *, real: bool = False) -> Callable[[], None]:
    """Returns what makes every row cost time, more of it for one reader up to a step.

    Args:
        until_step: first step of the same cost for all.
        factor: of the slow reader's rows before it.
        slow_reader: place of the reader.
        real: whether ranks sleep that long and measure themselves. Otherwise they are told these times: of more ranks
            than cores, what is measured is mostly how they are scheduled.
    """

    def plant() -> None:
        run, planted_s = Stepper.run, [0.0]

        def run_slowly(self: Stepper, step: int, batches, *more, **named):  # type: ignore[no-untyped-def]
            assert self.program.mesh is not None
            reader = self.program.mesh.layout.reader(self.program.mesh.rank)[0]
            rows = sum(len(batch.tokens) for batch in batches)
            planted_s[0] = rows * ROW_S * (factor if reader == slow_reader and step < until_step else 1.0)
            if real:
                time.sleep(planted_s[0])
            return run(self, step, batches, *more, **named)

        Stepper.run = run_slowly  # type: ignore[method-assign]
        if not real:
            share_balance.busy_seconds = lambda record: planted_s[0]

    return plant


@pytest.mark.parametrize(
    ("layout", "devices", "more"),
    cases(
        [
            ("replicate=2,microbatches=2,precision=float64", 2, ("--model.dropout", "0.1")),
            ("shard=2,zero=3,precision=float64", 2, ()),
            ("replicate=2,pp=2,microbatches=2,precision=float64", 4, ()),
            # Readers that keep their rows gather with those whose rows change.
            ("shard=3,pp=2,zero=2,microbatches=2,precision=float64", 6, ("--train.batch", "24")),
        ]
    ),
)
def test_rows_follow_the_speed_and_the_curve_stays(
    layout: str, devices: int, more: tuple[str, ...], root: Path
) -> None:
    name = f"{devices}-{'z' if 'shard' in layout else 'r'}"
    options = ("--train.steps", "44", "--checkpoint.every", "0", "--train.batch", "16", *more)
    argv = words(root, f"even-{name}", *options, layout=layout, devices=devices)
    assert call(argv, root / "even.log")[0] == 0, (root / "even.log").read_text()
    argv = words(root, f"moved-{name}", *options, "--train.rebalance", "3", layout=layout, devices=devices)
    plant = slowed(until_step=22, factor=3.0, slow_reader=1)
    assert call(argv, root / "moved.log", before=plant)[0] == 0, (root / "moved.log").read_text()
    changes = events(root / f"moved-{name}", "shares_changed")
    shares = [change["shares"] for change in changes]
    assert all(sum(share) == sum(shares[0]) for share in shares)
    # Away from the slow reader soon, and when it is as fast as the others, back to where they were.
    assert changes[0]["first_step"] <= 12 and shares[0][0] > shares[0][1], changes
    assert changes[-1]["first_step"] > 22 and len(set(shares[-1])) == 1, changes
    # The same training: the order of a sum in float64 is all that differs.
    moved, even = (list(curve(root / f"{run}-{name}").values()) for run in ("moved", "even"))
    np.testing.assert_allclose(moved, even, rtol=1e-9)


def test_a_reader_that_is_slow_by_the_clock_gives_rows_away(root: Path) -> None:
    options = ("--train.steps", "24", "--checkpoint.every", "0", "--train.batch", "16", "--train.rebalance", "3")
    argv = words(root, "clock", *options, layout="replicate=2,precision=float64", devices=2)
    plant = slowed(until_step=24, factor=3.0, slow_reader=1, real=True)
    assert call(argv, root / "clock.log", before=plant)[0] == 0, (root / "clock.log").read_text()
    shares = [change["shares"] for change in events(root / "clock", "shares_changed")]
    # Waits aren't compute: by the wall's clock both ranks' steps last equally long, and no row would move.
    assert shares and shares[0][0] > shares[0][1], shares


def test_changed_spans_cover_every_batch_once(root: Path) -> None:
    assert call(words(root, "one", "--train.steps", "3"), root / "one.log")[0] == 0
    prepared = next(path.parent for path in (root / "prepared").rglob(MANIFEST))
    token_set = TokenSet.open(prepared)
    settings = {"rows": 8, "sequence": 16, "seed": 3, "micro": 1, "mask_documents": True, "device": torch.device("cpu")}
    feeds = [TokenFeed(token_set, span=span, **settings) for span in ((0, 4), (4, 8))]  # type: ignore[arg-type]
    whole = Loader(token_set.train, rows=8, sequence=16, seed=3)
    try:
        first = 0
        for step in range(12):
            if step == 2:
                first = feeds[0].next_unread
                for feed, span in zip(feeds, ((0, 7), (7, 8))):
                    feed.change_span(first, span)
            rows = [np.concatenate([batch.tokens.numpy() for batch in feed.micro_batches(step)]) for feed in feeds]
            assert [len(part) for part in rows] == ([7, 1] if step >= first > 0 else [4, 4])
            np.testing.assert_array_equal(np.concatenate(rows), whole.batch(step).tokens)
        with pytest.raises(AssertionError, match="may be read"):
            feeds[0].change_span(feeds[0].next_step, (0, 4))
    finally:
        for feed in feeds:
            feed.close()
