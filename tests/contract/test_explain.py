"""`inspect --explain` shows the evidence that the analysis used: it changes with the facts; the runtime obeys it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from meshwright import InspectConfig, inspect
from meshwright.autograd_helper import run_in_helper
from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.models.analysis import groups, table
from meshwright.models.analysis.evidence import SplitTrial
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import apply_transforms
from meshwright.parallel.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.torch_compat.fake_group import fake_process_group
from meshwright.train.model_analysis import analyse_model
from meshwright.train.session import make_model_source
from tests.tiers import further

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

WIDTH, VOCAB = 32, 64


class Layer(nn.Module):
    """Four heads, and a linear ``out`` after them; ``mixing`` says where a nonlinearity over all features lies."""

    def __init__(self, mixing: str) -> None:
        super().__init__()
        self.mixing = mixing
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, (-1, 8)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.mixing == "before":
            heads = torch.softmax(heads, dim=-1)
        added = self.out(heads)
        if self.mixing == "behind":
            added = self.last(torch.tanh(added))
        return x + added


class Model(nn.Module):
    def __init__(self, mixing: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList([Layer(mixing) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> nn.Module:
    return Model("")


def mixed_before() -> nn.Module:
    return Model("before")


def mixed_behind() -> nn.Module:
    return Model("behind")


def explain(name: str, layer: str, *layouts: str, **sizes: int) -> dict[str, Any]:
    config = InspectConfig(model=ModelConfig(name=name, **sizes), explain=layer, layout=layouts)
    (explanation,) = json.loads(json.dumps(inspect(config).to_json()))["explanations"]
    return explanation


def weights_of(explanation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    prefix = f"{explanation['module']}."
    return {item["name"].removeprefix(prefix): item for item in explanation["weights"]}


def splits_of(name: str) -> dict[str, str]:
    return {key: item["split"] for key, item in weights_of(explain(f"{__name__}:{name}", "blocks.1")).items()}


def local_shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a rank's parameters under tp=2, as the runtime makes them."""
    layout = Layout.parse("tp=2")

    def build() -> dict[str, tuple[int, ...]]:
        built = build_meta(config)
        source = make_model_source(built, layout, analyse_model(built, layout), filled=False)
        with fake_process_group(rank, layout.world):
            (stage,) = apply_transforms(source, layout, Mesh(layout, "cpu", TrafficLog())).stages
            named = stage.module.named_parameters(remove_duplicate=False)
            return {name: tuple(parameter.shape) for name, parameter in named}

    return run_in_helper(build)


SMALL = {"layers": 2, "width": 32, "heads": 4}


