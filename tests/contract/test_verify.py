"""The first law: any plan equals one rank, in float64 to 1e-9; and the proof finds every planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from meshwright.axes.comm.reducer import GradientReducer
from meshwright.axes.comm.wire import Wire
from meshwright.cli.main import main
from meshwright.models.build import BuiltModel, build_meta, shrink
from meshwright.models.config import ModelConfig
from meshwright.plan import Layout
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import Recipe
from meshwright.proof.verify import Case, all_layouts, made_up_batches, verify
from meshwright.runtime.weights import Weight
from meshwright.train.step import Stepper

MODELS = {
    "gpt2": shrink(ModelConfig(name="gpt2"), layers=3, width=32),
    "llama": shrink(ModelConfig(name="llama"), layers=3, width=32),
    "plain": ModelConfig(name="tests.plain_model:build"),
}
SEQUENCE, VOCAB = 10, 61


def case(model: str, rows: int, steps: int = 2) -> Case:
    def build() -> BuiltModel:
        return build_meta(MODELS[model], vocab=VOCAB, context=SEQUENCE)

    batches = made_up_batches(steps, rows, SEQUENCE, VOCAB, documents=model != "plain")
    return Case(build=build, batches=batches, recipe=Recipe(), timeout_s=50)


def all_pass(verdicts: list[Verdict]) -> None:
    assert [verdict.layout for verdict in verdicts if not verdict.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_of_few_ranks(model: str, ranks: int) -> None:
    all_pass(verify(case(model, rows=8), all_layouts(ranks, Layout(precision="float64"))))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "part"), [(3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_every_layout_of_more_ranks(model: str, ranks: int, part: int) -> None:
    layouts = all_layouts(ranks, Layout(precision="float64"))
    all_pass(verify(case(model, rows=24), layouts[part :: 2 if ranks == 3 else 4]))


def test_recompute_of_some_layers_and_more_micro_batches() -> None:
    texts = ("recompute=full:1,microbatches=4", "shard=2,zero=3,recompute=selective:2,microbatches=4")
    all_pass(verify(case("llama", rows=8), [Layout.parse(text + ",precision=float64") for text in texts]))


def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient averaged twice: every sum is divided by the ranks once more."""
    reduce = Wire.all_reduce

    def halved(self: Wire, tensor: torch.Tensor):  # type: ignore[no-untyped-def]
        if self.axis == "replicate":
            tensor.div_(self.size)
        return reduce(self, tensor)

    monkeypatch.setattr(Wire, "all_reduce", halved)


def _forgotten_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bucket is never sent."""
    start = GradientReducer._start

    def skip(self: GradientReducer, bucket) -> None:  # type: ignore[no-untyped-def]
        if bucket is not self._buckets[-1]:
            start(self, bucket)

    monkeypatch.setattr(GradientReducer, "_start", skip)


def _local_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is taken over this rank's shards alone."""
    monkeypatch.setattr(Weight, "copies", property(lambda self: torch.distributed.get_world_size()))


def _count_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is divided by this rank's own tokens times the ranks, not by the global count."""
    whole = Stepper.globals

    def own(self: Stepper, sums: torch.Tensor, stop: bool):  # type: ignore[no-untyped-def]
        norm, vector, factor = whole(self, sums, stop)
        return norm, vector, factor * vector[1] / (sums[1] * torch.distributed.get_world_size())

    monkeypatch.setattr(Stepper, "globals", own)


def _forgotten_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards keep their own rank's gradient."""

    def own(self: Wire, output: torch.Tensor, tensor: torch.Tensor):  # type: ignore[no-untyped-def]
        output.copy_(tensor.view(self.size, -1)[self.index])
        return self.all_gather(torch.empty_like(tensor), output)

    monkeypatch.setattr(Wire, "reduce_scatter", own)


def _early_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed after the first micro-batch of an accumulation, and once more after the last."""
    begin = GradientReducer.begin

    def early(self: GradientReducer, last: bool) -> None:
        if last:
            self.finish()
        begin(self, last)

    monkeypatch.setattr(GradientReducer, "begin", early)


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (_twice, "replicate=2"),
        (_forgotten_bucket, "replicate=2"),
        (_local_norm, "shard=2,zero=3"),
        (_count_per_rank, "replicate=2"),
        (_count_per_rank, "shard=2,zero=2"),
        (_forgotten_scatter, "shard=2,zero=1"),
        (_early_sum, "replicate=2,microbatches=2"),
    ],
)
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(case("gpt2", rows=8), [Layout.parse(layout + ",precision=float64")])
    assert not verdict.passed and not verdict.refused
    assert max(verdict.grad_error, verdict.grad_norm_error, verdict.weight_error, verdict.loss_error) > 1e-6


def test_command_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--model", "tests.plain_model:build", "--layout", "replicate=2", "--steps", "1", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert set(report["layouts"][0]) == {
        "layout", "passed", "loss_error", "grad_error", "grad_norm_error", "weight_error", "worst",
    }  # fmt: skip


def test_command_refuses_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "gpt2", "--layout", "recompute=full:7", "--steps", "1", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and "K is at most that" in report["layouts"][0]["refused"]
