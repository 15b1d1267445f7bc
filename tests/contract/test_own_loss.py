"""A model's own loss is trained as its author would: layouts equal a plain loop that calls the model with targets."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis import forward_trace, objective_trial
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.models.forward import model_forward
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.feed import MicroBatch
from meshwright.train.session import build_program
from tests.ranks.group import run_ranks
from tests.tiers import cases

VOCAB, SEQUENCE, ROWS = 61, 12, 8
MIXTURE = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
DATA = ("replicate=2", "shard=2,zero=3,microbatches=2", "microbatches=4,recompute=full", "replicate=2,rows=3-1")
LAYOUTS = (*DATA, "tp=2")
OWN = ("logit_penalty", "straight_through", "two_heads", "balanced", "balanced_dropout", "loss_alone", "shifted_alone")


def build(config: ModelConfig) -> BuiltModel:
    return build_meta(config, vocab=VOCAB, context=SEQUENCE)


def own(name: str) -> ModelConfig:
    return ModelConfig(name=f"tests.objectives:{name}")


def mixture(name: str) -> ModelConfig:
    return shrink_config(ModelConfig(name=name, overrides=dict(MIXTURE)), layers=2, width=32)


def prove(config: ModelConfig, *texts: str) -> list[Verdict]:
    batches = random_batches(2, ROWS, SEQUENCE, VOCAB, documents=False)
    # Under tp the head stays whole: the model computes its loss from all logits, not from a share of them.
    case = Case(build=partial(build, config), batches=batches, recipe=OptimizerRecipe(), timeout_s=50, allow_whole=True)
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


def refusals(config: ModelConfig, *texts: str) -> list[str]:
    found = [verdict.refused for verdict in prove(config, *texts)]
    assert all(found)
    return found


@pytest.mark.parametrize(
    "name, terms",
    [
        ("plain", {}),
        ("logit_penalty", {"z": ("rows", True)}),
        ("straight_through", {"rest": ("rows", False)}),
        ("two_heads", {"rest": ("targets+1", True)}),
        # A sum of means over different tokens is a mean over none.
        ("further_heads", {"rest": ("rows", False)}),
        ("balanced", {"balance": ("rows", False), "z": ("rows", True)}),
        ("loss_alone", {"loss": ("targets", True)}),
        ("shifted_alone", {"loss": ("targets", True)}),
    ],
)
def test_what_a_loss_is_made_of_is_found(name: str, terms: dict[str, tuple[str, bool]]) -> None:
    objective = try_forward(build(own(name))).objective
    assert {term.name: (term.mean, term.exact) for term in objective.terms} == terms


@pytest.mark.parametrize("vocab", [2000, 9000])
@pytest.mark.parametrize("name, chooses", [("rare_ignored", True), ("plain", False)])
def test_a_word_that_few_batches_hold_is_left_out(name: str, chooses: bool, vocab: int) -> None:
    objective = try_forward(build_meta(own(name), vocab=vocab, context=SEQUENCE)).objective
    assert (objective.counts_targets, objective.plain) == (chooses, not chooses)


def test_a_trial_of_a_plain_loss_repeats_few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be of millions of weights: one to fit the rows, two for the labels, two to be equal, one row alone."""
    calls, run = [], objective_trial.author_output

    def counted(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(objective_trial, "author_output", counted)
    trial = inspect.unwrap(try_forward)(build(ModelConfig(name="gpt2", layers=1, width=32, heads=2)))
    assert trial.objective.plain and not trial.head.refused and len(calls) == 6


def test_a_trial_leaves_the_seeds_of_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a context keeps every seed with the stack that gave it, a millisecond each, for ever."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _seed: pytest.fail("every GPU was seeded"))
    assert try_forward(build(own("plain"))).objective.plain


def test_a_cross_entropy_that_is_written_out_is_tried_with_every_word() -> None:
    assert try_forward(build_meta(own("by_hand"), vocab=2000, context=SEQUENCE)).objective.plain


def test_a_forward_that_writes_into_its_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"writes into its argument 'targets'.*targets = targets.masked_fill"):
        try_forward(build_meta(own("writes_targets"), vocab=2000, context=SEQUENCE))


IN_PLACE = ("penalty_in_place", "cooled_in_place", "scored_in_place")


