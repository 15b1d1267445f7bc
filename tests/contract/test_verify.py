"""The first law: any plan equals one rank, in float64 to 1e-9; and the proof finds every planted fault."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.cli.main import main
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.gradient_reducer import GradientReducer
from meshwright.proof.compare import Verdict
from meshwright.proof.layouts import data_layouts
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train import step
from meshwright.train.step import Stepper
from tests.plain_model import PlainModel
from tests.tiers import cases

MODELS = {
    "gpt2": shrink_config(ModelConfig(name="gpt2"), layers=3, width=32),
    "llama": shrink_config(ModelConfig(name="llama"), layers=3, width=32),
    "plain": ModelConfig(name="tests.plain_model:build"),
}
SEQUENCE, VOCAB = 10, 61


def case(model: str, rows: int, count: int = 2) -> Case:
    def build() -> BuiltModel:
        return build_meta(MODELS[model], vocab=VOCAB, context=SEQUENCE)

    batches = random_batches(count, rows, SEQUENCE, VOCAB, documents=model != "plain")
    return Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250)


def all_pass(verdicts: list[Verdict]) -> None:
    assert [verdict.layout for verdict in verdicts if not verdict.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


@pytest.mark.parametrize(
    ("model", "ranks"),
    cases([("llama", 2), ("plain", 1), ("gpt2", 1), ("gpt2", 2), ("plain", 2), ("llama", 1)], (0, 1), extended=(2,)),
)
def test_every_layout_of_few_ranks(model: str, ranks: int) -> None:
    all_pass(verify(case(model, rows=8), data_layouts(ranks, Layout(precision="float64"))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks"), cases([(model, ranks) for ranks in (4, 3) for model in MODELS], (), extended=(0,))
)
def test_every_layout_of_more_ranks(model: str, ranks: int) -> None:
    """Each layout by one of the models; fewer ranks have proven every layout for each."""
    layouts = data_layouts(ranks, Layout(precision="float64"))
    all_pass(verify(case(model, rows=24), layouts[list(MODELS).index(model) :: len(MODELS)]))


def test_recompute_of_some_layers_and_more_micro_batches() -> None:
    texts = ("recompute=full:1,microbatches=4", "shard=2,zero=3,recompute=selective:2,microbatches=4")
    texts += ("pp=2,recompute=full:1+selective,microbatches=4",)
    all_pass(verify(case("llama", rows=8), [Layout.parse(text + ",precision=float64") for text in texts]))


def test_layouts_of_several_precisions_are_each_held_against_their_own_reference() -> None:
    layouts = [Layout.parse(f"replicate=2,precision={precision}") for precision in ("float64", "bf16", "float64")]
    verdicts = verify(case("plain", rows=8, count=1), layouts)
    assert [verdict.passed for verdict in verdicts] == [True, True, True], [verdict.refused for verdict in verdicts]
    all_pass(verdicts[::2])
    assert verdicts[1].bounds and verdicts[1].grad_error > 1e-6


def test_a_reference_is_read_once_for_all_layouts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, load = [], torch.load

    def load_here(*args: Any, **more: Any) -> Any:
        readers.append(os.getpid())
        assert os.getpid() == process, "a rank reads what it was forked with"
        return load(*args, **more)

    process = os.getpid()
    monkeypatch.setattr(torch, "load", load_here)
    layouts = [Layout.parse(f"{degrees},precision=float64") for degrees in ("replicate=2", "shard=2,zero=1", "tp=2")]
    all_pass(verify(case("gpt2", rows=4, count=1), layouts))
    assert readers == [process]


def test_a_weight_that_nothing_reads_is_updated_on_every_rank_as_on_one_device() -> None:
    """Its gradient is none at all; a second head, of a model that is trained without it."""
    batches = random_batches(2, 4, 16, VOCAB, documents=False)
    build = partial(build_meta, ModelConfig(name="tests.odd_models:spare"), vocab=VOCAB, context=16)
    layouts = [Layout.parse(f"{degrees},precision=float64") for degrees in ("replicate=2", "shard=2,zero=1")]
    all_pass(verify(Case(build=build, batches=batches, recipe=OptimizerRecipe()), layouts))


def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient averaged twice: every sum is divided by the ranks once more."""
    reduce = AxisGroup.all_reduce

    def halved(self: AxisGroup, tensor: torch.Tensor, of: str = ""):  # type: ignore[no-untyped-def]
        if self.axis == "replicate":
            tensor.div_(self.size)
        return reduce(self, tensor, of)

    monkeypatch.setattr(AxisGroup, "all_reduce", halved)


