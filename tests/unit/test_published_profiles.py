"""Profiles for runs of which no row was fitted: one between frameworks, judged on each that it leaves out."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import framework_profiles
from benchmarks.published.__main__ import read_cases
from benchmarks.published.middle_profile import middle_profile
from benchmarks.published.predict import predict
from benchmarks.published.rows import read_case, read_file, replaced

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
FRAMEWORKS = {
    "megatron_bridge": (framework_profiles.BRIDGE_GRAPHS, framework_profiles.BRIDGE),
    "mlperf_gpt3_llama405b": (framework_profiles.NEMO, framework_profiles.NEMO_OVERLAP),
    "simumax_b200": (framework_profiles.MEGATRON_PLAIN,),
}
"""Files of runs on Megatron-Core, and the profiles of their frameworks."""


def errors(name, profile):
    cases = [replaced(case, profile) for case in read_cases(TRUTH / f"{name}.csv")[0] if case.time_s]
    return np.asarray([item.time_error for item in predict(cases)])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_profile_between_the_others_is_nearer_than_the_one_of_2022(name):
    others = [profiles for other, profiles in FRAMEWORKS.items() if other != name]
    between = errors(name, middle_profile("between", others, "the others"))
    assert np.median(np.abs(between)) < 0.25
    assert np.percentile(np.abs(between), 90) < 0.45
    assert np.percentile(np.abs(errors(name, framework_profiles.MEGATRON_2022)), 90) > 0.6


@pytest.mark.parametrize(
    ("changes", "profile"),
    [
        ({"date": "2022"}, "megatron-2022"),
        ({"date": "2022", "precision": "fp8"}, "megatron-core"),
        ({"date": "2024-05"}, "megatron-core"),
        ({"date": "2020"}, "megatron-2020"),
    ],
)
def test_megatrons_of_today_have_a_profile_of_their_own(changes, profile):
    row = read_file(TRUTH / "korthikanti2022_time.csv")[0]
    assert read_case(row | changes, "file").engine.name == profile


def test_row_wise_scales_weigh_less_in_wider_layers():
    row = next(row for row in read_file(TRUTH / "torchtitan.csv") if "rowwise" in row["precision"])
    shares = []
    for hidden in ("4096", "8192"):
        wide = row | {"hidden": hidden, "heads": str(int(hidden) // 128), "ffn_hidden": str(int(hidden) * 7 // 2)}
        case = read_case(wide, "torchtitan")
        profile = framework_profiles.TITAN_ASYNC if "async" in case.engine.name else framework_profiles.TITAN
        by_tensor = replaced(case, profile)
        by_row, plain = predict([case, by_tensor])
        shares.append(1.0 - plain.step_s / by_row.step_s)
    assert 0.0 < shares[1] < 0.9 * shares[0]
