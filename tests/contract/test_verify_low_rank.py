"""Sums with error feedback: proven against plain numpy over several steps, and every planted fault is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from meshwright.parallel.error_feedback import ErrorFeedback, LowRankMatrix, WeightError
from meshwright.parallel.feedback_compressor import FeedbackCompressor
from meshwright.parallel.low_rank import LowRankCompressor
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from tests.contract.test_verify_compression import SEQUENCE, VOCAB, case
from tests.tiers import cases

CASE = dataclasses.replace(case(), batches=random_batches(4, 8, SEQUENCE, VOCAB, documents=True))
PROVEN = {
    "two": [
        "replicate=2,microbatches=2,compress=powersgd:2:100", "cp=2,compress=powersgd:3",
        "replicate=2,microbatches=2,compress=topk:30:100", "cp=2,compress=topk:5",
    ],
    "four": [
        "replicate=2,tp=2,sequence=true,compress=powersgd:2", "replicate=4,compress=powersgd:1",
        "replicate=2,tp=2,sequence=true,compress=topk:30", "replicate=4,compress=topk:30",
    ],
    # The vocabulary divides by no degree: shards of unequal length.
    "sharded": [
        "replicate=2,shard=2,zero=1,compress=powersgd:2", "replicate=2,shard=2,zero=2,microbatches=2,compress=topk:30",
        "replicate=2,shard=2,zero=3,compress=powersgd:2:1", "replicate=2,shard=2,zero=1,compress=topk:5",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(list(PROVEN), ("two",), extended=("sharded",)))
def test_sums_are_those_of_plain_numpy_and_the_rest_that_of_one_device(name: str) -> None:
    for verdict in verify(CASE, [Layout.parse(text + ",precision=float64") for text in PROVEN[name]]):
        assert verdict.passed and verdict.worst.error < 1e-9, (verdict.layout, verdict.wrong, verdict.refused)
        # Top-k adds up the same numbers in the same order; vectors of four copies are summed as the network does.
        assert verdict.method_error < 1e-11 and 0.1 < verdict.rounding_distance < 1.5, verdict.layout


def test_in_low_precision_too() -> None:
    for text in ("replicate=2,compress=powersgd:2,precision=bf16", "replicate=2,compress=powersgd:2"):
        (verdict,) = verify(CASE, [Layout.parse(text)])
        assert verdict.passed and 0 < verdict.method_error < 1e-4 and verdict.rounding_distance > 0.1, verdict.wrong


def test_the_largest_values_in_low_precision_too() -> None:
    for text in ("replicate=2,compress=topk:30,precision=fp16", "replicate=2,compress=topk:30"):
        (verdict,) = verify(CASE, [Layout.parse(text)])
        assert verdict.passed and verdict.method_error == 0 and verdict.rounding_distance > 0.1, verdict.wrong


def test_a_rank_too_high_for_a_model_is_no_fault() -> None:
    (verdict,) = verify(CASE, [Layout.parse("replicate=2,compress=powersgd:64,precision=float64")])
    assert verdict.passed and verdict.rounding_distance == 0, verdict.wrong


def _one_value_fewer(patch: pytest.MonkeyPatch) -> None:
    """One value fewer travels."""
    counted = "meshwright.parallel.top_k.count_largest_values"
    patch.setattr(counted, lambda elements, density: -(-elements // density) - 1 or 1)


def _sent_and_owed(patch: pytest.MonkeyPatch) -> None:
    """What was sent is owed again."""
    patch.setattr(torch.Tensor, "index_fill_", lambda self, *_: self)


def _nothing_is_owed(patch: pytest.MonkeyPatch) -> None:
    """One copy forgets what it left out."""
    commit = WeightError.commit

    def forgetting(self: WeightError, is_valid: torch.Tensor, scale: float) -> None:
        commit(self, is_valid, scale)
        self.error.mul_(torch.distributed.get_rank() == 0)

    patch.setattr(WeightError, "commit", forgetting)


def _owed_twice(patch: pytest.MonkeyPatch) -> None:
    """The error takes what was sent, too: the step's whole matrix is added to the next one."""
    split = LowRankCompressor._split

    def kept(self: LowRankCompressor, left: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        before = left.clone()
        basis = split(self, left, factor)
        left.copy_(before)
        return basis

    patch.setattr(LowRankCompressor, "_split", kept)


def _never_committed(patch: pytest.MonkeyPatch) -> None:
    """Every step begins as the first did."""
    patch.setattr(ErrorFeedback, "commit", lambda self, is_valid: None)


def _cold_start(patch: pytest.MonkeyPatch) -> None:
    """Each step draws its basis anew."""
    used_basis = LowRankMatrix.used_basis

    def drawn(self: LowRankMatrix, seed: int) -> torch.Tensor:
        self.basis.zero_()
        return used_basis(self, seed)

    patch.setattr(LowRankMatrix, "used_basis", drawn)


def _seed_of_another_run(patch: pytest.MonkeyPatch) -> None:
    """Bases are drawn by a seed that isn't the run's."""
    used_basis = LowRankMatrix.used_basis
    patch.setattr(LowRankMatrix, "used_basis", lambda self, seed: used_basis(self, seed + 1))


def _not_orthonormal(patch: pytest.MonkeyPatch) -> None:
    """Columns are made one long, and stay as they lie."""

    class Columns:
        def __init__(self, factor: torch.Tensor) -> None:
            self.Q = factor / factor.norm(dim=0)

    patch.setattr(torch.linalg, "qr", Columns)


def _too_small_a_rank(patch: pytest.MonkeyPatch) -> None:
    """One direction fewer than the layout asks for."""
    patch.setattr("meshwright.parallel.error_feedback.local_rank", lambda shape, rank: rank - 1)


PLANTS = [
    _nothing_is_owed, _owed_twice, _never_committed, _cold_start, _seed_of_another_run, _not_orthonormal,
    _too_small_a_rank,
]  # fmt: skip
TOP_K_PLANTS = [_nothing_is_owed, _one_value_fewer, _sent_and_owed, _never_committed]
PLANTED = [(plant, "powersgd:2") for plant in PLANTS] + [(plant, "topk:30") for plant in TOP_K_PLANTS]


@pytest.mark.parametrize(("plant", "choice"), cases(PLANTED, (0, 2, 3, 8, 9)))
def test_planted_faults_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(CASE, [Layout.parse(f"replicate=2,compress={choice},precision=float64")])
    assert not verdict.passed and not verdict.refused and verdict.method_error > 1e-3
    assert "rounded numbers are off" in verdict.wrong


@pytest.mark.long
@pytest.mark.parametrize(("plant", "choice"), [(_nothing_is_owed, "powersgd:2"), (_one_value_fewer, "topk:30")])
def test_faults_of_shards_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(CASE, [Layout.parse(f"replicate=2,shard=2,zero=2,compress={choice},precision=float64")])
    assert not verdict.passed and not verdict.refused and verdict.method_error > 1e-3


@pytest.mark.parametrize("choice", ["powersgd:2", "topk:30"])
def test_a_program_that_sums_exactly_is_noticed(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeedbackCompressor, "is_exact", True)
    (verdict,) = verify(CASE, [Layout.parse(f"replicate=2,compress={choice},precision=float64")])
    assert not verdict.passed and verdict.wrong
