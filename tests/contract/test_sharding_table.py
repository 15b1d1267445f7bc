"""What is read off models: every weight in at most one split, most of each layer split, and the same training."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from meshwright.errors import PlanError
from meshwright.jobs.train import unsplit_header_row
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import Block, CuttingKind, ShardingTable
from meshwright.strategy.shared_analysis import CODEC
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from tests.generated.oddities import VOCAB
from tests.tiers import further

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

SHARES = {
    "gpt2": 0.95,
    "llama": 0.99,
    "gemma3_text": 0.98,
    "mixtral": 0.99,
    "falcon": 0.98,
    "bloom": 0.95,
    "olmo2": 0.98,
    "doge": 0.95,
    "deepseek_v3": 0.85,
    "mamba": 0.99,
    "bert": 0.95,
    "bamba": 0.98,
}
"""Least share of the layers' parameters that two ranks must split."""


class Fused(nn.Module):
    """Attention of three heads from one fused matrix; no attribute says how many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 40)
        self.down = nn.Linear(40, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 24)
        self.blocks = nn.ModuleList([Fused(24) for _ in range(2)])
        self.head = nn.Linear(24, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fused_model() -> nn.Module:
    return FusedModel()


def rows_by_split(table: ShardingTable, layer: str) -> dict[str, tuple[int, tuple[Block, ...]]]:
    return {split.name: (split.dim, split.blocks) for group in table.layers[layer].groups for split in group.splits}


def read(name: str, degree: int = 2, **sizes: int) -> ShardingTable:
    return sharding_table(build_meta(ModelConfig(name=name, **sizes), 64, 32), degree)


@pytest.mark.parametrize("name", further(SHARES, ("gpt2", "llama", "mixtral", "mamba")))
def test_most_of_each_layer_is_split_and_no_weight_twice(name):
    sizes = {"layers": 2, "width": 32} | ({} if name == "mamba" else {"heads": 4})
    built = build_meta(ModelConfig(name=name, **sizes), 64, 32)
    table = sharding_table(built, 2)
    known = {key: item.numel() for key, item in built.module.named_parameters()}
    split = [f"{layer}.{split.name}" for layer, split, _, _ in table.splits(2)]
    assert len(split) == len(set(split)) and set(split) <= set(known)
    inside = {key: size for key, size in known.items() if key.startswith(tuple(f"{x}." for x in table.layers))}
    assert math.fsum(known[key] for key in split) >= SHARES[name] * sum(inside.values())
    assert table.vocabulary
    assert CODEC.loads(CODEC.dumps(table)) == table


def test_a_frozen_model_below_trained_adapters_is_split_as_a_trained_one():
    config = ModelConfig(name="tests.generated.oddities:adapters")
    groups = sharding_table(build_meta(config, VOCAB, 32)).layers["blocks.0"].groups
    columns = {"q.base", "q.b", "k", "v.base", "v.b"}
    assert {group.row_linear: (set(group.column_linears), group.units) for group in groups} == {
        "attention.out": ({f"attention.{name}" for name in columns}, 4),
        "feed.down": ({"feed.up"}, 24),
    }


def test_fewer_key_heads_than_ranks_are_held_by_several():
    table = read("llama", 4, layers=1, width=64, heads=8, kv_heads=2)
    held = rows_by_split(table, "model.layers.0")
    assert held["self_attn.k_proj.weight"] == (0, (Block(start=0, size=8, count=2),))
    assert held["self_attn.q_proj.weight"] == (0, (Block(start=0, size=8, count=8),))
    (group,) = (group for group in table.layers["model.layers.0"].groups if group.heads)
    assert group.shares(4) == ((0, 2), (2, 4), (4, 6), (6, 8))


def test_fused_heads_without_a_name_are_found():
    table = read(f"{__name__}:fused_model")
    held = rows_by_split(table, "blocks.0")
    assert held["mix.weight"] == (0, tuple(Block(start=at, size=8, count=3) for at in (0, 24, 48)))
    assert held["up.bias"] == (0, (Block(start=0, size=1, count=40),))
    assert table.vocabulary == ("embedding", "head")


@dataclass(frozen=True)
class FrozenSizes:
    heads: int = 4


class NamedSizes(NamedTuple):
    heads: int = 4


class Configured(nn.Module):
    """Attention that reads its number of heads off a config, and a gate that computes in float32, as routers do."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.config, self.norm = config, nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)
        self.gate = nn.Parameter(torch.ones(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.sigmoid(functional.linear(x.float(), self.gate))
        heads = self.config["heads"] if isinstance(self.config, dict) else self.config.heads
        q, k, v = (
            matrix(self.norm(x)).view(*x.shape[:2], heads, 6).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def configured_model(kind: str) -> nn.Module:
    model = FusedModel()
    config = {"dict": {"heads": 4}, "frozen": FrozenSizes(), "named": NamedSizes()}[kind]
    model.blocks = nn.ModuleList([Configured(config, 24) for _ in range(2)])
    return model


@pytest.mark.parametrize(("kind", "is_split"), [("frozen", True), ("dict", False), ("named", False)])
def test_sizes_are_read_off_any_config_or_the_attention_stays_whole(kind, is_split):
    config = ModelConfig(name=f"{__name__}:configured_model", overrides={"kind": kind})
    rows = sharding_table(build_meta(config), 2).layers["blocks.0"]
    groups = {group.row_linear: group for group in rows.groups}
    assert set(groups) == ({"out", "down"} if is_split else {"down"})
    assert is_split or "its code doesn't run on a part of the heads" in rows.refused["out"]
    assert not is_split or [number.attribute for number in groups["out"].shape_attributes] == ["config.heads"]


def test_one_head_stays_whole_and_says_why():
    table = sharding_table(build_meta(ModelConfig(name="tests.plain_model:build")), 2)
    rows = table.layers["blocks.0"]
    assert rows.refused["out"] == "all that it reads is mixed before it, across heads and channels"
    assert {split.name for group in rows.groups for split in group.splits} == {"up.weight", "up.bias", "down.weight"}


def test_a_narrow_clone_gives_the_rows_of_the_full_size(monkeypatch):
    sizes = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 320}
    full = read("llama", **sizes)
    monkeypatch.setattr("meshwright.models.analysis.clone.SMALL", 1)
    carried = read("llama", **sizes)
    assert rows_by_split(carried, "model.layers.1") == rows_by_split(full, "model.layers.1")
    assert carried.vocabulary == full.vocabulary and carried.vocab == full.vocab


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ({"name": "olmo2", "width": 64, "heads": 4}, {CuttingKind.GLOBAL_NORM}),
        ({"name": "bloom", "width": 64, "heads": 4}, {CuttingKind.ARGUMENT}),
    ],
)
def test_what_is_cut_grows_with_a_narrow_clone_too(sizes, kinds, monkeypatch):
    full = read(**sizes, layers=1)
    monkeypatch.setattr("meshwright.models.analysis.clone.SMALL", 1)
    carried = read(**sizes, layers=1)
    (name,) = full.layers
    groups, wanted = carried.layers[name].groups, full.layers[name].groups
    assert {cutting.kind for group in wanted for cutting in group.cuttings} == kinds
    assert rows_by_split(carried, name) == rows_by_split(full, name)
    assert [group.cuttings for group in groups] == [group.cuttings for group in wanted]


