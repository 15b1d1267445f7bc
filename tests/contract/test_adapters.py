"""Low-rank adapters beside frozen matrices are split with them: of columns the second half, of rows the first."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.odd_models import VOCAB, WIDTH
from tests.tiers import further

torch.set_num_threads(1)
CONTEXT = 16


class Adapter(nn.Module):
    """What peft makes of a linear: the frozen matrix, and beside it a dropout and a trained product of rank four."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        return result + 2 * self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class InPlace(Adapter):
    """Drops some of its input itself, behind its frozen matrix or, with ``ahead``, in front of it."""

    def __init__(self, base: nn.Linear, dropout: float, ahead: bool) -> None:
        super().__init__(base, dropout)
        self.dropout, self.ahead = dropout, ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = 0.0 if self.ahead else self.base_layer(x)
        kept = nn.functional.dropout(x, self.dropout, self.training, inplace=True)
        result = self.base_layer(x) if self.ahead else result
        return result + 2 * self.lora_B["default"](self.lora_A["default"](kept))


class Attention(nn.Module):
    """Two heads of causal attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Adapter(nn.Linear(WIDTH, WIDTH), dropout) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.second_norm = nn.LayerNorm(WIDTH), Attention(dropout), nn.LayerNorm(WIDTH)
        self.up, self.down = Adapter(nn.Linear(WIDTH, 24), dropout), Adapter(nn.Linear(24, WIDTH), dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self, vocab: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapted(vocab: int = VOCAB, dropout: float = 0.0) -> nn.Module:
    return Model(vocab, dropout)


def in_place(vocab: int = VOCAB, dropout: float = 0.0) -> nn.Module:
    model = Model(vocab, dropout)
    for block in model.blocks:
        block.up = InPlace(nn.Linear(WIDTH, 24), dropout, ahead=False)
        block.down = InPlace(nn.Linear(24, WIDTH), dropout, ahead=True)
    return model


class Projected(nn.Module):
    """Scales a frozen product with a buffer, as VeRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scale = base, nn.Parameter(torch.ones(base.out_features))
        self.register_buffer("table", torch.randn(base.out_features, base.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scale * nn.functional.linear(x, self.table)


def projected(vocab: int = VOCAB, dropout: float = 0.0) -> nn.Module:
    model = Model(vocab, dropout)
    for block in model.blocks:
        block.up = Projected(nn.Linear(WIDTH, 24))
    return model


class Turned(Block):
    """Multiplies each token by a number of its place, as attention that DoRA keeps whole does by rotary angles."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * places)


class TurnedModel(Model):
    def __init__(self, vocab: int, dropout: float) -> None:
        super().__init__(vocab, dropout)
        self.blocks = nn.ModuleList([Turned(dropout) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, places = self.embedding(tokens), torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64).unsqueeze(-1)
        for block in self.blocks:
            x = block(x, places.to(x.dtype))
        return self.head(x)


def turned(vocab: int = VOCAB, dropout: float = 0.0) -> nn.Module:
    return TurnedModel(vocab, dropout)


def build(dropout: float, name: str = "adapted") -> BuiltModel:
    return build_meta(ModelConfig(name=f"{__name__}:{name}", dropout=dropout), vocab=VOCAB, context=CONTEXT)


def test_both_halves_of_an_adapter_go_with_their_matrix() -> None:
    rows = sharding_table(build(0.0)).layers["blocks.0"]
    attention, mlp = sorted(rows.groups, key=lambda group: group.row_linear)
    assert attention.row_linears == ("attention.o.base_layer", "attention.o.lora_A.default")
    assert set(attention.column_linears) == {
        f"attention.{name}.{half}" for name in "qkv" for half in ("base_layer", "lora_B.default")
    }
    assert mlp.row_linears == ("down.base_layer", "down.lora_A.default")
    assert set(mlp.column_linears) == {"up.base_layer", "up.lora_B.default"}
    assert rows.sequence and not rows.faults


@pytest.mark.slow
@pytest.mark.parametrize("dropout", further([0.0, 0.2], (1,)))
def test_adapters_train_as_on_one_device(dropout: float) -> None:
    batches = random_batches(2, 4, CONTEXT, VOCAB, documents=False)
    case = Case(build=partial(build, dropout), batches=batches, recipe=OptimizerRecipe(), timeout_s=100)
    texts = ("tp=2", "tp=2,sequence=true,recompute=full", "cp=2,attention=heads", "shard=2,tp=2,zero=3")
    layouts = [dataclasses.replace(Layout.parse(text), precision="float64") for text in texts]
    assert [(v.layout, v.refused, v.worst) for v in verify(case, layouts) if not v.passed] == []


def test_code_that_needs_all_tokens_is_named_where_sequence_is_refused() -> None:
    rows = sharding_table(build(0.0, "turned")).layers["blocks.0"]
    assert not rows.sequence
    assert rows.sequence_refused.startswith("the code of Turned doesn't run on a part of the tokens (The size of ")


def test_a_product_with_a_buffer_is_not_proven_and_says_why() -> None:
    batches = random_batches(1, 4, CONTEXT, VOCAB, documents=False)
    case = Case(build=partial(build, 0.0, "projected"), batches=batches, recipe=OptimizerRecipe(), timeout_s=100)
    (verdict,) = verify(case, [dataclasses.replace(Layout.parse("replicate=2"), precision="float64")])
    assert verdict.refused.startswith("one device alone can't run it in float64")
    assert verdict.refused.endswith(
        "nearest that works: forward converts it to the type of its input, as buffer.to(x.dtype)"
    )


@pytest.mark.slow
def test_adapters_that_drop_in_place_train_as_on_one_device() -> None:
    batches = random_batches(1, 4, CONTEXT, VOCAB, documents=False)
    case = Case(build=partial(build, 0.2, "in_place"), batches=batches, recipe=OptimizerRecipe(), timeout_s=100)
    layouts = [dataclasses.replace(Layout.parse(text), precision="float64") for text in ("replicate=2", "tp=2")]
    assert [(v.layout, v.refused, v.worst) for v in verify(case, layouts) if not v.passed] == []
