"""Adapters that read weights as they are made, those that no layout trains, and what is exported for peft's users."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright.errors import ConfigError
from meshwright.models import build
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.export import export_hf

_FOLDER = ""
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small pretrained model."""
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=53, max_position_embeddings=16))
    model.save_pretrained(tmp_path / "base")
    monkeypatch.setattr("tests.unit.test_adapter_export._FOLDER", str(tmp_path / "base"))
    return tmp_path / "base"


class _Adapter(nn.Module):
    """The largest singular vectors of a matrix, trained, beside the rest of it, as PiSSA makes them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features)
        left, sizes, right = torch.linalg.svd(base.weight.data, full_matrices=False)
        self.lora_A.weight.data = sizes[:2].sqrt().unsqueeze(1) * right[:2]
        self.lora_B.weight.data = left[:, :2] * sizes[:2].sqrt()
        base.weight.data = base.weight.data - self.lora_B.weight.data @ self.lora_A.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class _Wrapper(nn.Module):
    """Holds a model and saves its adapters, as peft's does."""

    def __init__(self, base: nn.Module, is_prompt: bool = False) -> None:
        super().__init__()
        self.base_model = base
        kind = "PROMPT_TUNING" if is_prompt else "LORA"
        self.peft_config = {
            "default": SimpleNamespace(is_prompt_learning=is_prompt, peft_type=kind, num_virtual_tokens=4)
        }

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def save_pretrained(self, folder: Path) -> None:
        adapters = {name: value.contiguous() for name, value in self.state_dict().items() if "lora_" in name}
        save_file(adapters, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        return self.base_model(input_ids=input_ids, **rest)


def adapted() -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(_FOLDER).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Adapter(layer.self_attn.q_proj)
    return _Wrapper(model)


def prompted() -> nn.Module:
    return _Wrapper(nn.Sequential(nn.Embedding(53, 8), nn.Linear(8, 53)), is_prompt=True)


def failing() -> nn.Module:
    model = adapted()
    raise ValueError(f"no {len(list(model.children()))}")


def drawing() -> nn.Module:
    """A layer that is scaled by one of its own numbers."""
    layer = nn.Linear(4, 4)
    layer.weight.data /= float(layer.weight.data[0, 0].item())
    return layer


def by_peft() -> nn.Module:
    import peft

    how: dict[str, Any] = {"init_lora_weights": "pissa"} if _KIND == "pissa" else {}
    if _KIND == "vera":
        config = peft.VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    elif _KIND == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    else:
        config = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM", **how)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(_FOLDER), config)


_KIND = ""


def _build(function: str) -> BuiltModel:
    return build_meta(ModelConfig(name=f"tests.unit.test_adapter_export:{function}"))


def _values(built: BuiltModel) -> dict[str, torch.Tensor]:
    return {name: built.tensor(name) for name, _ in built.module.named_parameters()}


def test_adapters_made_from_loaded_weights_have_the_values_that_their_author_sees(folder: Path) -> None:
    built, wanted = _build("adapted"), adapted()
    state = torch.random.get_rng_state()
    values = _values(built)
    trained = {name for name, weight in wanted.named_parameters() if weight.requires_grad}
    assert {name for name, weight in built.module.named_parameters() if weight.requires_grad} == trained
    assert all(weight.is_meta for weight in built.module.parameters())
    bias = {name for name in values if name.endswith("lora_B.bias")}  # drawn
    for name, weight in wanted.named_parameters():
        assert name in bias or torch.allclose(values[name], weight, atol=1e-6), name
    again = _values(_build("adapted"))
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_code_that_reads_a_weight_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _values(_build("drawing"))["weight"]
    assert weight[0, 0] == 1 and weight.unique().numel() == 16
    monkeypatch.setattr(build, "available_bytes", lambda: 3)
    with pytest.raises(ConfigError, match=r"reads the values of weights.* of 3 B; nearest that works: .*save_pre"):
        _build("drawing")


def test_what_fails_in_memory_too_is_told_as_it_failed_first(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be built on the meta device: .*incompatible tensor type"):
        _build("failing")


def test_learned_positions_before_a_row_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING puts num_virtual_tokens = 4 .*nearest that works: .*Lora"):
        _build("prompted")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_adapters_are_exported_beside_the_model(folder: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    built = _build("adapted")
    values = {name: value + 1 for name, value in _values(built).items()}
    out = export_hf(built, values.items(), tmp_path / "out", dtype=dtype)
    saved, whole = load_file(out / "adapter_model.safetensors"), load_file(out / "model.safetensors")
    assert set(saved) == {name for name in values if "lora_" in name} and set(whole) >= set(values)
    for name, value in saved.items():
        assert torch.equal(value, values[name].to(dtype or torch.float32))
    assert json.loads((out / "adapter_config.json").read_text()) == {"peft_type": "LORA"}


@pytest.mark.parametrize("kind", ["lora", "pissa", "vera"])
def test_peft_loads_its_adapters(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="peft isn't installed")
    monkeypatch.setattr("tests.unit.test_adapter_export._KIND", kind)
    built = _build("by_peft")
    trained = {name for name, weight in built.module.named_parameters() if weight.requires_grad}
    values = {name: value + 0.1 if name in trained else value for name, value in _values(built).items()}
    out = export_hf(built, values.items(), tmp_path / "out")
    whole = by_peft()
    whole.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out)
    tokens = torch.randint(53, (2, 9), generator=torch.Generator().manual_seed(1))
    found, wanted, base = (
        model.eval()(tokens).logits for model in (loaded, whole, AutoModelForCausalLM.from_pretrained(folder))
    )
    torch.testing.assert_close(found, wanted)
    assert (found - base).abs().max() > 1e-5


def test_pefts_prompt_tuning_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft isn't installed")
    monkeypatch.setattr("tests.unit.test_adapter_export._KIND", "prompt")
    with pytest.raises(ConfigError, match="PROMPT_TUNING puts num_virtual_tokens = 4"):
        _build("by_peft")
