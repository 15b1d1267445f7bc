from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from meshwright.data.loader import Batch
from meshwright.data.prefetch import Prefetcher
from meshwright.errors import DataError


class Steps:
    """A loader that counts, and fails or hangs at one step."""

    def __init__(self, fails_at: int = -1, hangs_at: int = -1) -> None:
        self.fails_at, self.hangs_at, self.read = fails_at, hangs_at, 0
        self.hangs, self.go = threading.Event(), threading.Event()

    def batch(self, step: int) -> Batch:
        if step == self.fails_at:
            raise DataError("the disk is gone")
        if step == self.hangs_at:
            self.hangs.set()
            self.go.wait(100.0)
        self.read += 1
        rows = np.full((2, 4), step, dtype=np.int64)
        return Batch(step=step, tokens=rows, targets=rows, positions=rows, row_ids=rows[:, 0], targets_count=8)


def number(batch: Batch) -> int:
    return batch.step


def test_batches_come_in_order_from_the_start_step_and_no_more_than_depth_ahead() -> None:
    loader = Steps()
    with Prefetcher(loader, start_step=3, depth=2, to_device=number) as reader:
        assert [next(reader) for _ in range(5)] == [3, 4, 5, 6, 7]
        time.sleep(0.1)
        assert loader.read <= 5 + 2 + 1
        assert reader.step == 8


def test_an_error_of_the_loader_comes_out_at_its_step() -> None:
    with Prefetcher(Steps(fails_at=2), to_device=number) as reader:
        assert [next(reader), next(reader)] == [0, 1]
        with pytest.raises(DataError, match="the disk is gone"):
            next(reader)
        with pytest.raises(DataError, match="closed"):
            next(reader)


def test_a_wait_has_a_limit() -> None:
    loader = Steps(hangs_at=1)
    with Prefetcher(loader, to_device=number, timeout_s=0.1) as reader:
        assert loader.hangs.wait(100.0), "the batch before is there by then"
        next(reader)
        with pytest.raises(DataError, match=r"no batch for step 1 within 0\.1 s"):
            next(reader)
        loader.go.set()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_close_ends_the_thread(taken: int) -> None:
    before = set(threading.enumerate())
    reader = Prefetcher(Steps(), to_device=number)
    for _ in range(taken):
        next(reader)
    reader.close()
    reader.close()
    assert set(threading.enumerate()) <= before


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="depth of 0"):
        Prefetcher(Steps(), depth=0)
