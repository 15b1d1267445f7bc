"""4,096 fake ranks: any rank of a 175 B model and of a mixture of 1 T is planned and built in seconds, as priced."""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

import pytest

from benchmarks import bench_scale
from meshwright.launch.contract import RankContext
from meshwright.parallel import build as builder
from tests.ranks.group import run_contexts
from tests.tiers import cases

RANKS = {"gpt3": (0, 1234, 4095), "mixture": (7, 2900, 4095)}


def work(context: RankContext, case: str) -> str:
    """Builds the ranks one after another in a process of its own; returns what was measured, as JSON."""
    warnings.simplefilter("ignore")
    builder.finalise_fsdp_shards = lambda module: None  # it gathers each unit once, which no fake rank can
    return json.dumps(bench_scale.measure(case, "", list(RANKS[case])))


@functools.cache
def measured(case: str) -> dict[str, Any]:
    (found,) = run_contexts(1, work, case, timeout=500)
    return json.loads(found)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "billions"), cases([("mixture", 1042.6), ("gpt3", 174.6)], (), extended=("mixture",)))
def test_a_rank_of_thousands_holds_what_was_priced(case: str, billions: float) -> None:
    found = measured(case)
    assert found["world"] == 4096 and found["parameters"] / 1e9 == pytest.approx(billions, abs=0.1)
    assert sorted(found["ranks"]) == sorted(str(rank) for rank in RANKS[case])
    for rank, row in found["ranks"].items():
        assert row["held"] == row["priced"] > 0, rank
    # Masters and two moments of the fullest rank.
    assert max(3 * row["held"] for row in found["ranks"].values()) <= found["fullest"]["memory"]["optimizer"]
    # Not a matter of the number of ranks: 0.8 s on an idle core.
    assert sum(found["seconds"][name] for name in ("price", "mesh", "build")) < 100.0