def _forgotten_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bucket is never sent."""
    start = GradientReducer._start

    def skip(self: GradientReducer, bucket) -> None:  # type: ignore[no-untyped-def]
        if bucket is not self._buckets[-1]:
            start(self, bucket)

    monkeypatch.setattr(GradientReducer, "_start", skip)


def _local_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is taken over this rank's shards alone."""
    whole = step.local_norm_squared
    monkeypatch.setattr(step, "local_norm_squared", lambda program: whole(program) / torch.distributed.get_world_size())


def _count_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is divided by this rank's own tokens times the ranks, not by the global count."""
    whole = Stepper.globals

    def own(self: Stepper, sums: torch.Tensor, stop: bool):  # type: ignore[no-untyped-def]
        norm, vector, factor = whole(self, sums, stop)
        return norm, vector, factor * vector[1] / (sums[1] * torch.distributed.get_world_size())

    monkeypatch.setattr(Stepper, "globals", own)


def _forgotten_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards keep their own rank's gradient."""

    def own(self: AxisGroup, output: torch.Tensor, tensor: torch.Tensor, of: str = ""):  # type: ignore[no-untyped-def]
        output.copy_(tensor.view(self.size, -1)[self.index])
        return self.all_gather(torch.empty_like(tensor), output)

    monkeypatch.setattr(AxisGroup, "reduce_scatter", own)


def _early_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed after the first micro-batch of an accumulation, and once more after the last."""
    begin = GradientReducer.begin_microbatch

    def early(self: GradientReducer, last: bool) -> None:
        if last:
            self.finish()
        begin(self, last)

    monkeypatch.setattr(GradientReducer, "begin_microbatch", early)


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


class Shaken(nn.Module):
    """Adds noise to what it gets while it trains; draws a number that nothing follows from in any mode."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(())
        return x + self.noise * torch.empty_like(x).exponential_() if self.training and self.noise else x


def shaken(noise: float = 1e-3) -> nn.Module:
    module: nn.Module = PlainModel(VOCAB, 8, 2)
    module.blocks[1].norm = nn.Sequential(module.blocks[1].norm, Shaken(noise))
    return module


def still() -> nn.Module:
    return shaken(0.0)


def test_a_model_that_draws_random_numbers_is_refused_with_what_works() -> None:
    batches = random_batches(1, 4, SEQUENCE, VOCAB, documents=False)
    drawn, still = (
        Case(
            build=partial(build_meta, ModelConfig(name=f"{__name__}:{name}")), batches=batches, recipe=OptimizerRecipe()
        )
        for name in ("shaken", "still")
    )
    two = [Layout.parse("replicate=2,precision=float64")]
    (refused,) = verify(drawn, two)
    assert not refused.passed
    assert "random numbers in training, in blocks.1.norm.1 (Shaken)" in (refused.refused or "")
    assert "nearest that works" in (refused.refused or "")
    all_pass([*verify(dataclasses.replace(drawn, training=False), two), *verify(still, two)])


def test_command_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--model", "tests.plain_model:build", "--layout", "replicate=2", "--steps", "1", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert set(report["layouts"][0]) == {
        "layout", "passed", "loss_error", "grad_error", "grad_norm_error", "weight_error", "worst", "scope",
    }  # fmt: skip


def test_command_refuses_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "gpt2", "--layout", "recompute=full:7", "--steps", "1", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and "K is at most that" in report["layouts"][0]["refused"]
