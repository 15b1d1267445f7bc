"""What a collective took on a GPU, told by events on the computing stream; the clock of the device is a planted one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.parallel import axis_group
from meshwright.parallel.axis_group import PendingCollective, TrafficLog
from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import LocalAdamW


class _Stream:
    """A device's computing stream: work takes time on it, not on the host."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def event(self) -> Any:
        at = self.now_ms
        return SimpleNamespace(at=at, query=lambda: True, elapsed_time=lambda end: end.at - at)


class _Collective:
    """One on a stream of its own, over at some time; to wait for it keeps the computing stream, not the host."""

    def __init__(self, stream: _Stream, over_ms: float) -> None:
        self._stream, self._over_ms = stream, over_ms

    def wait(self) -> None:
        self._stream.now_ms = max(self._stream.now_ms, self._over_ms)


def booked(monkeypatch: pytest.MonkeyPatch, over_ms: float, compute_ms: float) -> tuple[float, float]:
    """Returns milliseconds and exposed ones of a collective beside which the device computes."""
    stream, log = _Stream(), TrafficLog()
    monkeypatch.setattr(axis_group, "_record_event", stream.event)
    group: Any = SimpleNamespace(axis="shard", on_cuda=True, log=log)
    transfer = PendingCollective([_Collective(stream, over_ms)], lambda: None, group, "all_gather", 1000)
    stream.now_ms += compute_ms
    transfer.wait()
    transfer.wait()  # once is booked
    (row,) = log.drain()
    assert (row.calls, row.bytes) == (1, 1000)
    return row.seconds * 1e3, row.exposed_s * 1e3


def test_a_stall_of_the_computing_stream_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert booked(monkeypatch, over_ms=5.0, compute_ms=0.0) == pytest.approx((5.0, 5.0))


def test_what_hides_behind_computing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert booked(monkeypatch, over_ms=5.0, compute_ms=7.0) == pytest.approx((7.0, 0.0))


def test_the_rest_of_a_long_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert booked(monkeypatch, over_ms=5.0, compute_ms=3.0) == pytest.approx((5.0, 2.0))


def test_weights_in_host_memory_are_updated_behind_a_copy_of_buffers_on_the_device() -> None:
    """With offload=parameters a snapshot's event is of the model's buffers alone, and no weight has a CUDA device."""
    local = torch.ones(3)
    weight: Any = SimpleNamespace(
        name="w", shape=(3,), local=local, gradient=torch.ones(3), compute=None, widen_gradient=lambda: None
    )
    optimizer = LocalAdamW([weight], OptimizerConfig(lr=0.1))
    waited: list[str] = []
    optimizer.wait_for(SimpleNamespace(wait=lambda: waited.append("copied")))
    optimizer.step(0.1, torch.ones((), dtype=torch.float64))
    optimizer.step(0.1, torch.ones((), dtype=torch.float64))
    assert waited == ["copied"] and bool((local < 1.0).all())


def test_quantiles_are_those_of_the_collectives_of_a_step() -> None:
    """Against numpy's nearest rank; a collective without a time counts for no quantile, and a drain begins anew."""
    log, draw = TrafficLog(), random.Random(3)
    seconds = [draw.expovariate(100.0) + 1e-4 for _ in range(250)]
    for number, time_s in enumerate(seconds):
        log.add("shard", "all_gather", 1000 * (number % 3 + 1), time_s, 0.0)
        log.add("pp", "send", 10, 0.0, 0.0)
    shard, pipeline = log.drain()
    rates = [1000 * (number % 3 + 1) / time_s for number, time_s in enumerate(seconds)]
    found = (shard.latency_p50_s, shard.latency_p99_s)
    assert found == tuple(np.percentile(seconds, (50, 99), method="inverted_cdf"))
    assert shard.bandwidth_p50 == pytest.approx(np.median(rates), rel=0.02)
    assert sum(rate >= shard.bandwidth_p99 for rate in rates) == 248
    assert (pipeline.calls, pipeline.latency_p50_s, pipeline.bandwidth_p99) == (250, 0.0, 0.0)
    log.add("shard", "all_gather", 1000, 0.5, 0.0)
    (row,) = log.drain()
    assert (row.latency_p50_s, row.latency_p99_s, row.bandwidth_p50) == (0.5, 0.5, 2000.0)
