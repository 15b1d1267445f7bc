"""Whole balancers on simulated readers: no clock and no process, every rank's hook driven step by step.

The speeds are known here, so the shares are held against the best of all shares, tried one by one.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.events import StepRecord
from meshwright.spec.layout import Layout
from meshwright.train import share_balance
from meshwright.train.config import TrainConfig
from meshwright.train.feed import AHEAD
from meshwright.train.hooks import StepInfo
from meshwright.train.share_balance import ShareBalancer, ShareChange

Costs = Callable[[int], Sequence[float]]
"""Seconds of a row on each reader, by step."""
LOADED, UNLOADED = 40, 120
"""First steps with and without another program on one reader's core."""
SEEN = threading.local()
"""Most rows that this thread's reader has had, by which its memory has grown."""
BAR_STEPS, BAR = 30, 1.10
"""Steps within which a step takes at most this many times the best static split's."""


@pytest.fixture(autouse=True)
def ample_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory limits no reader, unless a test says so; the machine's own figures are read file by file each time."""
    monkeypatch.setattr(share_balance, "available_bytes", lambda: 2**40)


class Exchange:
    """All-gather between the threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30.0)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * size

    def of(self, rank: int) -> Any:
        def all_gather(values: torch.Tensor, mine: torch.Tensor) -> Any:
            self._slots[rank] = mine
            self._barrier.wait()
            values.copy_(torch.cat(self._slots))
            self._barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(size=self.size, all_gather=all_gather)


@dataclass
class FakeFeed:
    """The spans of a feed, with the real one's reading ahead."""

    next_step: int
    span: tuple[int, int]
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def next_unread(self) -> int:
        return self.next_step + AHEAD + 1

    def change_span(self, first_step: int, span: tuple[int, int]) -> None:
        assert first_step >= self.next_unread
        self.spans[first_step] = span


@dataclass
class Simulated:
    """What a simulated run did."""

    shares: list[list[int]]
    """Rows of each reader, by step."""
    changes: list[ShareChange]


def simulate(
    costs: Costs, rows: int, steps: int, *, every: int = 3, noise: float = 0.0, seed: int = 0, fixed_s: float = 0.0
) -> Simulated:
    """Runs the balancers of all readers against costs that they can't see, ``fixed_s`` of a step whatever its rows."""
    readers = len(costs(0))
    layout, config = Layout.parse(f"replicate={readers}"), TrainConfig(batch=rows, rebalance=every)
    exchange, changes = Exchange(readers), []
    taken: list[list[int]] = [[0] * readers for _ in range(steps)]
    errors: list[BaseException] = []

    def rank_loop(rank: int) -> None:
        draw = random.Random(seed * 100 + rank)
        held: list[tuple[int, ...]] = []
        SEEN.rows = 0
        feed = FakeFeed(0, layout.span(rank, rows))
        mesh = SimpleNamespace(
            layout=layout, rank=rank, device_type="cpu", world=exchange.of(rank), log=SimpleNamespace(drain=lambda: ())
        )
        program = SimpleNamespace(change_reader_shares=lambda shares: held.append(tuple(shares)))
        note = changes.append if rank == 0 else lambda change: None
        balancer = ShareBalancer(program, mesh, feed, config, note)  # type: ignore[arg-type]
        for step in range(steps):
            feed.span = feed.spans.get(step, feed.span)
            taken[step][rank] = feed.span[1] - feed.span[0]
            # What the random numbers follow are the rows of the very step.
            assert not held or held[-1][rank] == taken[step][rank]
            SEEN.rows = max(SEEN.rows, taken[step][rank])
            cost = costs(step)[rank] * draw.lognormvariate(0.0, noise)
            feed.next_step = step + 1
            balancer(StepInfo(step=step + 1, steps=steps, record=record(step, fixed_s + taken[step][rank] * cost),
                              validation_loss=None))  # fmt: skip

    def run_rank(rank: int) -> None:
        try:
            rank_loop(rank)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not errors, errors
    assert all(sum(shares) == rows for shares in taken), "a row was lost or read twice"
    return Simulated(taken, changes)


def record(step: int, busy_s: float) -> StepRecord:
    # A rank waits for the slowest, and for data: neither says anything of its speed.
    waits: dict[str, Any] = {"step_s": busy_s + 7.0, "parts": {"data": 7.0}}
    return StepRecord(
        step=step + 1, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, tokens_total=1, tokens_per_s=1.0,
        memory={"peak": 900 + 10 * SEEN.rows, "parameters": 900}, layout="", **waits,
    )  # fmt: skip


