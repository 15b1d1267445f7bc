"""Figures that `tests.gpu.device_trace` reads off a trace, on events made by hand."""

import pytest

from tests.gpu.device_trace import summarise


def event(category, name, start, duration, correlation=0):
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


EVENTS = [
    event("cuda_runtime", "cudaLaunchKernel", 0.0, 2.0, 1),
    event("cuda_runtime", "cudaLaunchKernel", 3.0, 2.0, 2),
    event("cuda_runtime", "cudaStreamSynchronize", 5.0, 40.0),
    event("kernel", "gemm", 10.0, 60.0, 1),
    # On another stream, half of it beside the first.
    event("kernel", "norm", 40.0, 60.0, 2),
    event("kernel", "gemm", 120.0, 80.0),
    event("cpu_op", "aten::mm", 0.0, 900.0),
    {"ph": "M", "name": "process_name"},
]


def test_busy_time_counts_what_overlaps_once():
    found = summarise(EVENTS, 2)
    assert found["span_ms_a_step"] == pytest.approx(0.095)
    assert found["busy_share"] == pytest.approx(170 / 190, abs=1e-4)
    assert found["kernels_a_step"] == 1.5
    (gap,) = found["largest_gaps"]
    assert (gap["us"], gap["after"], gap["before"]) == (20.0, "norm", "gemm")


def test_kernels_are_in_order_of_their_time_and_waits_are_counted():
    found = summarise(EVENTS, 2)
    assert [(row["name"], row["ms_a_step"], row["calls_a_step"]) for row in found["top"]] == [
        ("gemm", 0.07, 1.0),
        ("norm", 0.03, 0.5),
    ]
    assert found["waits_a_step"] == {"cudaStreamSynchronize": {"calls": 0.5, "us": 20.0}}
    assert found["calls_a_step"]["cudaLaunchKernel"] == 1.0
    assert found["queue_ahead_us"] == {"p10": 10.0, "p50": 10.0}


def test_a_trace_without_a_device_has_the_hosts_part():
    assert summarise(EVENTS[:3], 1)["kernels_a_step"] == 0.0
