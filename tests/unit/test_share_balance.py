"""Rows follow the speed of their readers: the arithmetic against trying everything, the feed's rows, the refusals."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.errors import ConfigError, PlanError
from meshwright.spec.balanced_shares import balanced_shares
from meshwright.spec.layout import Layout
from meshwright.train.config import TrainConfig
from meshwright.train.share_balance import LEAST_GAIN, RankPace, ShareDecision, check_rebalance


def slowest(shares: list[int], costs: list[float]) -> float:
    return max(rows * cost for rows, cost in zip(shares, costs))


@pytest.mark.parametrize("seed", range(60))
def test_no_other_shares_are_faster(seed: int) -> None:
    draw = random.Random(seed)
    readers, unit = draw.randint(2, 4), draw.choice((1, 1, 2))
    rows = unit * draw.randint(readers, 12)
    costs = [draw.uniform(0.1, 3.0) for _ in range(readers)]
    limits = [draw.randint(unit, rows) for _ in range(readers)]
    shares = balanced_shares(costs, limits, rows, unit)
    every = [
        list(candidate)
        for candidate in itertools.product(range(unit, rows + 1, unit), repeat=readers)
        if sum(candidate) == rows
    ]
    allowed = [item for item in every if all(share <= max(unit, limit) for share, limit in zip(item, limits))]
    assert sum(shares) == rows and min(shares) >= unit and all(share % unit == 0 for share in shares)
    assert slowest(shares, costs) == pytest.approx(min(slowest(item, costs) for item in allowed or every))
    assert not allowed or shares in allowed


def measured(seconds: float, row_limit: int = 99, noise: float = 0.0) -> RankPace:
    return RankPace(seconds=(seconds,), row_limit=row_limit, noise=noise)


def test_shares_change_only_where_it_is_worth_it() -> None:
    decision = ShareDecision(reader_of=(0, 1), shares=(8, 8), unit=1, every=3)
    assert decision.decide([measured(1.0), measured(1.0 + LEAST_GAIN)], 7) is None
    # A fifth less would be worth it, and is no more than what chance makes of three steps of such a clock.
    assert decision.decide([measured(1.0, noise=0.1), measured(1.6)], 7) is None
    change = decision.decide([measured(1.0), measured(3.0)], 7)
    assert change is not None and change.shares == (12, 4) and change.first_step == 7
    assert change.expected_s == pytest.approx(1.5) and change.seconds == (1.0, 3.0)
    # The load is gone: the same rows cost the same again.
    back = decision.decide([measured(1.5), measured(0.5)], 20)
    assert back is not None and back.shares == (8, 8)


def test_the_slowest_and_the_fullest_rank_of_a_reader_count() -> None:
    # Two readers of two ranks each, as under tp=2: rank 3 is slow, rank 0 has memory for nine rows.
    decision = ShareDecision(reader_of=(0, 0, 1, 1), shares=(8, 8), unit=1, every=5)
    change = decision.decide([measured(0.5, 9), measured(1.0), measured(1.0), measured(3.0)], 0)
    assert change is not None and change.seconds == (1.0, 3.0) and change.shares == (9, 7)


def test_a_clock_that_stood_still_changes_nothing() -> None:
    decision = ShareDecision(reader_of=(0, 1), shares=(8, 8), unit=1, every=5)
    assert decision.decide([measured(0.0), measured(3.0)], 0) is None


@pytest.mark.parametrize(
    ("layout", "batch", "why"),
    [
        ("tp=2", 8, "has one reader"),
        ("replicate=2,compile=true", 8, "compile=true"),
        ("islands=2", 8, "agree on nothing"),
        ("replicate=2,microbatches=4", 8, "none can be moved"),
    ],
)
def test_what_cannot_be_balanced_is_refused(layout: str, batch: int, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_rebalance(TrainConfig(batch=batch, rebalance=5), Layout.parse(layout))
    check_rebalance(TrainConfig(batch=batch), Layout.parse(layout))


def test_whole_rows_of_a_model_stay_together() -> None:
    with pytest.raises(PlanError, match="units of 4"):
        check_rebalance(TrainConfig(batch=8, rebalance=5), Layout.parse("replicate=2"), unit=4)
    with pytest.raises(ConfigError, match="between decisions"):
        TrainConfig(rebalance=-1).check()