def seconds(shares: Sequence[int], costs: Sequence[float]) -> float:
    return max(share * cost for share, cost in zip(shares, costs))


@functools.cache
def best_static(costs: tuple[float, ...], rows: int, limit: int | None = None) -> float:
    """Returns a step's seconds of the best shares, by trying all; most steps have the costs of the one before."""
    most = rows if limit is None else limit
    first = itertools.product(range(1, most + 1), repeat=len(costs) - 1)
    every = [(*shares, rows - sum(shares)) for shares in first if 1 <= rows - sum(shares) <= most]
    return min(seconds(shares, costs) for shares in every)


def steps_to_bar(run: Simulated, costs: Costs, first: int, last: int) -> int:
    """Returns the steps from ``first`` on until each later one is within the bar."""
    rows = sum(run.shares[0])
    best = [best_static(tuple(costs(step)), rows) for step in range(last)]
    late = [s for s in range(first, last) if seconds(run.shares[s], costs(s)) > BAR * best[s]]
    return max(late, default=first - 1) + 1 - first


def loaded(readers: int, slow: int, factor: float = 2.0) -> Costs:
    """Returns costs of which one reader's is a multiple between `LOADED` and `UNLOADED`."""
    return lambda step: [factor if reader == slow and LOADED <= step < UNLOADED else 1.0 for reader in range(readers)]


@pytest.mark.parametrize(("readers", "rows"), [(2, 24), (2, 64), (3, 48)])
@pytest.mark.parametrize(("every", "noise"), [(3, 0.0), (3, 0.05), (5, 0.05)])
def test_rows_follow_a_load_and_come_back(readers: int, rows: int, every: int, noise: float) -> None:
    for seed in range(4 if noise else 1):
        costs = loaded(readers, slow=seed % readers)
        run = simulate(costs, rows, 190, every=every, noise=noise, seed=seed)
        assert not [change for change in run.changes if change.first_step < LOADED], "rows moved before the load"
        assert steps_to_bar(run, costs, LOADED, UNLOADED) <= BAR_STEPS, run.changes
        assert steps_to_bar(run, costs, UNLOADED, 190) <= BAR_STEPS, run.changes
        # There, back, and at most a correction of each.
        assert 2 <= len(run.changes) <= 4, run.changes


@pytest.mark.parametrize("readers", [2, 3, 4])
def test_noise_alone_moves_no_row_to_and_fro(readers: int) -> None:
    changes = [
        len(simulate(lambda step: [1.0] * readers, 16 * readers, 300, noise=noise, seed=seed).changes)
        for noise in (0.02, 0.05, 0.1, 0.2)
        for seed in range(4)
    ]
    # Without regard to noise it would be dozens each.
    assert sum(changes) <= 1, changes


def test_costs_that_do_not_grow_with_rows_settle() -> None:
    # A third of a step is the same whatever its rows: the law that takes all for rows' settles in few changes.
    costs = loaded(2, slow=1)
    run = simulate(costs, 32, 190, fixed_s=8.0, noise=0.02)
    assert 2 <= len(run.changes) <= 5, run.changes
    assert 8.0 + max(run.shares[-1]) <= BAR * (8.0 + 16.0)


def test_a_slow_drift_is_followed() -> None:
    def costs(step: int) -> list[float]:
        return [1.0, 1.0 + step / 200]

    run = simulate(costs, 64, 400, noise=0.03)
    late = [s for s in range(60, 400) if seconds(run.shares[s], costs(s)) > 1.15 * best_static(tuple(costs(s)), 64)]
    assert not late and len(run.changes) < 14, (late, len(run.changes))


def test_memory_limits_what_a_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A row takes 10 bytes. 40 are free at the even split, of which 90 % may be filled: 3 rows more than 12.
    monkeypatch.setattr(share_balance, "available_bytes", lambda: 160 - 10 * SEEN.rows)
    costs = loaded(2, slow=0, factor=4.0)
    run = simulate(costs, 24, 120)
    assert max(max(shares) for shares in run.shares) == 15
    assert seconds(run.shares[-1], costs(119)) == pytest.approx(best_static(tuple(costs(119)), 24, limit=15))
