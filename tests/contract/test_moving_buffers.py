"""Buffers that forward changes move once a step, by the forward that trains, or a layout is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshwright.errors import PlanError
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.program import Program
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.session import build_program
from tests.ranks.group import run_ranks
from tests.tiers import further

VOCAB, SEQUENCE, ROWS = 61, 12, 8
CPU = torch.device("cpu")
BATCHES = random_batches(3, ROWS, SEQUENCE, VOCAB, documents=False)


def build(name: str) -> BuiltModel:
    return build_meta(ModelConfig(name=f"tests.objectives:{name}"), vocab=VOCAB, context=SEQUENCE)


def prove(name: str, *texts: str, steps: int = 2) -> list[Verdict]:
    case = Case(build=partial(build, name), batches=BATCHES[:steps], recipe=OptimizerRecipe(), timeout_s=50)
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


@pytest.mark.parametrize(
    "name, moving",
    [
        ("running_norm", {"batch.running_mean": True, "batch.running_var": True, "batch.num_batches_tracked": False}),
        ("counting", {"blocks.0.calls": False, "blocks.1.calls": False}),
        ("averaging", {"blocks.0.average": True, "blocks.1.average": True}),
        ("balancing", {"blocks.0.correction": True, "blocks.1.correction": True}),
        ("row_counting", {"blocks.0.rows": True, "blocks.1.rows": True}),
        ("plain", {}),
    ],
)
def test_buffers_that_forward_changes_are_found(name: str, moving: dict[str, bool]) -> None:
    assert {buffer.name: buffer.data for buffer in try_forward(build(name)).moving} == moving


@pytest.mark.parametrize(
    "name, texts",
    further(
        [
            ("running_norm", ("recompute=none", "recompute=full")),
            ("averaging", ("recompute=none", "recompute=full", "recompute=selective")),
            ("dropping", ("recompute=none", "recompute=full", "recompute=selective")),
            (
                "counting",
                ("microbatches=4,recompute=full", "replicate=2,microbatches=2", "shard=2,zero=3,recompute=full"),
            ),
            ("warming_logits", ("microbatches=4", "replicate=2,microbatches=2", "tp=2")),
        ],
        ("running_norm", "counting", "warming_logits"),
    ),
)
def test_layouts_equal_one_device(name: str, texts: tuple[str, ...]) -> None:
    assert [(v.layout, v.refused, v.worst) for v in prove(name, *texts) if not v.passed] == []


def test_a_buffer_that_moves_twice_a_step_is_wrong_after_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (good,) = prove("counting", "microbatches=2", steps=1)
    assert good.passed and good.buffer_error == good.to_json()["buffer_error"] == 0
    assert prove("plain", "microbatches=2", steps=1)[0].buffer_error is None
    once = Program.forward_backward

    def twice(self: Program, *args: Any, **options: Any) -> torch.Tensor:
        sums = once(self, *args, **options)
        self.moving_buffers.restore({name: value + 1 for name, value in self.moving_buffers.copy().items()})
        return sums

    monkeypatch.setattr(Program, "forward_backward", twice)
    (verdict,) = prove("counting", "microbatches=2", steps=1)
    assert verdict.outcome == "wrong" and verdict.buffer_error == 1.0
    assert "the buffer 'blocks.0.calls', which forward changes, is off by 1.0e+00 after the last step" in verdict.wrong
    assert "2 of 2 such buffers are, though losses, gradients and weights agree" in verdict.wrong


def test_logits_that_a_plain_attribute_scales_are_made_by_the_model_and_not_proven() -> None:
    head = try_forward(build("plainly_warming")).head
    assert not head.name and head.refused.startswith("two calls of its forward with the same rows")
    (verdict,) = prove("plainly_warming", "replicate=2")
    assert "keeps something from call to call in a plain attribute" in verdict.refused
    assert "nearest that works: a count in a buffer" in verdict.refused


@pytest.mark.parametrize("name", ["running_norm", "averaging"])
def test_statistics_of_several_calls_are_refused_by_name(name: str) -> None:
    buffer = {"running_norm": "batch.running_mean", "averaging": "blocks.0.average"}[name]
    for verdict in prove(name, "replicate=2", "microbatches=2"):
        assert f"its forward changes the buffer '{buffer}' by the rows that it sees" in verdict.refused


def test_rows_that_depend_on_each_other_stay_in_one_call() -> None:
    whole, *cut = prove("row_norm", "tp=2", "replicate=2", "microbatches=2", "pp=2,microbatches=2")
    assert whole.passed, whole
    for verdict in cut:
        assert "its logits of a row depend on the other rows of the call" in verdict.refused
        assert "computes a batch in 2 calls; nearest that works: one reader and microbatches=1" in verdict.refused


def test_stages_of_a_model_whose_forward_changes_a_buffer_are_refused_by_name() -> None:
    reason = (
        r"changes the buffer 'blocks.0.calls' once a step, and under pp=2 .*nearest that works: shard.*in place of pp"
    )
    with pytest.raises(PlanError, match=reason):
        analyse_model(build("counting"), Layout.parse("pp=2,microbatches=2"))


@pytest.mark.parametrize("name, text", [("averaging", "recompute=full"), ("counting", "microbatches=4,recompute=full")])
def test_buffers_hold_what_a_plain_loop_leaves(name: str, text: str) -> None:
    built = build(name)
    module = materialise(built.module, built.recipe, built.config.seed).double().train()
    with Float64Ops():
        for batch in BATCHES:
            module(batch.tokens)
    wanted = dict(module.named_buffers())

    def left(_rank: int) -> dict[str, torch.Tensor]:
        layout = Layout.parse(f"{text},precision=float64")
        plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=1, reason="")
        program = build_program(build(name), plan, CPU)
        count = plan.layout.microbatches
        for step, batch in enumerate(BATCHES):
            pieces: Any = zip(batch.tokens.chunk(count), batch.targets.chunk(count))
            program.forward_backward([MicroBatch(*pair, None) for pair in pieces], 1.0, (0, step))
            program.evaluate(BATCHES[0])
            program.clear_gradients()
        return {key: item.clone() for key, item in program.buffers()}

    found = run_ranks(1, left)[0]
    assert found.keys() == wanted.keys()
    for key, item in found.items():
        torch.testing.assert_close(item, wanted[key], rtol=1e-12, atol=1e-12)
