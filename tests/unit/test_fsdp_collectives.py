"""Gradients that are summed while backward goes on: every sum starts once, after its own scatter, and is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.parallel.fsdp import ReplicaAllReduce
from meshwright.parallel.fsdp_collectives import DeferredReductions


class Started:
    """A transfer that writes down when it starts and is waited for."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told = name, told
        told.append(f"{name} starts")

    def wait(self) -> bool:
        self._told.append(f"{self._name} ends")
        return True

    advance = wait


def unit(late: DeferredReductions, name: str, told: list[str], scatters: bool, copies: bool) -> None:
    """What FSDP2 calls after a unit's backward."""
    if scatters:
        late.advance()
        found: Any = Started(f"{name} scatter", told)
        late.defer_scatter(found)
    if copies:
        late.defer_all_reduce(lambda: Started(f"{name} sum", told))  # type: ignore[arg-type, return-value]


# (name, scatters, sums over copies): experts whose shards lie on one rank have no scatter.
UNITS = {
    "plain": [("a", True, False), ("b", True, False)],
    "hybrid": [("a", True, True), ("b", True, True)],
    "experts on one rank": [("a", True, True), ("experts", False, True), ("b", True, True)],
    "experts alone have copies": [("a", True, False), ("experts", False, True), ("b", True, False)],
}


@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("late", [True, False])
def test_each_sum_starts_once_after_its_scatter_and_ends(units: list[tuple[str, bool, bool]], late: bool) -> None:
    sums, told = DeferredReductions(), list[str]()
    sums.enabled = late
    for name, scatters, copies in units:
        unit(sums, name, told, scatters, copies)
    assert late == (not told[-1].endswith("ends")), "the last is under way when backward has ended"
    sums.finish()
    assert not sums.enabled
    for name, scatters, copies in units:
        wanted = [f"{name} scatter"] * scatters + [f"{name} sum"] * copies
        own = [line for line in told if line.startswith(f"{name} ")]
        assert own == [f"{what} {when}" for what in wanted for when in ("starts", "ends")]


class OnGpu:
    """A gradient's shard that says what its memory is kept for; the rest doesn't matter here."""

    is_cuda, device = True, "cuda:0"

    def __init__(self) -> None:
        self.kept_for: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.kept_for.append(stream)

    def clone(self) -> OnGpu:
        return OnGpu()

    def zero_(self) -> None:
        pass


@pytest.mark.parametrize("is_last", [False, True])
def test_a_shard_s_memory_outlives_the_stream_that_sums_it(monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    """On a GPU whose collectives end late, the next unit's shard was written over one that was still being summed."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of sums on {device}")
    copies = ReplicaAllReduce(None, DeferredReductions())  # type: ignore[arg-type]
    copies.is_last_microbatch = is_last
    monkeypatch.setattr(DeferredReductions, "defer_all_reduce", lambda _self, _start: None)
    shard = OnGpu()
    copies(shard)  # type: ignore[arg-type]
    assert shard.kept_for == ["that of sums on cuda:0"]
