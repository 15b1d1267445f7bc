"""Tensors that forward leaves in attributes: copies of a module have them without their graph, however nested."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError, PlanError
from meshwright.models.analysis.clone import duplicate_module
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.stored_tensors import find_stored_tensor
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.masks import Masks

VOCAB = 31
Pair = namedtuple("Pair", ["left", "right"])


class Storing(nn.Module):
    def __init__(self, vocab: int, hidden: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(vocab, 8), nn.Linear(8, 8), nn.Linear(8, vocab)
        self.hidden, self.last = hidden, {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, S) int64 to logits (B, S, V)."""
        x = self.body(self.embedding(tokens))
        self.last["of"] = SimpleNamespace(x=x) if self.hidden else {"x": [x, (x, 1), Pair(x, "y")]}
        return self.head(x)


def storing(vocab: int = VOCAB) -> nn.Module:
    return Storing(vocab, hidden=False)


def hiding(vocab: int = VOCAB) -> nn.Module:
    return Storing(vocab, hidden=True)


def test_copies_have_nested_tensors_without_their_graph() -> None:
    module = Storing(VOCAB, hidden=False)
    shared = module.body.shared = module.last
    module(torch.zeros(1, 2, dtype=torch.long))
    copied = duplicate_module(module)
    first, (second, one), pair = copied.last["of"]["x"]
    assert not any(tensor.requires_grad for tensor in (first, second, pair.left))
    assert one == 1 and pair.right == "y" and type(pair) is Pair
    assert module.last is shared and copied.last is copied.body.shared


def test_a_model_that_stores_nested_tensors_is_read() -> None:
    built = build_meta(ModelConfig(name="tests.unit.test_stored_tensors:storing"), VOCAB, 8)
    trial = try_forward(built)
    assert trial.objective.plain and find_stored_tensor(built, trial.objective) == "last"


def test_tensors_in_other_objects_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"an object in one of its attributes has a tensor with a gradient.*lists"):
        try_forward(build_meta(ModelConfig(name="tests.unit.test_stored_tensors:hiding"), VOCAB, 8))


def test_draws_for_rows_that_a_router_chose_are_refused_by_the_oracle() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    with Masks(module, (), 8, "0,1"), pytest.raises(PlanError, match=r"draws a tensor \(39, 4\).*the 8 rows.*nearest"):
        nn.functional.dropout(torch.ones(39, 4), 0.5)
