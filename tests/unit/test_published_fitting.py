import dataclasses
from pathlib import Path

import pytest

from benchmarks.published.fitting import Knobs, errors, fit, known_engines
from benchmarks.published.folds import FOLDS, LEAST_MOST, prior, run, spread
from benchmarks.published.models import Unpriced
from benchmarks.published.predict import predict
from benchmarks.published.rows import read_case, read_file

pytestmark = pytest.mark.slow

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
POWER = "products/picojoules"
WIDTH = "megatron-2020/runtime/pass_width"
UNSEEN = "rates/hopper/quantum"


def cases_of(name, step=1):
    found = []
    for row in read_file(TRUTH / f"{name}.csv")[::step]:
        try:
            found.append(read_case(row, name))
        except Unpriced:
            continue
    return found


@pytest.fixture
def tables():
    """Cases, whose constants are as before after a test."""
    knobs = Knobs((POWER, WIDTH, UNSEEN))
    before = knobs.read()
    yield cases_of("megatron_sc21_table1") + cases_of("megatron_readme_sep2020")
    knobs.write(before)


def measured_with(cases, name, value):
    """The cases as they would have been measured were the constant another one."""
    knobs = Knobs((name,))
    before = knobs.read()
    knobs.write([value])
    found = [dataclasses.replace(item.case, time_s=item.step_s) for item in predict(cases)]
    knobs.write(before)
    return found


def test_a_constant_is_found_again_and_what_no_row_tells_stays(tables):
    cases = measured_with(tables, POWER, 2.0)
    start = Knobs((UNSEEN,)).read()[0]
    found = fit(cases, (POWER, UNSEEN), pull=1e-4)
    assert found[POWER] == pytest.approx(2.0, rel=0.02)
    assert found[UNSEEN] == start


def test_a_surer_prior_gives_way_less(tables):
    cases = measured_with(tables, POWER, 2.0)
    start = Knobs((POWER,)).read()
    moved = []
    for sure in (1.0, 0.01):
        Knobs((POWER,)).write(start)
        moved.append(fit(cases, (POWER,), spreads={POWER: sure})[POWER] - start[0])
    assert moved[0] > moved[1] >= 0


def test_a_file_whose_level_is_its_own_moves_what_others_share_less(tables):
    """One of two files is a tenth slower for a reason of its own, of which levels leave the shared constant less."""
    (start,) = Knobs((POWER,)).read()
    cases = measured_with(tables, POWER, start)
    slower = [
        dataclasses.replace(case, time_s=1.1 * case.time_s) if case.file == "megatron_readme_sep2020" else case
        for case in cases
    ]
    moved = []
    for levels in (False, True):
        Knobs((POWER,)).write([start])
        moved.append(fit(slower, (POWER,), levels=levels, leaps=False, rounds=4)[POWER] / start)
    assert moved[0] - 1 > 2 * abs(moved[1] - 1)


def test_bounds_are_kept_and_the_fit_is_no_worse(tables):
    cases = measured_with(tables, POWER, 4.0)
    before = abs(errors(cases, "time")).mean()
    found = fit(cases, (POWER, WIDTH), bounds={POWER: (1.0, 2.0)})
    assert found[POWER] == pytest.approx(2.0)
    assert abs(errors(cases, "time")).mean() < before


def test_engines_that_share_a_part_go_on_sharing_it():
    name = "nanotron/runtime/pass_width"
    knobs = Knobs((name, "nanotron/saved/logits"))
    before, others = knobs.read(), known_engines()
    knobs.write([50.0, 5.0])
    after = known_engines()
    try:
        assert [after[one].runtime.pass_width for one in ("nanotron", "nanotron-before", "nanotron-afab")] == [50.0] * 3
        assert after["nanotron-before"].saved == others["nanotron-before"].saved
        assert after["fsdp-composer"] == others["fsdp-composer"]
    finally:
        knobs.write(before)
    assert known_engines() == others


def test_every_constant_of_a_division_has_a_prior_within_its_bounds():
    for fold in FOLDS:
        for name in (*fold.knobs, *fold.unseen):
            low, high = LEAST_MOST.get(name.rpartition("/")[2], (0.0, float("inf")))
            assert low <= prior(name) <= high
            assert spread(name) > 0
            assert Knobs((name,)).read()[0] >= 0


def test_a_division_is_judged_and_leaves_the_constants_alone():
    fold = next(fold for fold in FOLDS if fold.name.startswith("SimuMax, memory"))
    before = Knobs(fold.knobs).read()
    (told,) = run(cases_of("simumax_b200"), [fold])
    assert list(Knobs(fold.knobs).read()) == list(before)
    assert told["rows"] == 14
    assert told["median"] < 0.02
