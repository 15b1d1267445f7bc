"""Traces steps of a run of meshwright with torch.profiler, and says what the device and the host did in them."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.train.step import Stepper

TOP = 25
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaStreamWaitEvent")
"""Beginnings of the names of runtime calls by which a host waits, may wait, or has a stream wait."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events on the device."""
SHORT_GAP_US = 5.0


def trace_steps(first: int, count: int, trace: Path, summary: Path) -> None:
    """Has the runs that this process starts trace ``count`` steps after ``first`` done ones.

    Args:
        first: steps done before the first one that is traced.
        count: of steps.
        trace: file for the trace, json.gz, which Perfetto opens.
        summary: file for `summarise` of it, which is written last.
    """
    run, profiler = Stepper.run, profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def traced(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step in (first, first + count):
            torch.cuda.synchronize()
            if step == first:
                profiler.start()
            else:
                profiler.stop()
                profiler.export_chrome_trace(str(trace))
                with gzip.open(trace, "rt", encoding="utf-8") as file:
                    figures = summarise(json.load(file)["traceEvents"], count)
                summary.with_suffix(".part").write_text(json.dumps(figures))
                os.replace(summary.with_suffix(".part"), summary)
        return run(self, step, *args, **kwargs)

    Stepper.run = traced  # type: ignore[method-assign]


def summarise(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Returns figures a step of a trace: kernels by device time, share of busy time, gaps, calls of the host.

    Args:
        events: ``traceEvents`` of the format of Chrome; times in microseconds.
        steps: that they cover.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    on_device = sorted((event for event in complete if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    calls = Counter(event["name"] for event in complete if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    waited_us: dict[str, float] = defaultdict(float)
    for event in complete:
        if event["name"].startswith(WAITS):
            waited_us[event["name"]] += event["dur"]
    times: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        times[event["name"]].append(event["dur"])
    host = {
        "calls_a_step": {name: number / steps for name, number in calls.most_common(12)},
        "waits_a_step": {
            name: {"calls": calls[name] / steps, "us": round(spent / steps, 1)} for name, spent in waited_us.items()
        },
    }
    if not on_device:
        return {"kernels_a_step": 0.0, **host}
    begun = on_device[0]["ts"]
    busy_us, gaps, reached, before = 0.0, [], begun, ""
    for event in on_device:
        start, end = event["ts"], event["ts"] + event["dur"]
        if start > reached:
            gaps.append((start - reached, reached - begun, before, event["name"]))
        busy_us += max(0.0, end - max(start, reached))
        if end > reached:
            reached, before = end, event["name"]
    top = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "span_ms_a_step": round((reached - begun) / steps / 1e3, 3),
        "busy_share": round(busy_us / (reached - begun), 4),
        "kernels_a_step": len(on_device) / steps,
        "gaps_ms_a_step": round(sum(gap[0] for gap in gaps) / steps / 1e3, 3),
        "gaps_over_5us_a_step": sum(gap[0] > SHORT_GAP_US for gap in gaps) / steps,
        "largest_gaps": [
            {"us": round(gap, 1), "at_ms": round(at / 1e3, 2), "after": after[:80], "before": name[:80]}
            for gap, at, after, name in sorted(gaps, reverse=True)[:8]
        ],
        "queue_ahead_us": _queue_ahead(complete, on_device),
        "top": [
            {
                "name": name[:120],
                "ms_a_step": round(sum(spent) / steps / 1e3, 3),
                "calls_a_step": len(spent) / steps,
                "share": round(sum(spent) / busy_us, 4),
            }
            for name, spent in top
        ],
        **host,
    }


def _queue_ahead(complete: Iterable[Mapping[str, Any]], on_device: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns how long after its launch a kernel began, in quantiles: near 0 means that the host is the slower."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    delays = sorted(
        event["ts"] - launched[event["args"]["correlation"]]
        for event in on_device
        if event.get("args", {}).get("correlation") in launched
    )
    if not delays:
        return {}
    return {name: round(delays[int(share * (len(delays) - 1))], 1) for name, share in (("p10", 0.1), ("p50", 0.5))}
