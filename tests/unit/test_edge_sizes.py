"""Models and rows that are smaller than a layout, or than what it is tried out on."""

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.jobs.trained_model import _materialise
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.train.copies import _checksum
from meshwright.train.model_analysis import analyse_model

_SIZES = {"layers": 2, "width": 32, "heads": 4}


@pytest.mark.parametrize(
    ("layout", "vocab", "nearest"),
    [("tp=4", 2, "nearest that works: tp=2, or model.vocab = 4 or more"), ("tp=3", 2, "tp=2"), ("tp=4", 4, "")],
)
def test_every_rank_of_tp_has_a_word(layout: str, vocab: int, nearest: str) -> None:
    """A rank without rows of the embedding had looked up its row 0, and failed in the middle of a step."""
    built = build_meta(ModelConfig(name="gpt2", **_SIZES), vocab, 16)
    if not nearest:
        assert analyse_model(built, Layout.parse(layout)).table is not None
        return
    with pytest.raises(PlanError, match=f"{layout} splits the vocabulary.*{vocab} words.*{nearest}"):
        analyse_model(built, Layout.parse(layout))


@pytest.mark.parametrize(("layout", "context"), [("tp=2", 5), ("pp=2", 9), ("cp=2", 4), ("tp=2", 2)])
def test_trials_need_learned_positions(layout: str, context: int) -> None:
    """Trials of longer rows than a model has positions for had failed with an index error."""
    built = build_meta(ModelConfig(name="gpt2", **_SIZES), 30, context)
    needed = 10 if layout == "pp=2" else 8
    message = f"rows of {needed} tokens.*{context} learned positions; nearest that works: model.context = {needed}"
    with pytest.raises(PlanError, match=message):
        analyse_model(built, Layout.parse(layout))
    assert analyse_model(build_meta(ModelConfig(name="gpt2", **_SIZES), 30, needed), Layout.parse(layout))


def frozen(vocab: int = 30) -> nn.Module:
    """A model of which nothing is trained."""
    return nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, vocab)).requires_grad_(False)


@pytest.mark.parametrize("layout", ["replicate=1", "tp=2", "shard=2,zero=3"])
def test_a_model_of_which_nothing_trains_is_refused(layout: str) -> None:
    built = build_meta(ModelConfig(name="tests.unit.test_edge_sizes:frozen"), 30, 16)
    with pytest.raises(PlanError, match="every weight of the model is frozen"):
        analyse_model(built, Layout.parse(layout))


class Elementless(nn.Module):
    """A model with a weight of no elements, which no checkpoint holds."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)
        self.nothing = nn.Parameter(torch.zeros(0, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def elementless(vocab: int = 30) -> nn.Module:
    return Elementless(vocab)


def test_a_trained_model_may_have_a_weight_without_elements() -> None:
    built = build_meta(ModelConfig(name="tests.unit.test_edge_sizes:elementless"), 30, 16)
    values = {name: torch.ones(weight.shape) for name, weight in built.module.named_parameters() if weight.numel()}
    _materialise(built, values)
    assert all(bool((weight == 1).all()) for weight in built.module.parameters())


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_copies_are_compared_wherever_a_small_weight_lies(offset: int, size: int) -> None:
    flat = torch.arange(8.0)
    view = flat[offset : offset + size]
    assert _checksum([view]) == _checksum([view.clone()])
