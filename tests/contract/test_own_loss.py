"""A model's own loss is trained as its author would: layouts equal a plain loop that calls the model with targets."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshwright.errors import ConfigError
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


@pytest.mark.parametrize("name", cases(OWN, ("two_heads", "balanced")))
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
