"""Products in chunks beside tp's traffic train as one device does, under every axis and choice beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import chunked_products, overlapped_products
from meshwright.parallel.overlapped_linears import ColumnEntry
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.tiers import cases

torch.set_num_threads(1)
VOCAB, TOKENS = 61, 16
"""On two ranks 8 tokens of a row each, on four 4, of which 3 chunks have unequal parts."""


def small(name: str, **sizes: Any) -> ModelConfig:
    return ModelConfig(name=name, **({"layers": 2, "width": 32, "heads": 4} | sizes))


class CrossBlock(nn.Module):
    """Keys and values are of another tensor than queries, as wide; a third tensor's product goes unused at times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other_norm, self.second_norm = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(width, 48), nn.Linear(width, 48, bias=False), nn.Linear(48, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, other = self.norm(x), self.other_norm(x) + 0.5
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.q(query), self.k(other), self.v(other)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        # In place on what a product returned, as many models' activations are.
        return x + self.down(nn.functional.relu(self.gate(y), inplace=True) * self.up(y))


class CrossModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 32)
        self.blocks = nn.ModuleList([CrossBlock(32) for _ in range(2)])
        self.head = nn.Linear(32, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def crossed(vocab: int = VOCAB) -> nn.Module:
    return CrossModel(vocab)


MODELS = {
    "llama": small("llama", kv_heads=2),
    "gpt2": small("gpt2"),
    "mixtral": small("mixtral", kv_heads=2),
    "deep": small("llama", layers=4),
    "falcon": small("falcon"),
    "plain": ModelConfig(name="tests.plain_model:build"),
    "crossed": ModelConfig(name=f"{__name__}:crossed"),
    "adapted": ModelConfig(name="tests.contract.test_adapters:adapted"),
    "in_place": ModelConfig(name="tests.contract.test_adapters:in_place", dropout=0.2),
    "deepseek": small("deepseek_v3"),
}


def prove(model: str, texts: tuple[str, ...]) -> list[Verdict]:
    config = MODELS[model]

    def build() -> BuiltModel:
        return build_meta(config, vocab=VOCAB, context=TOKENS)

    batches = random_batches(1, 8, TOKENS, VOCAB, documents=False)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250)
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


CASES = (
    ("llama", ("tp=2,tp_overlap=3", "tp=2,sequence=true,tp_overlap=3", "tp=2,tp_overlap=1,microbatches=2")),
    ("gpt2", ("tp=2,tp_overlap=3", "tp=2,sequence=true,tp_overlap=3,recompute=selective")),
    ("mixtral", ("tp=2,tp_overlap=2", "tp=2,sequence=true,tp_overlap=3,recompute=full")),
    ("plain", ("tp=2,tp_overlap=3", "tp=2,tp_overlap=4,recompute=full", "tp=2,shard=2,zero=3,tp_overlap=2")),
    ("crossed", ("tp=2,tp_overlap=3", "tp=2,tp_overlap=2,recompute=selective")),
    ("adapted", ("tp=2,tp_overlap=3", "tp=2,sequence=true,tp_overlap=3,recompute=full", "shard=2,tp=2,tp_overlap=2")),
    ("in_place", ("tp=2,tp_overlap=2",)),
    ("gpt2", ("tp=4,sequence=true,tp_overlap=3", "tp=4,tp_overlap=5", "shard=2,tp=2,sequence=true,tp_overlap=2")),
    ("deep", ("pp=2,tp=2,microbatches=4,schedule=zbv,tp_overlap=2,sequence=true",)),
    ("deep", ("pp=2,tp=2,tp_overlap=2,microbatches=2,split=0-4",)),
    ("mixtral", ("tp=2,ep=2,tp_overlap=2", "shard=2,tp=2,ep=2,zero=1,sequence=true,tp_overlap=2")),
    ("llama", ("cp=2,tp=2,tp_overlap=2", "cp=2,tp=2,attention=ring,sequence=true,tp_overlap=3")),
    ("deepseek", ("tp=2,tp_overlap=2", "tp=2,sequence=true,tp_overlap=3")),
    ("llama", ("shard=2,tp=2,zero=2,tp_overlap=4,recompute=selective,sequence=true", "replicate=2,tp=2,tp_overlap=2")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "texts"), cases(CASES, (0, 4), extended=(1, 2, 3, 5)))
def test_chunks_train_as_one_device(model: str, texts: tuple[str, ...]) -> None:
    assert [(v.layout, v.refused, v.worst) for v in prove(model, texts) if not v.passed] == []


def test_a_model_without_plain_products_is_refused() -> None:
    """Its linear modules are of a class that multiplies by itself."""
    (verdict,) = prove("falcon", ("tp=2,tp_overlap=3",))
    assert "none that it splits here is one" in verdict.refused and "leave tp_overlap out" in verdict.refused


def _swapped_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's rows go to the tokens of the other rank."""
    plain = chunked_products.put_chunk

    def swapped(out: torch.Tensor, rows: torch.Tensor, size: int, span: tuple[int, int]) -> None:
        plain(out, rows.view(size, -1, rows.shape[-1]).flip(0).reshape(rows.shape), size, span)

    monkeypatch.setattr(chunked_products, "put_chunk", swapped)


def _no_weight_gradient_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the weights that read a tensor has no gradient."""
    plain = chunked_products.column_backward

    def left_out(*args: Any) -> list[torch.Tensor]:
        *rest, last = plain(*args)
        return [*rest, torch.zeros_like(last)]

    monkeypatch.setattr(overlapped_products, "column_backward", left_out)


def _any_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is handed out whatever its module is called with."""

    def hand_out(self: Any, linear: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            product = self._products.pop(linear, (None, None))[1]
            return plain(x) if product is None else product + linear.bias if linear.bias is not None else product

        return forward

    monkeypatch.setattr(ColumnEntry, "_hand_out", hand_out)
    monkeypatch.setattr(ColumnEntry, "_enter", _enter_once(ColumnEntry._enter))


def _enter_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self._plain_move(x) if self._products else plain(self, x)

    return enter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "model", "text"),
    [
        (_swapped_chunks, "llama", "tp=2,sequence=true,tp_overlap=2"),
        (_no_weight_gradient_of_the_last, "llama", "tp=2,tp_overlap=2"),
        (_any_tensor, "crossed", "tp=2,tp_overlap=2"),
    ],
)
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = prove(model, (text,))
    assert not verdict.passed and not verdict.refused
