"""Layers that append their own loss to a list, or write into a dict, that they are given: FSDP2 gives them copies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, Verdict, random_batches, verify
from meshwright.spec.layout import Layout
from tests.contract.test_shared_modules import WIDTH, Block, StackedModel, make_mlp
from tests.tiers import further

VOCAB = 31


class Penalised(Block):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], named: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """x: (B, S, D) to the same shape."""
        x = super().forward(x)
        losses.append(self.norm.weight.square().sum())
        named["last"] = self.norm.bias.square().sum() + named.get("last", 0.0)
        return x


class PenalisedModel(StackedModel):
    def __init__(self, vocab: int) -> None:
        super().__init__(vocab, [Penalised(nn.LayerNorm(WIDTH), make_mlp()) for _ in range(3)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """tokens: (B, S) int64 to logits (B, S, V), and the loss where there are labels (B, S)."""
        x, losses, named = self.embedding(tokens), list[torch.Tensor](), dict[str, torch.Tensor]()
        for block in self.blocks:
            x = block(x, losses, named=named)
        logits = self.head(self.norm(x))
        found = {"logits": logits}
        if labels is not None:
            entropy = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            found["loss"] = entropy + 0.1 * sum(losses) + 0.2 * named["last"]
        return found


def penalised(vocab: int = VOCAB) -> nn.Module:
    return PenalisedModel(vocab)


def verdict(layout: str) -> Verdict:
    config = ModelConfig(name="tests.contract.test_argument_containers:penalised")
    batches = random_batches(2, 4, 8, VOCAB, documents=False)
    case = Case(build=partial(build_meta, config, VOCAB, 8), batches=batches, recipe=OptimizerRecipe(), timeout_s=120)
    return verify(case, [Layout.parse(f"{layout},precision=float64")])[0]


@pytest.mark.parametrize("layout", further(["shard=2,zero=1,microbatches=2", "shard=2,zero=2", "replicate=2"]))
def test_what_layers_append_reaches_the_loss(layout: str) -> None:
    found = verdict(layout)
    assert found.passed, found


def test_what_layers_append_is_refused_where_their_weights_are_freed() -> None:
    found = verdict("shard=2,zero=3")
    assert "Penalised, changes a list that it is called with" in found.refused and "zero=2" in found.refused
