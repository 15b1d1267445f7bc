"""Flipped bits at random places are noticed, or cost the run nothing; `python -m tests.faults.flips` tries hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.flips import draw_cases, judge_cases
from tests.tiers import cases

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "numbers", "noticed"),
    cases(
        [
            ("replicate=1", (12, 78), {12, 78}),
            ("replicate=2", (1, 7, 31), {1, 7, 31}),
            ("shard=2,zero=3", (2, 74), {74}),
            ("tp=2", (45, 129), {45, 129}),
            ("pp=2,microbatches=2", (10, 124), {124}),
            ("shard=2,replicate=2,zero=3", (5, 11), {5, 11}),
        ]
    ),
)
def test_a_flip_is_noticed_or_harmless(layout: str, numbers: tuple[int, ...], noticed: set, tmp_path: Path) -> None:
    """Of seed 1; without bounds of what updates can make, 12, 78, 124 and 129 were kept in checkpoints unseen."""
    chosen = [case for case in draw_cases(200, 1) if case.number in numbers]
    assert {case.layout for case in chosen} == {layout}
    found = {finding.case.number: finding for finding in judge_cases(tmp_path, chosen)}
    assert sorted(found) == sorted(numbers)
    assert all(one.verdict in ("noticed", "harmless") for one in found.values()), found
    assert {number for number, one in found.items() if one.verdict == "noticed"} == noticed
