"""Layouts that send rounded numbers: proven against plain numpy to the bit, and every planted fault is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.block_codec import BlockCodec, WeightBlocks
from meshwright.parallel.compression import GradientCompressor
from meshwright.parallel.mesh import Mesh
from meshwright.proof.case import Case
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from tests.tiers import cases

SEQUENCE, VOCAB = 10, 61
MODEL = shrink_config(ModelConfig(name="llama"), layers=2, width=32)
TIED = shrink_config(ModelConfig(name="gpt2"), layers=4, width=32)


def case(model: ModelConfig = MODEL) -> Case:
    def build() -> BuiltModel:
        return build_meta(model, vocab=VOCAB, context=SEQUENCE)

    batches = random_batches(2, 8, SEQUENCE, VOCAB, documents=True)
    return Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250)


PROVEN = {
    "formats": [f"replicate=2,microbatches=2,compress={name}" for name in ("bf16", "fp16", "int8", "fp8")],
    "weights": ["shard=2,zero=3,compress_weights=int8", "shard=2,zero=1,compress_weights=fp8", "cp=2,compress=int8"],
    "four": [
        "replicate=4,compress=int8:2", "replicate=2,shard=2,zero=2,microbatches=2,compress=fp8,compress_weights=int8",
        "replicate=2,pp=2,microbatches=2,compress=int8", "replicate=2,tp=2,compress=bf16",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", cases(list(PROVEN), (0, 1)))
def test_rounding_is_that_of_plain_numpy_and_the_rest_that_of_one_device(name: str) -> None:
    for verdict in verify(case(), [Layout.parse(text + ",precision=float64") for text in PROVEN[name]]):
        assert verdict.passed and verdict.worst.error < 1e-9, (verdict.layout, verdict.wrong, verdict.refused)
        assert verdict.method_error == 0 and 1e-4 < verdict.rounding_distance < 0.1, verdict.layout


def test_a_tied_weight_of_two_stages_on_one_rank_draws_other_numbers_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.parse("pp=2,replicate=2,microbatches=4,schedule=zbv,compress=int8,precision=float64")
    (verdict,) = verify(case(TIED), [layout])
    assert verdict.passed and verdict.method_error == 0 and verdict.rounding_distance > 1e-4, verdict
    compressor = Mesh.compressor
    monkeypatch.setattr(Mesh, "compressor", lambda self, copies, key, _stage=0: compressor(self, copies, key))
    (verdict,) = verify(case(TIED), [layout])
    assert "rounded numbers are off" in verdict.wrong, verdict


def test_in_low_precision_too() -> None:
    texts = ["replicate=2,compress=int8,precision=bf16", "shard=2,zero=3,compress_weights=int8,precision=bf16"]
    for verdict in verify(case(), [Layout.parse(text) for text in texts]):
        assert verdict.passed and verdict.method_error == 0 and verdict.rounding_distance > 1e-3, verdict.wrong


def _other_key(patch: pytest.MonkeyPatch) -> None:
    """One rank rounds by the random numbers of another step."""
    fractions = WeightBlocks.fractions

    def drawn(self: WeightBlocks, draw: str, first: int, count: int, device: torch.device) -> torch.Tensor:
        other = torch.distributed.get_rank() == 1 and "sum" not in draw
        return fractions(self, f"9{draw}" if other else draw, first, count, device)

    patch.setattr(WeightBlocks, "fractions", drawn)


def _own_chunk_exact(patch: pytest.MonkeyPatch) -> None:
    """A rank takes its own gradients as they were, not as it sent them."""
    decode = BlockCodec.decode

    def shifted(self: BlockCodec, encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode(self, encoded, dtype).mul_(1 + 1e-6 * (torch.distributed.get_rank() == 0))

    patch.setattr(BlockCodec, "decode", shifted)


def _not_random(patch: pytest.MonkeyPatch) -> None:
    """Gradients are rounded to the nearest."""
    encode = BlockCodec.encode
    patch.setattr(BlockCodec, "encode", lambda self, blocks, _fractions: encode(self, blocks, None))


def _twice(patch: pytest.MonkeyPatch) -> None:
    """A copy's gradient counts twice in what is sent."""
    sum_across = GradientCompressor._sum_across

    def doubled(self, message):  # type: ignore[no-untyped-def]
        factor = 2 if torch.distributed.get_rank() == 1 else 1
        message.store.write(0, message.store.read(0, message.count) * factor)
        return sum_across(self, message)

    patch.setattr(GradientCompressor, "_sum_across", doubled)


def _draw_instead(patch: pytest.MonkeyPatch, position: int, value: str) -> None:
    """Puts another text in a draw's ``seed,step,copies,rank``, on all ranks alike; the sum's own draw stays."""
    fractions = WeightBlocks.fractions

    def drawn(self: WeightBlocks, draw: str, first: int, count: int, device: torch.device) -> torch.Tensor:
        fields = draw.split(",")
        if fields[-1] != "sum" or position < 3:
            fields[position] = value
        return fractions(self, ",".join(fields), first, count, device)

    patch.setattr(WeightBlocks, "fractions", drawn)


def _constant_step(patch: pytest.MonkeyPatch) -> None:
    """Every step draws the numbers of the first one."""
    _draw_instead(patch, 1, "0")


def _seed_of_another_run(patch: pytest.MonkeyPatch) -> None:
    """Every rank draws by the same seed, which isn't the run's."""
    _draw_instead(patch, 0, "1")


def _ranks_alike(patch: pytest.MonkeyPatch) -> None:
    """Copies draw the same numbers, so that their errors add up instead of cancelling."""
    _draw_instead(patch, 3, "0")


PLANTS = [_other_key, _own_chunk_exact, _not_random, _twice, _constant_step, _seed_of_another_run, _ranks_alike]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(case(), [Layout.parse("replicate=2,compress=int8,precision=float64")])
    assert not verdict.passed and not verdict.refused and verdict.method_error > 1e-7
    assert "rounded numbers are off" in verdict.wrong


def test_a_program_that_rounds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "compressor", lambda *_: None)
    (verdict,) = verify(case(), [Layout.parse("replicate=2,compress=int8,precision=float64")])
    assert not verdict.passed and "nothing that was sent is rounded" in verdict.wrong
