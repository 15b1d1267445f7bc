"""Modules that two layers share, split by ``tp`` with tokens between the layers, and over stages."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.tiers import further

VOCAB, WIDTH, HEADS = 31, 16, 4


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        rows, tokens, _ = x.shape
        q, k, v = (f(x).view(rows, tokens, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class Block(nn.Module):
    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.first_norm, self.norm, self.mlp = _Attention(), nn.LayerNorm(WIDTH), norm, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        x = x + self.attention(self.first_norm(x))
        return x + self.mlp(self.norm(x))


class StackedModel(nn.Module):
    def __init__(self, vocab: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocab, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, S) int64 to logits (B, S, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def shares_mlp(vocab: int = VOCAB) -> nn.Module:
    mlp = make_mlp()
    return StackedModel(vocab, [Block(nn.LayerNorm(WIDTH), mlp) for _ in range(2)])


def shares_norm(vocab: int = VOCAB) -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    return StackedModel(vocab, [Block(norm, make_mlp()) for _ in range(2)])


@pytest.mark.parametrize("function", further(["shares_mlp", "shares_norm"]))
def test_layers_that_share_a_module_train_as_on_one_rank(function: str) -> None:
    """With split tokens each rank has a summand of its gradient, under whichever name a stage knows it by."""
    config = ModelConfig(name=f"tests.contract.test_shared_modules:{function}")
    batches = random_batches(2, 4, 8, VOCAB, documents=False)
    case = Case(build=partial(build_meta, config, VOCAB, 8), batches=batches, recipe=OptimizerRecipe(), timeout_s=60)
    layouts = ["tp=2,sequence=true", "tp=2,pp=2,microbatches=2", "tp=2,pp=2,microbatches=2,sequence=true"]
    verdicts = verify(case, [Layout.parse(f"{layout},precision=float64") for layout in layouts])
    assert all(verdict.passed for verdict in verdicts), verdicts
