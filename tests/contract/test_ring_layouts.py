"""Layouts with attention in a ring train what one device trains; what can't go round is refused before ranks start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import ConfigError, PlanError
from meshwright.jobs import attention_checks
from meshwright.jobs.verify import verify
from meshwright.launch.devices import Devices
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_shapes
from tests.tiers import cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    cases(
        [
            ("gemma3_text", ["cp=2,attention=ring,recompute=selective"]),
            ("llama", ["cp=2,attention=ring", "cp=4,attention=ring,recompute=full", "cp=2,tp=2,attention=ring"]),
            ("qwen3", ["cp=2,tp=2,sequence=true,attention=ring", "cp=2,shard=2,zero=3,attention=ring"]),
            ("gemma3_text", ["cp=4,attention=ring", "cp=2,pp=2,microbatches=2,attention=ring"]),
            ("mixtral", ["cp=2,ep=2,attention=ring", "cp=2,shard=2,zero=3,attention=ring"]),
        ]
    ),
)
def test_a_ring_equals_one_device(family: str, layouts: list[str]) -> None:
    """With documents in the rows, in float64, against the model as its author calls it, whose mask is dense."""
    report = verify(model=family, layout=layouts, steps=2)
    assert all(verdict.passed for verdict in report.verdicts), report.verdicts


class MaskingAttention(nn.Module):
    """Makes a mask of its own where rows have documents, else asks torch for a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if position_ids is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            document = (position_ids == 0).cumsum(-1)
            mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.ffn = nn.LayerNorm(32), MaskingAttention(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), position_ids)
        return x + self.ffn(x)


class Causal(nn.Module):
    """Takes no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Masking(Causal):
    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, position_ids)
        return self.head(x)


def causal() -> nn.Module:
    """The entry point of a model of the user's own."""
    return Causal()


def masking() -> nn.Module:
    """The same with masks of its own."""
    return Masking()


def analysed(config: ModelConfig, layout: str) -> ModelAnalysis:
    return analyse_model(build_meta(config, 64, 64), Layout.parse(layout))


def test_a_custom_module_goes_round_the_ring() -> None:
    facts = analysed(ModelConfig(name="tests.contract.test_ring_layouts:causal"), "cp=2,attention=ring")
    assert facts.attention == "ring" and "rows of" in facts.tried
    with pytest.raises(PlanError, match="rows of 30 tokens don't divide into 4 parts"):
        check_shapes(facts, Layout.parse("cp=2,attention=ring"), 4, 30)


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        (
            ModelConfig(name="tests.contract.test_ring_layouts:masking"),
            "cp=2,attention=ring",
            "reads no mask that a model's own code makes; .* works: attention=gather",
        ),
        (
            ModelConfig(name="gpt2", layers=2, width=32, heads=4, dropout=0.1),
            "cp=2,attention=ring",
            "drops attention",
        ),
        (ModelConfig(name="llama", layers=2, width=32, heads=4), "cp=2,attention=ring,compile=true", "drop one"),
        (ModelConfig(name="gemma2", layers=2, width=32, heads=4), "cp=2,attention=ring", "transformers' 'eager'|caps"),
        (
            ModelConfig(name="gpt2", layers=2, width=36, heads=3),
            "cp=4,attention=heads",
            "reads 3 heads .* works: attention=gather; use shard=4",
        ),
    ],
    ids=["mask", "dropout", "compile", "cap", "heads"],
)
def test_what_cannot_go_round_is_refused_before_ranks_start(config: ModelConfig, layout: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        analysed(config, layout)


class SlopingAttention(MaskingAttention):
    """Takes off scores what grows with the distance of two tokens. Source: Press et al., ALiBi (2022), section 3."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        place = torch.arange(x.shape[1])
        distance = place[:, None] - place
        mask = (-0.5 * distance.to(x.dtype)).masked_fill(distance < 0, float("-inf"))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Sloping(Causal):
    """Adds no positions and slopes its scores."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = SlopingAttention()


def sloping() -> nn.Module:
    """The same with slopes."""
    return Sloping()


@pytest.mark.parametrize("attention", ["ring", "gather", "heads"])
def test_no_way_is_named_that_is_refused_itself(attention: str) -> None:
    config = ModelConfig(name="tests.contract.test_ring_layouts:sloping")
    with pytest.raises(PlanError, match=f"cp=2 splits .* attention={attention}: .*; use shard=2") as refusal:
        analysed(config, f"cp=2,attention={attention}")
    assert "nearest" not in str(refusal.value)


def test_kernels_on_gpus_take_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "least_compute_capability", lambda: 9.0)
    built, facts = build_meta(ModelConfig(name="llama"), 64, 64), SimpleNamespace(attention="ring")
    devices = Devices(kind="cuda", count=2, found=2, cores=2)
    attention_checks.check_attention(built, "bf16", facts, devices)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="attention=ring: the kernel computes in bf16 and fp16, not in float32"):
        attention_checks.check_attention(built, "float32", facts, devices)  # type: ignore[arg-type]
