"""Steps on a calibrated H100 take what was planned: rows of a real one, by the calibration that the same call made."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks.fit_device import Timed, read_rows
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALL = 12
"""The call whose calibration is kept."""
BOUND, MEDIAN = 0.08, 0.04
APART = {
    "gemma3 4 4096 precision=bf16": "reads a mask of its window, which no run does any more",
    "mixtral 4 4096 precision=bf16": "gathers its experts' tokens by a kernel that takes 28 of 116 ms",
    "0.4B 4 1024 replicate=1": "its products lie between sizes of which this calibration has none",
}
"""Cases beyond the bound, each with the reason."""
CASES = {timed.row["case"]: timed for timed in read_rows([BENCHMARKS / "h100.jsonl"], CALL)}
CHOSEN = ("1.1B 4 4096 precision=bf16", "mixtral 4 4096 precision=bf16,compile=true")
"""Those that every run of the tests prices: a second of a core each."""


@cache
def calibrated() -> Cluster:
    return Cluster.parse("1xh100").calibrated(Calibration.load(BENCHMARKS / "h100_calibration.json"))


def error(timed: Timed) -> float:
    return timed.price(calibrated(), MESHWRIGHT).price.step_s / float(timed.row["step_time_s"]) - 1


def test_there_are_rows_of_what_is_said_of_them() -> None:
    assert len(CASES) == 12 and CASES.keys() >= {*APART, *CHOSEN}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CHOSEN else pytest.mark.long) for case in CASES]
)
def test_a_step_takes_what_was_planned(case: str) -> None:
    off = abs(error(CASES[case]))
    assert off > BOUND if case in APART else off < BOUND, "a case that is planned well has no reason to stand apart"


@pytest.mark.long
def test_the_median_of_all_is_within_its_bound() -> None:
    assert statistics.median(abs(error(timed)) for timed in CASES.values()) < MEDIAN