@pytest.mark.parametrize(
    "name",
    ["logit_penalty", "straight_through", "loss_alone", "rare_ignored", "counting", "halved_gradient", *IN_PLACE],
)
def test_a_model_too_large_for_a_trial_is_tried_where_its_operators_do_not_tell(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = try_forward(build(own(name)))
    monkeypatch.setattr(objective_trial, "LARGEST_FUNCTION", 0)
    large = try_forward(build(own(name)))
    assert [(term.name, term.mean) for term in large.objective.terms] == [
        (term.name, term.mean) for term in small.objective.terms
    ]
    assert (large.moving, large.head.refused) == (small.moving, small.head.refused)
    monkeypatch.setattr(forward_trace, "TRIAL_BYTES", 1 << 50)
    with pytest.raises(ConfigError, match=r"a trial of its .* G weights takes .* nearest that works: torch.nn"):
        try_forward(build(own(name)))


@pytest.mark.parametrize("model", ["tests.objectives:plain", "tests.objectives:by_hand", "tests.odd_models:spare"])
def test_operators_tell_that_a_large_model_trains_the_cross_entropy(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_trial, "LARGEST_FUNCTION", 0)
    monkeypatch.setattr(forward_trace, "TRIAL_BYTES", 32 if model.endswith("by_hand") else 1 << 50)
    trial = try_forward(build(ModelConfig(name=model)))
    assert trial.objective.plain and not trial.moving


def test_a_large_model_s_reads_outside_of_a_layer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(name="tests.contract.test_outside_reads:behind")
    small = try_forward(build(model))
    monkeypatch.setattr(objective_trial, "LARGEST_FUNCTION", 0)
    assert small.outside and try_forward(build(model)).outside == small.outside


@pytest.mark.parametrize("name", cases(OWN, ("balanced",), extended=("two_heads",)))
def test_terms_of_a_model_of_one_s_own(name: str) -> None:
    assert [(v.layout, v.refused, v.worst) for v in prove(own(name), *LAYOUTS) if not v.passed] == []


@pytest.mark.parametrize("name", cases(["mixtral", "qwen3_moe"]))
def test_the_balancing_loss_of_a_mixture(name: str) -> None:
    texts = (*DATA[:3], "tp=2", "shard=2,ep=2")
    assert [(v.layout, v.refused, v.worst) for v in prove(mixture(name), *texts) if not v.passed] == []


def test_a_layout_that_a_term_does_not_allow_is_refused_by_name() -> None:
    stages, context = refusals(own("balanced"), "pp=2,microbatches=2", "cp=2")
    assert "reads what layer 0 made, past the layers between" in stages
    assert "terms (balance, z) that it computes from whole rows; use shard=2" in context


def test_a_term_of_the_last_stage_goes_through_a_pipeline() -> None:
    texts = ("pp=2,microbatches=2", "pp=2,microbatches=2,schedule=zbv")
    assert [(v.layout, v.refused, v.worst) for v in prove(own("two_heads"), *texts) if not v.passed] == []


def test_heads_further_ahead_count_the_targets_that_their_code_counts() -> None:
    texts = ("shard=2,zero=3", "pp=2,microbatches=2", "replicate=2,rows=3-1")
    assert [(v.layout, v.refused, v.worst) for v in prove(own("further_heads"), *texts) if not v.passed] == []


@pytest.mark.parametrize("name", ["balanced", "loss_alone"])
def test_rows_without_targets_count_for_nothing_in_an_evaluation(name: str) -> None:
    batch = random_batches(1, 2, SEQUENCE, VOCAB, documents=False)[0]
    empty = MicroBatch(batch.tokens, torch.full_like(batch.targets, -100), None)

    def sums(_rank: int) -> list[torch.Tensor]:
        plan = Plan(layout=Layout(), prediction=Prediction(memory={}), ranks=1, reason="")
        program = build_program(build(own(name)), plan, torch.device("cpu"))
        return [program.evaluate(item) for item in (batch, empty)]

    some, none = run_ranks(1, sums)[0]
    assert some.isfinite().all() and some[0] > 0
    assert (none == 0).all()


def test_logits_of_a_forward_that_insists_on_targets() -> None:
    built = build(own("balanced"))
    module = materialise(built.module, built.recipe, built.config.seed).eval()
    assert model_forward(module, built.structure, torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, VOCAB)


def test_a_loss_that_counts_what_has_no_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes it for a class; write ignore_index=-100"):
        try_forward(build(own("other_ignored")))


def test_logits_behind_another_tensor_need_a_name() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    for name in ("hidden_first", "hidden_named"):
        built = build(own(name))
        module = materialise(built.module, built.recipe, built.config.seed)
        if name == "hidden_first":
            with pytest.raises(ConfigError, match="return the logits first"):
                model_forward(module, built.structure, tokens)
        else:
            assert model_forward(module, built.structure, tokens).shape == (2, 5, VOCAB)


def test_a_scalar_that_nothing_weighs_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing says how the scalar enters the loss"):
        try_forward(build(own("loose")))