@pytest.mark.parametrize("name", further(["mamba", "mamba2"], (1,)))
def test_a_clone_without_heads_covers_the_model_or_is_refused(name, monkeypatch):
    monkeypatch.setattr("meshwright.models.analysis.clone.SMALL", 1)
    built = build_meta(ModelConfig(name=name, layers=1, width=128), 64, 32)
    ((layer, rows),) = sharding_table(built).layers.items()
    for group in rows.groups:
        assert group.inner_row_linears == ("mixer.x_proj",)
        for split in group.splits:
            size = built.module.get_parameter(f"{layer}.{split.name}").shape[split.dim]
            assert sum(block.size * block.count for block in split.blocks) == size
    # What a scan reads by head and what it reads whole lie in one matrix, and no clone is both as its model is.
    why = "its parts don't grow alike with the model"
    assert dict(rows.refused) == (dict.fromkeys(("mixer.in_proj", "mixer.out_proj"), why) if name == "mamba2" else {})


def test_a_large_model_is_read_off_a_narrow_clone():
    table = read("llama", 4, layers=8, width=2048, heads=32, kv_heads=8)
    held = rows_by_split(table, "model.layers.7")
    assert held["self_attn.q_proj.weight"] == (0, (Block(start=0, size=64, count=32),))
    assert held["self_attn.v_proj.weight"] == (0, (Block(start=0, size=64, count=8),))
    assert held["mlp.down_proj.weight"][1][0].count == 5440


