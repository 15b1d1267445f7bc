"""A loss that chooses its own targets trains as one call of all rows does, however the rows are split."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.proof.case import Case
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper
from tests.counted_models import PAD, PROMPT_END
from tests.ranks.group import run_ranks
from tests.tiers import further

VOCAB, SEQUENCE, ROWS = 61, 12, 8
SHIFTED = ("shifted_answers", "shifted_masked")
CHOOSING = (
    *("pad_ignored", "answers", "floored_answers", "middle_alone", "last_before_pad", "input_masked", "unlearned"),
    *SHIFTED,
)
LAYOUTS = (
    "replicate=2",
    "shard=2,zero=3,microbatches=2",
    "shard=2,zero=2,microbatches=4",
    "replicate=2,rows=3-1",
    "pp=2,microbatches=4",
    "pp=2,microbatches=4,schedule=zbv",
    "tp=2,microbatches=2",
)


def build(name: str, vocab: int = VOCAB) -> BuiltModel:
    return build_meta(ModelConfig(name=f"tests.counted_models:{name}"), vocab=vocab, context=SEQUENCE)


def batch(seed: int) -> MicroBatch:
    """Returns rows with 0 to 11 trained targets: two have no answer, and in the last one all is padding."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(10, VOCAB, (ROWS, SEQUENCE + 1), generator=generator)
    for row in range(ROWS):
        if row not in (0, 4):
            stream[row, (3 * row) % SEQUENCE] = PROMPT_END
        stream[row, SEQUENCE + 1 - row :] = PAD
    stream[-1, 1:] = PAD
    return MicroBatch(stream[:, :-1].contiguous(), stream[:, 1:].clone(), None)


def prove(name: str, *texts: str) -> list[Verdict]:
    case = Case(
        build=partial(build, name),
        batches=[batch(1), batch(2)],
        recipe=OptimizerRecipe(),
        timeout_s=50,
        allow_whole=True,
    )
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


@pytest.mark.parametrize("name", CHOOSING)
def test_a_loss_that_chooses_its_targets_is_found(name: str) -> None:
    objective = try_forward(build(name)).objective
    assert objective.counts_targets and objective.exact and not objective.terms
    assert objective.labels == ("shifted" if name in SHIFTED else "aligned")


@pytest.mark.parametrize("name", further(["pad_ignored", "answers"]))
def test_it_is_found_in_a_large_vocabulary_by_the_words_that_its_code_names(name: str) -> None:
    assert try_forward(build(name, vocab=9000)).objective.counts_targets


def test_a_mask_of_what_stands_before_a_target_is_found_in_a_middling_vocabulary() -> None:
    """Random rows hold one word of 2,000 seldom."""
    assert try_forward(build("input_masked", vocab=2000)).objective.counts_targets


@pytest.mark.parametrize("name", ["limited", "large_logits"])
def test_what_shows_in_a_trained_model_alone_is_no_plain_loss(name: str) -> None:
    assert not try_forward(build(name)).objective.plain


def test_logits_that_are_a_cast_of_those_of_the_loss_show_no_targets() -> None:
    """In float64 the cast is none: the loss was counted, and training in bf16 ended with an assertion."""
    objective = try_forward(build("widened_logits")).objective
    assert not objective.counts_targets and not objective.exact


@pytest.mark.parametrize("name", further(["answers", "floored_answers", "last_before_pad"], ("floored_answers",)))
def test_a_proof_puts_words_that_a_loss_names_among_random_ones(name: str) -> None:
    """Of 9,000 words random rows hold none of them: without it every loss is NaN, or 0 and all gradients with it."""
    case = Case(
        build=partial(build, name, 9000),
        batches=random_batches(2, ROWS, SEQUENCE, 9000, documents=False),
        made_up=True,
        recipe=OptimizerRecipe(),
        timeout_s=50,
        allow_whole=True,
    )
    layout = Layout.parse("replicate=2,microbatches=2,precision=float64")
    assert verify(case, [layout])[0].passed
    if name == "floored_answers":
        assert "every gradient is 0" in verify(dataclasses.replace(case, made_up=False), [layout])[0].refused


@pytest.mark.parametrize("name", ["weighted_words", "penalised_answers"])
def test_another_mean_is_none_over_chosen_targets(name: str) -> None:
    objective = try_forward(build(name)).objective
    assert not objective.counts_targets and not objective.exact


@pytest.mark.parametrize("name", further(CHOOSING, ("answers", "shifted_answers")))
def test_layouts_train_as_one_call_of_all_rows(name: str) -> None:
    assert [(v.layout, v.refused, v.crashed, v.worst) for v in prove(name, *LAYOUTS) if not v.passed] == []


def test_the_verdict_says_where_its_reference_is_called_as_often() -> None:
    verdict = prove("weighted_words", "replicate=2,microbatches=2")[0]
    assert verdict.passed and verdict.scope is not None
    assert "its own loss (rest) depends on which rows share a call" in verdict.scope.summary
    assert "called 4 times a step" in verdict.scope.summary
    assert "share a call" not in prove("answers", "replicate=2")[0].scope.summary  # type: ignore[union-attr]


@pytest.mark.parametrize("name", further(CHOOSING, ("pad_ignored", "shifted_masked")))
@pytest.mark.parametrize("layout", ["replicate=2,microbatches=2", "shard=2,zero=3,microbatches=2"])
def test_a_step_is_that_of_a_loop_by_hand(name: str, layout: str) -> None:
    """The other side is plain torch: one call of all rows, backward, norm; and the validation loss of all rows."""
    rows = batch(3)
    built = build(name)
    module = materialise(built.module, built.recipe, built.config.seed).double().train()
    # Labels as its author gives them: the tokens themselves where its code shifts.
    last = rows.targets.clone()
    given = torch.cat([rows.tokens[:, :1], last[:, :-1]], dim=1) if name in SHIFTED else rows.targets
    output = module(rows.tokens, given)
    loss = output["loss"] if isinstance(output, dict) else output[1]
    loss.backward()
    norm = float(torch.cat([item.grad.flatten() for item in module.parameters() if item.grad is not None]).norm())

    parsed = Layout.parse(f"{layout},precision=float64")
    facts = analyse_model(built, parsed)

    def step(rank: int) -> tuple[float, float, float]:
        plan = Plan(layout=parsed, prediction=Prediction(memory={}), ranks=2, reason="")
        program = build_program(build(name), plan, torch.device("cpu"), facts)
        optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=False)
        stepper = Stepper(program, optimizer, LossScaler(False), clip=0.0, seed=0)
        start, stop = parsed.span(rank, ROWS)
        half = (stop - start) // 2
        parts = [slice(start, start + half), slice(start + half, stop)]
        batches = [MicroBatch(rows.tokens[part], rows.targets[part], None) for part in parts]
        sums = stepper.total(torch.stack([program.evaluate(item) for item in batches]).sum(dim=0))
        values = stepper.run(0, batches, int((rows.targets != -100).sum()), 0.0, 0.0).read()
        return values["loss"], values["grad_norm"], float(sums[0] / sums[1])

    for values in run_ranks(2, step):
        assert values == pytest.approx((loss.item(), norm, loss.item()), rel=1e-12)
