"""Weights that are computed, sparse, complex or hooked: trained where possible, else refused before a rank starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from meshwright.errors import ConfigError, PlanError
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model
from tests.objectives import WIDTH, Backbone

VOCAB, CONTEXT = 61, 12


class Headed(Backbone):
    """Tokens to logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


class Headless(Backbone):
    """Makes its logits from a parameter that is in no module."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        del self.head
        self.rows = nn.Parameter(torch.randn(vocab, WIDTH) / 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden(tokens) @ self.rows.T


def computed_in_a_dict(model: nn.Module) -> None:
    model.tables = {"twice": [model.head.weight * 2]}


def ranks_anew(model: nn.Module) -> None:
    """Makes it look like peft's AdaLoRA."""
    model.base_model = nn.Identity()
    model.base_model.update_and_allocate = lambda step: None
    model.peft_config = {"default": SimpleNamespace(peft_type="ADALORA")}


def old_weight_norm(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.blocks[1].out)


def weight_norm_of_head(model: nn.Module) -> None:
    parametrizations.weight_norm(model.head)


def weight_norm_of_column(model: nn.Module) -> None:
    parametrizations.weight_norm(model.blocks[1].up)


def spectral_norm(model: nn.Module) -> None:
    parametrizations.spectral_norm(model.blocks[1].out)


def old_spectral_norm(model: nn.Module) -> None:
    nn.utils.spectral_norm(model.blocks[1].out)


def sparse(model: nn.Module) -> None:
    model.blocks[1].out.weight = nn.Parameter(torch.eye(WIDTH).to_sparse())


def sparse_by_indices(model: nn.Module) -> None:
    diagonal = torch.arange(WIDTH).expand(2, -1)
    entries = torch.sparse_coo_tensor(diagonal, torch.ones(WIDTH), (WIDTH, WIDTH), check_invariants=False)
    model.blocks[1].out.weight = nn.Parameter(entries)


def complex_numbers(model: nn.Module) -> None:
    model.blocks[1].factor = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))


def sparse_gradients(model: nn.Module) -> None:
    model.embedding = nn.Embedding(VOCAB, WIDTH, sparse=True)


def hooked(model: nn.Module) -> None:
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def hooked_after_accumulation(model: nn.Module) -> None:
    model.blocks[1].out.weight.register_post_accumulate_grad_hook(lambda weight: None)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    function.__name__: function
    for function in (
        *(old_weight_norm, weight_norm_of_head, weight_norm_of_column, spectral_norm, old_spectral_norm),
        *(computed_in_a_dict, ranks_anew),
        *(sparse, sparse_by_indices, complex_numbers, sparse_gradients, hooked, hooked_after_accumulation),
    )
}


def changed(change: str, vocab: int = VOCAB) -> nn.Module:
    model = Headed(vocab)
    CHANGES[change](model)
    return model


def headless(vocab: int = VOCAB) -> nn.Module:
    return Headless(vocab)


def build(change: str) -> BuiltModel:
    return build_meta(
        ModelConfig(name=f"{__name__}:changed", overrides={"change": change}), vocab=VOCAB, context=CONTEXT
    )


@pytest.mark.parametrize(
    "change, reason",
    [
        ("old_weight_norm", r"'blocks.1.out.weight' is computed from weights.*nearest.*parametrizations.weight_norm"),
        ("computed_in_a_dict", "'tables' is computed from weights while the model is made"),
        ("ranks_anew", r"peft's ADALORA.*update_and_allocate\(step\).*nearest.*LoraConfig"),
        ("sparse", "makes a sparse tensor.*nearest.*a dense weight"),
        ("sparse_by_indices", "makes a sparse tensor.*nearest.*a dense weight"),
        ("complex_numbers", r"'blocks.1.factor' is complex.*nearest.*view_as_complex"),
        ("hooked", r"'head.weight' has a hook on its gradient.*nearest.*torch.autograd.Function in forward"),
        ("hooked_after_accumulation", r"'blocks.1.out.weight' has a hook on its gradient"),
        ("sparse_gradients", "'embedding' has sparse=True.*nearest.*sparse=False"),
    ],
)
def test_weights_that_no_layout_trains_are_refused_as_the_model_is_made(change: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(change)


def test_a_head_whose_weight_is_computed_stays_whole_and_trains() -> None:
    table = sharding_table(build("weight_norm_of_head"))
    assert table.vocabulary == ("embedding",) and "computed from other parameters" in table.refused["head"]
    batches = random_batches(1, 4, CONTEXT, VOCAB, documents=False)
    case = Case(build=partial(build, "weight_norm_of_head"), batches=batches, recipe=OptimizerRecipe(), timeout_s=50)
    (verdict,) = verify(case, [Layout.parse("tp=2,precision=float64")])
    assert verdict.passed, verdict


def test_a_layer_with_a_computed_column_matrix_keeps_its_group_whole_and_trains() -> None:
    table = sharding_table(build("weight_norm_of_column"))
    assert table.layers["blocks.0"].groups
    assert any("computed from other parameters" in reason for reason in table.layers["blocks.1"].refused.values())
    batches = random_batches(1, 4, CONTEXT, VOCAB, documents=False)
    build_one = partial(build, "weight_norm_of_column")
    case = Case(build=build_one, batches=batches, recipe=OptimizerRecipe(), timeout_s=50, allow_whole=True)
    (verdict,) = verify(case, [Layout.parse("tp=2,precision=float64")])
    assert verdict.passed, verdict


def test_what_stays_whole_has_a_reason() -> None:
    built = build_meta(ModelConfig(name=f"{__name__}:headless"), vocab=VOCAB, context=CONTEXT)
    assert sharding_table(built).refused == {"embedding": "the model's other end wasn't found"}
    # Its forward takes targets, and gives their loss.
    with_loss = build_meta(ModelConfig(name="tests.objectives:logit_penalty"), vocab=VOCAB, context=CONTEXT)
    reason = sharding_table(with_loss).refused["head"]
    assert "doesn't run on logits of a part of the vocabulary, as a loss inside of it (IndexError" in reason


@pytest.mark.parametrize("change", ["spectral_norm", "old_spectral_norm"])
def test_a_norm_that_changes_a_buffer_is_split_around_and_refused_in_stages(change: str) -> None:
    built = build(change)
    layers = sharding_table(built).layers
    assert layers["blocks.0"].groups and layers["blocks.1"].groups
    with pytest.raises(PlanError, match=r"changes the buffer 'blocks.1.out.*_u' once a step.*in place of pp"):
        analyse_model(built, Layout.parse("pp=2,microbatches=2"))
