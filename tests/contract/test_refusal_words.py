"""Refusals say what to change in a model's own code, and what works after that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.case import Case
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout

VOCAB, WIDTH, SEQUENCE = 61, 16, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (part(x).view(rows, tokens, -1, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class Apart(nn.Module):
    """A block whose attention is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Inline(Attention):
    """A block that computes its attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


@dataclass
class State:
    hidden: torch.Tensor


class Stated(Apart):
    """A block that takes and gives its hidden state in an object."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden))


class Model(nn.Module):
    def __init__(self, vocab: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        state = State(x) if isinstance(self.blocks[0], Stated) else x
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden if isinstance(state, State) else state)


def apart(vocab: int = VOCAB) -> nn.Module:
    return Model(vocab, Apart)


def inline(vocab: int = VOCAB) -> nn.Module:
    return Model(vocab, Inline)


def stated(vocab: int = VOCAB) -> nn.Module:
    return Model(vocab, Stated)


def prove(name: str, layout: str) -> Verdict:
    config = ModelConfig(name=f"{__name__}:{name}")
    build = partial(build_meta, config, vocab=VOCAB, context=SEQUENCE)
    batches = random_batches(1, 4, SEQUENCE, VOCAB, documents=False)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=50)
    return verify(case, [Layout.parse(f"{layout},precision=float64")])[0]


def test_attention_in_a_block_is_to_be_moved_for_sequence() -> None:
    refusal = prove("inline", "tp=2,sequence=true").refused
    assert "move the attention in front of o into a module of its own" in refusal and "or leave sequence out" in refusal
    assert prove("apart", "tp=2,sequence=true").passed, "what the refusal says works"


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
def test_a_hidden_state_in_an_object_is_named(layout: str) -> None:
    refusal = prove("stated", layout).refused
    assert "hidden state" in refusal and "which lies in a State: pass the tensor itself" in refusal
    assert refusal.count("State: pass") == (2 if layout == "cp=2" else 1), "each reason once"
    assert prove("apart", layout).passed, "what the refusal says works"