@pytest.mark.parametrize(
    ("sizes", "layout"),
    further(
        [
            ({"name": "mamba"}, "tp=2"),
            ({"name": "bloom", "heads": 4}, "tp=2"),
            ({"name": "olmo2", "heads": 4}, "tp=2"),
            ({"name": "llama", "width": 48, "heads": 6}, "tp=4"),
            ({"name": "gpt2", "width": 48, "heads": 3}, "tp=2"),
            ({"name": "llama", "width": 64, "heads": 8, "kv_heads": 2}, "tp=4"),
            ({"name": "llama", "width": 64, "heads": 4, "kv_heads": 1}, "tp=2"),
            ({"name": f"{__name__}:fused_model", "layers": None, "width": None}, "tp=2"),
        ],
        (0, 1, 3),
    ),
)
def test_parts_train_as_the_whole(sizes, layout):
    config = ModelConfig(**({"layers": 1, "width": 32} | sizes))
    batches = random_batches(1, 2, 8, 64, False)
    case = Case(build=lambda: build_meta(config, 64, 32), batches=batches, recipe=OptimizerRecipe(), timeout_s=250)
    (verdict,) = verify(case, [Layout.parse(f"{layout},precision=float64")])
    assert verdict.passed, verdict


@pytest.mark.slow
def test_a_user_s_rows_override_what_was_read() -> None:
    config = ModelConfig(name="llama", layers=2, width=32, heads=4, sharding={"model.layers.*.mlp.down_proj": "whole"})
    built = build_meta(config, 64, 16)
    facts = analyse_model(built, Layout.parse("tp=2"))
    assert facts.table is not None
    rows = [group.row_linear for group in facts.table.layers["model.layers.0"].groups]
    assert rows == ["self_attn.o_proj"]
    with pytest.raises(PlanError, match="no effect without tp"):
        analyse_model(built, Layout.parse("replicate=2"))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "degree", "whole"),
    further(
        [
            ("llama", 8, 2, 8, 0),
            ("llama", 6, 3, 2, 4),
            ("gemma3_text", 4, 1, 2, 2),
            ("gpt2", 4, None, 8, 2),
            ("mixtral", 4, 2, 2, 0),
        ],
        (0, 4),
    ),
)
def test_a_matrix_is_split_or_has_a_reason(name, heads, kv_heads, degree, whole):
    config = ModelConfig(name=name, layers=1, width=12 * heads, heads=heads, kv_heads=kv_heads)
    built = build_meta(config, 64, 32)
    table = sharding_table(built)
    ((layer, _),) = table.layers.items()
    matrices = {
        path
        for path, module in built.module.get_submodule(layer).named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    split = {split.name.removesuffix(".weight") for _, split, _, _ in table.splits(degree)}
    reasons = table.reasons_whole(degree)
    assert set(reasons) == matrices - split and len(reasons) == whole
    row = unsplit_header_row(Layout.parse(f"tp={degree}"), ModelAnalysis(table=table))
    assert bool(row) == bool(reasons)
    assert all(name in row["whole"] for name in reasons)
    assert unsplit_header_row(Layout.parse("replicate=2"), ModelAnalysis(table=table)) == {}


def test_a_stack_of_matrices_that_is_no_mixture_isn_t_called_experts() -> None:
    config = ModelConfig(name="recurrent_gemma", layers=1, width=16, heads=2, ffn=32)
    reasons = sharding_table(build_meta(config, VOCAB, 16)).reasons_whole(2)
    assert "rg_lru gives" in reasons["temporal_block.linear_out"] and "experts" not in " ".join(reasons.values())
