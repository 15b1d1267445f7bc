"""Memory of results that a stream has not given back, against rows of the sweep that differ in one thing alone."""

from pathlib import Path

import pytest

from benchmarks.published.predict import predict
from benchmarks.published.rows import read_case, read_file

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth" / "hf_ultrascale_nanotron.csv"


@pytest.fixture(scope="module")
def sweep():
    return read_file(TRUTH)


def gigabytes(sweep, **columns):
    """Returns (predicted, measured) of the row with these columns, of the model of width 2048."""
    wanted = {"hidden": "2048", "status": "ok", **{key: str(value) for key, value in columns.items()}}
    (row,) = (row for row in sweep if all(row[key] == value for key, value in wanted.items()) and row["mem_gb"])
    case = read_case(row, "hf")
    (found,) = predict([case])
    return found.memory_bytes / 2**30, case.memory_bytes / 2**30


def test_a_second_stage_adds_results_once_the_device_is_slower_than_its_host(sweep):
    small, measured_small = gigabytes(sweep, tp=8, pp=2, mbs=16, grad_acc=8, zero=1)
    large, measured_large = gigabytes(sweep, tp=8, pp=2, mbs=32, grad_acc=4, zero=1)
    assert measured_large / measured_small == pytest.approx(2.8, abs=0.1)
    assert large / small > 2.4
    assert (small, large) == pytest.approx((measured_small, measured_large), rel=0.15)


def test_warm_up_forwards_leave_results_however_many_micro_batches_follow(sweep):
    fewest, measured_fewest = gigabytes(sweep, tp=16, pp=4, mbs=32, grad_acc=4, zero=1)
    more, measured_more = gigabytes(sweep, tp=16, pp=4, mbs=32, grad_acc=8, zero=0)
    assert measured_fewest / measured_more == pytest.approx(fewest / more, rel=0.05)
    assert (fewest, more) == pytest.approx((measured_fewest, measured_more), rel=0.1)


def test_sends_that_wait_on_the_host_leave_none(sweep):
    waits, measured_waits = gigabytes(sweep, tp=16, pp=8, mbs=8, grad_acc=8, zero=1)
    goes_on, measured_goes_on = gigabytes(sweep, tp=16, pp=8, mbs=8, grad_acc=16, zero=1)
    assert measured_goes_on > 1.7 * measured_waits
    assert goes_on > 1.5 * waits
    assert (waits, goes_on) == pytest.approx((measured_waits, measured_goes_on), rel=0.1)
