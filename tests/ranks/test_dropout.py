"""Dropout's numbers follow from seed, step, layer and place in the global batch: the same under every layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import PlanError
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.random_draws import may_draw
from meshwright.parallel import random_ops
from meshwright.parallel.activation_boxes import AmbiguousActivation, TokenSplit, Units, locate_box
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.keyed_random import RowBox, _bits_on, dropout_mask, row_keys, uniform
from meshwright.proof.compare import Verdict
from meshwright.proof.masks import Masks
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.session import build_program
from meshwright.train.step import local_norm_squared
from tests.plain_model import Block, PlainModel
from tests.ranks.group import run_ranks

MODELS = {
    "gpt2": shrink_config(ModelConfig(name="gpt2", dropout=0.3), layers=2, width=32),
    "opt": shrink_config(ModelConfig(name="opt", dropout=0.3), layers=2, width=32),
    "dropped": ModelConfig(name=f"{__name__}:dropped"),
    "deeper": ModelConfig(name=f"{__name__}:deeper"),
}
SEQUENCE, VOCAB, ROWS = 16, 61, 8
CPU = torch.device("cpu")
TWO = (
    *("replicate=2", "shard=2,zero=3", "replicate=2,rows=3-1,microbatches=2", "microbatches=4,recompute=full"),
    *("tp=2,recompute=selective", "tp=2,sequence=true", "cp=2", "cp=2,attention=gather,recompute=full"),
    "pp=2,microbatches=2",
)
FOUR = (
    *("tp=2,sequence=true,cp=2,attention=gather", "tp=2,cp=2,recompute=full", "pp=2,tp=2,microbatches=2"),
    *("replicate=2,tp=2,sequence=true", "shard=2,cp=2,microbatches=2"),
)


class Dropped(nn.Module):
    """What models do to drop: a functional dropout, whole channels, and whole rows by a number drawn for each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        x = functional.dropout(x, 0.2) + 1e-2 * torch.randn_like(x)
        x = functional.dropout1d(x, 0.1)
        return x * x.new_empty((len(x), 1, 1)).bernoulli_(0.9) * (0.5 + torch.rand(()).to(x.dtype))


def dropped() -> nn.Module:
    module: nn.Module = PlainModel(VOCAB, 8, 2)
    for block in module.blocks:
        block.norm = nn.Sequential(block.norm, Dropped())
    return module


class Deep(Block):
    """Skipped for some rows: stochastic depth."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__(width)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.p and self.training):
            return super().forward(x)
        return x + (super().forward(x) - x) * x.new_empty((len(x), 1, 1)).bernoulli_(1 - self.p)


def deeper() -> nn.Module:
    """The first layers never draw, the last ones often: nobody may conclude from the first forward of a rank."""
    module: nn.Module = PlainModel(VOCAB, 8, 4)
    module.blocks = nn.ModuleList([Deep(8, p) for p in (0.0, 0.0, 0.3, 0.6)])
    return module


def proven(model: str, *texts: str) -> list[Verdict]:
    def build() -> BuiltModel:
        return build_meta(MODELS[model], vocab=VOCAB if model in ("gpt2", "opt") else None, context=SEQUENCE)

    batches = random_batches(2, ROWS, SEQUENCE, VOCAB, documents=False)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250)
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


def all_pass(verdicts: list[Verdict]) -> None:
    assert [(verdict.layout, verdict.refused) for verdict in verdicts if not verdict.passed] == []


def test_layouts_of_two_ranks_drop_what_one_device_drops() -> None:
    all_pass(proven("gpt2", "replicate=2", "tp=2", "cp=2"))


@pytest.mark.long
@pytest.mark.slow
def test_more_layouts_of_two_ranks_drop_what_one_device_drops() -> None:
    all_pass(proven("gpt2", *TWO))


def test_weights_of_attention_that_are_made_again_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_ops, "DEAR", 0)
    all_pass(proven("gpt2", "replicate=1", "recompute=full", "recompute=selective"))


@pytest.mark.extended("test_layouts_of_two_ranks_drop_what_one_device_drops")
@pytest.mark.slow
def test_layouts_of_four_ranks_drop_what_one_device_drops() -> None:
    all_pass(proven("gpt2", *FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["opt", "dropped"])
def test_functions_that_draw_are_found_in_any_model(model: str) -> None:
    all_pass(proven(model, "tp=2" if model == "opt" else "replicate=2,microbatches=2,recompute=full"))


def test_layers_that_draw_after_others_that_never_do() -> None:
    schedules = ("zbv", "interleaved,stages=2")
    all_pass(proven("deeper", *(f"pp=2,microbatches=4,schedule={schedule}" for schedule in schedules)))


def test_a_probability_that_grows_from_zero() -> None:
    """From the very step in which something is drawn, what is recomputed draws the same, in any micro-batches."""

    def norms(_rank: int, text: str) -> list[tuple[float, float]]:
        built = build_meta(MODELS["deeper"], context=SEQUENCE)
        plan = Plan(layout=Layout.parse(text), prediction=Prediction(memory={}), ranks=1, reason="")
        program = build_program(built, plan, CPU)
        blocks: Any = program.module.blocks
        found = []
        for step, batch in enumerate(random_batches(3, ROWS, SEQUENCE, VOCAB, documents=False)):
            for block in blocks:
                block.p = 0.4 * step
            count = program.mesh.layout.microbatches if program.mesh else 1
            parts = [MicroBatch(*pair, None) for pair in zip(batch.tokens.chunk(count), batch.targets.chunk(count))]
            sums = program.forward_backward(parts, 1.0, (0, step))
            found.append((float(sums[0]), float(local_norm_squared(program))))
            program.clear_gradients()
        return found

    wanted = run_ranks(1, norms, "precision=float64")[0]
    for text in ("recompute=full,precision=float64", "microbatches=4,recompute=full,precision=float64"):
        assert run_ranks(1, norms, text)[0] == [pytest.approx(step, rel=1e-12) for step in wanted]


def _by_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader counts its rows from zero."""
    begin = DropoutRng.begin_forward
    monkeypatch.setattr(DropoutRng, "begin_forward", lambda self, key, first, shape: begin(self, key, first % 4, shape))


