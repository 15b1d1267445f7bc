"""4,096 fake ranks: any rank of a 175 B model and of a mixture of 1 T is planned and built in seconds, as priced."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RANKS = {"gpt3": (0, 1234, 4095), "mixture": (7, 2900, 4095)}


@functools.cache
def measured(case: str) -> dict[str, Any]:
    ranks = ",".join(str(rank) for rank in RANKS[case])
    words = ["-W", "ignore", "benchmarks/bench_scale.py", case, "--ranks", ranks, "--json"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(180)  # 20 s of one core, most of it for the sharding table of 96 heads; machines are shared
@pytest.mark.parametrize(("case", "billions"), [("gpt3", 174.6), ("mixture", 1042.6)])
def test_a_rank_of_thousands_holds_what_was_priced(case: str, billions: float) -> None:
    found = measured(case)
    assert found["world"] == 4096 and found["parameters"] / 1e9 == pytest.approx(billions, abs=0.1)
    assert sorted(found["ranks"]) == sorted(str(rank) for rank in RANKS[case])
    for rank, row in found["ranks"].items():
        assert row["held"] == row["priced"] > 0, rank
    # Masters and two moments of the fullest rank.
    assert max(3 * row["held"] for row in found["ranks"].values()) <= found["fullest"]["memory"]["optimizer"]
    # Not a matter of the number of ranks: 0.8 s on an idle core.
    assert sum(found["seconds"][name] for name in ("price", "mesh", "build")) < 30.0