@pytest.mark.parametrize(
    ("sizes", "layer"),
    further(
        [
            ({"name": "gpt2", **SMALL}, "transformer.h.1"),
            ({"name": "llama", "layers": 2, "width": 64, "heads": 8, "kv_heads": 2}, "model.layers.0"),
            ({"name": "mixtral", **SMALL}, "model.layers.1"),
            ({"name": "bloom", **SMALL}, "transformer.h.0"),
            ({"name": "gpt_bigcode", **SMALL}, "transformer.h.0"),
            ({"name": "llama", **SMALL}, "lm_head"),
            ({"name": f"{__name__}:plain"}, "blocks.0"),
            ({"name": f"{__name__}:mixed_behind"}, "blocks.0"),
        ],
        (0, 2, 5),
    ),
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_the_runtime_holds_what_is_explained(sizes: dict[str, Any], layer: str) -> None:
    explanation = explain(layer=layer, **sizes)
    assert explanation["weights"]
    for rank in range(2):
        real = local_shapes(ModelConfig(**sizes), rank)
        told = {item["name"]: tuple(item["local_shapes"][rank]) for item in explanation["weights"]}
        assert told == {name: real[name] for name in told}
    for item in explanation["weights"]:
        is_split = item["local_shapes"][0] != item["shape"]
        assert (item["dim"] is not None) == is_split and bool(item["prevents"]) != is_split


def test_where_features_meet_decides_what_is_explained() -> None:
    free, before, behind = splits_of("plain"), splits_of("mixed_before"), splits_of("mixed_behind")
    assert [free[f"{name}.weight"] for name in ("q", "k", "v", "out")] == ["column"] * 3 + ["row"]
    assert set(before.values()) == {"replicated"}
    assert behind["last.weight"] == "replicated" and behind["out.weight"] == "row"
    refused = weights_of(explain(f"{__name__}:mixed_before", "blocks.0"))["out.weight"]
    assert refused["prevents"] == groups.MIXED
    assert any("32 input features depends on all of q, k, v" in fact for fact in refused["evidence"])
    last = weights_of(explain(f"{__name__}:mixed_behind", "blocks.0"))["last.weight"]
    assert "out, which it reads, is split with out, a group of more weights" in last["prevents"]
    assert any("it reads out, and is read by the layer's output" in fact for fact in last["evidence"])


def test_a_mutated_trace_shows_in_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = weights_of(explain(f"{__name__}:plain", "blocks.0"))["out.weight"]
    assert any("are 4 heads, since tokens meet in them" in fact for fact in honest["evidence"])
    monkeypatch.setattr(groups, "mixes_tokens", lambda *args: False)
    blind = weights_of(explain(f"{__name__}:plain", "blocks.0"))["out.weight"]
    assert any("are 4 channels, since tokens stay apart" in fact for fact in blind["evidence"])
    plain_dependence = groups.feature_dependence

    def all_of_it(*args: Any) -> list[torch.Tensor]:
        return [torch.ones_like(matrix) for matrix in plain_dependence(*args)]

    monkeypatch.setattr(groups, "feature_dependence", all_of_it)
    mixed = weights_of(explain(f"{__name__}:plain", "blocks.0"))["out.weight"]
    assert mixed["split"] == "replicated" and mixed["prevents"] == groups.MIXED
    assert any("depends on all of q, k, v" in fact for fact in mixed["evidence"])


def test_a_failed_trial_shows_in_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_rehearsal = table.rehearse_layer

    def failing(traced: Any, rows: Any, degree: int, sequence: bool = False) -> SplitTrial:
        trial = plain_rehearsal(traced, rows, degree, sequence)
        return dataclasses.replace(trial, failure="its output is off by 7.0e-01") if rows.groups else trial

    monkeypatch.setattr(table, "rehearse_layer", failing)
    out = weights_of(explain(f"{__name__}:plain", "blocks.0"))["out.weight"]
    assert out["split"] == "replicated" and "computed in parts it gives something else" in out["prevents"]
    assert any("by 4 heads with q, k, v, out" in fact and "7.0e-01" in fact for fact in out["evidence"])


def test_cuts_and_recompute_of_a_layer() -> None:
    explanation = explain("llama", "model.layers.1", "pp=3,microbatches=3", "tp=2,recompute=full:1", layers=3, width=32)
    in_front, behind = explanation["pipeline"]
    assert in_front["possible"] and behind["possible"]
    assert in_front["tensors"] == ["args[0] (2, 10, 32), made from model.layers.0"]
    assert behind["tensors"] == ["args[0] (2, 10, 32), made from model.layers.1"]
    assert any("cut in front of layers 1, 2" in fact for fact in in_front["evidence"])
    assert [(item["stage"], item["recomputes"]) for item in explanation["stages"]] == [(1, "none"), (0, "none")]
    first = explain("llama", "model.layers.0", "tp=2,recompute=full:1", layers=3, width=32)
    assert [item["recomputes"] for item in first["stages"]] == ["full"]
    in_front, behind = first["pipeline"]
    assert in_front["possible"] and behind["possible"]
    assert in_front["tensors"] == ["args[0] (2, 10, 32), made from model.embed_tokens.weight"]
    last = explain("llama", "model.layers.2", "tp=2", layers=3, width=32)["pipeline"][1]
    assert last["possible"] and last["tensors"] == ["result 0 of model.layers.2"]


@pytest.mark.parametrize(
    ("layer", "hint"),
    [
        ("model.layer.0", "did you mean 'model.layers.0'?; its layers are model.layers.0 to model.layers.1"),
        ("model.layers.9", "its layers are model.layers.0 to model.layers.1"),
        ("lm_haed", "did you mean 'lm_head'?"),
        ("1", "weights '1'; did you mean 'model.layers.1'?; its"),
        (
            "99",
            "weights '99'; its layers are model.layers.0 to model.layers.1; outside of them it has model.embed_tokens",
        ),
        ("model", "its layers are model.layers.0 to model.layers.1"),
    ],
)
def test_an_unknown_layer_names_the_nearest(layer: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="has no layer with weights") as refusal:
        inspect(model=ModelConfig(name="llama", layers=2, width=32, heads=4), explain=layer)
    assert hint in str(refusal.value)


def test_the_verb_prints_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "llama", "--model.layers", "2", "--model.width", "32", "--explain"]
    assert main([*words, "model.layers.0.self_attn"]) == 0
    text = " ".join(capsys.readouterr().err.split())
    for part in ("q_proj.weight (32, 32): column split, dim 0 by", "trial: split over 2 threads", "added up over tp"):
        assert part in text
    assert "mlp" not in text
    assert main([*words, "lm_head", "--json"]) == 0
    (explanation,) = json.loads(capsys.readouterr().out)["explanations"]
    (weight,) = explanation["weights"]
    assert weight["split"] == "vocabulary" and "gives the unsplit logits" in weight["evidence"][1]