def _by_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch has a step's numbers to itself."""
    begin, steps = DropoutRng.begin_forward, iter(range(100))
    monkeypatch.setattr(DropoutRng, "begin_forward", lambda self, key, *more: begin(self, (key[0], next(steps)), *more))


def _by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's heads and channels count from zero."""
    positions = Units.positions
    monkeypatch.setattr(
        Units, "positions", lambda self, size: positions(Units(0, self.stop - self.start, self.count), size)
    )


def _again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again draws anew."""
    snapshot = DropoutRng.snapshot

    def planted(self: DropoutRng) -> Callable[[], AbstractContextManager[None]]:
        assert self.context is not None
        held, self.context.key = self.context.key, "0,99"
        found = snapshot(self)
        self.context.key = held
        return found

    monkeypatch.setattr(DropoutRng, "snapshot", planted)


def _by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tokens count from zero."""
    monkeypatch.setattr(
        TokenSplit,
        "positions",
        lambda self, tokens: {len(held): np.arange(len(held)) for held in PLACES(self, tokens).values()},
    )


PLACES = TokenSplit.positions


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (_by_reader, "replicate=2"),
        (_by_micro_batch, "microbatches=2"),
        (_by_rank, "tp=2"),
        (_by_run, "cp=2"),
        (_again, "recompute=full"),
    ],
)
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = proven("gpt2", layout)
    assert not verdict.passed and not verdict.refused
    assert max(verdict.loss_error, verdict.grad_error) > 1e-6


def test_both_ways_to_hash_give_the_same_bits_and_fair_ones() -> None:
    keys, box = row_keys("3,1,layer:0,0", np.arange(2, 6)), RowBox(np.arange(7, 600, 3), np.arange(64))
    bits = (_bits_on(keys, box, CPU).to(torch.float64) + (2**31 + 0.5)) / 2**32
    drawn = uniform(keys, box, CPU)
    assert torch.equal(bits, drawn)
    assert torch.equal(dropout_mask(keys, box, 0.25, CPU), drawn >= 0.25)
    assert not dropout_mask(keys, box, 1.0, CPU).any()
    spread = len(keys) * len(box.lines) * len(box.columns)
    assert abs(float(drawn.mean()) - 0.5) < 5 / (12 * spread) ** 0.5
    flat = drawn.flatten() - 0.5
    for shift in (1, 64, 64 * 198):
        assert abs(float((flat[shift:] * flat[:-shift]).mean())) < 5 / 12 / spread**0.5
    counts = torch.histc(drawn, bins=64, min=0.0, max=1.0)
    expected = spread / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize(
    ("shape", "units", "why"),
    [
        ((5, 16, 8), None, "first dim must count the 4 rows"),
        ((16, 4, 8), None, "first dim must count the 4 rows"),
        ((4, 9, 8), None, "can't be told"),
        ((4, 8, 7), Units(0, 2, 4), "aren't of 2 units"),
    ],
)
def test_what_cant_be_placed_is_refused(shape: tuple[int, ...], units: Units | None, why: str) -> None:
    with pytest.raises(AmbiguousActivation, match=why):
        locate_box(shape, 4, TokenSplit(cp_index=1, cp_degree=2).positions(16), units)


class Unlocated(nn.Module):
    """Drops rows of a tensor whose first dim isn't the batch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)


def test_a_draw_without_a_place_names_its_module() -> None:
    chance, module = DropoutRng(TokenSplit()), Unlocated()
    chance.track_module(module, "blocks.1")
    x = torch.ones(4, 6, 2)
    chance.begin_forward((0, 0), 0, (4, 6))
    with pytest.raises(PlanError, match=r"blocks\.1: it draws a tensor \(6, 4, 2\)"):
        module(x)
    chance.end_forward()
    assert module.eval()(x).shape == x.shape


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "mixtral"])
def test_models_without_dropout_are_left_alone(name: str) -> None:
    small = shrink_config(ModelConfig(name=name), width=32)
    still, drawn = (build_meta(dataclasses.replace(small, dropout=p), VOCAB) for p in (0.0, 0.1))
    assert not may_draw(still)
    assert may_draw(drawn)


def test_compiled_layers_that_draw_are_refused() -> None:
    model = build_meta(MODELS["gpt2"], VOCAB, SEQUENCE)
    with pytest.raises(PlanError, match=r"compile=true hides what transformer\.drop draws"):
        analyse_model(model, Layout.parse("compile=true"))


@functools.cache
def plain_masks(step: int) -> Any:
    drop = nn.Dropout(0.4)
    with Masks(drop, (), ROWS, f"7,{step}"):
        return drop(torch.ones(ROWS, 4, 6))


@pytest.mark.parametrize("step", [0, 3])
def test_numbers_change_with_step_and_row_alone(step: int) -> None:
    chance, drop = DropoutRng(TokenSplit()), nn.Dropout(0.4)
    chance.track_module(drop, "")
    found = []
    for first, last in ((0, 3), (3, 8)):
        chance.begin_forward((7, step), first, (last - first, 4))
        found.append(drop(torch.ones(last - first, 4, 6)))
        chance.end_forward()
    assert torch.equal(torch.cat(found), plain_masks(step))
    assert not torch.equal(plain_masks(0), plain_masks(3))
    assert len({tuple(row.flatten().tolist()) for row in plain_masks(step)}) == ROWS
