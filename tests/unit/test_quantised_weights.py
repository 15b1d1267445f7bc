"""Directories of quantised weights: refused before a rank starts, never trained as if the numbers were weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from meshwright.errors import CheckpointError
from meshwright.jobs.plan import plannable_model
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.weights import SafetensorsSource

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Tensors = dict[str, torch.Tensor]


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def gpt_oss() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=2))


def as_types(dtype: torch.dtype, scale: str) -> Callable[[Tensors], Tensors]:
    """Returns what stores the products' weights in a type, each with a scale under a name of its own where given."""

    def stored(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            found[name] = value.to(dtype) if "_proj" in name else value
            if "_proj" in name and scale:
                found[name.replace("weight", scale)] = torch.ones(1, 1)
        return found

    return stored


def as_mxfp4(tensors: Tensors) -> Tensors:
    """Blocks and scales in the names of gpt-oss as it is released."""
    found: Tensors = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            found[f"{name}_blocks"] = torch.zeros(2, value.shape[2], 1, 16, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.zeros(2, value.shape[2], 1, dtype=torch.uint8)
        else:
            found[name] = value
    return found


def directory(
    path: Path, model: PreTrainedModel, stored: Callable[[Tensors], Tensors], quantization: dict[str, Any] | None
) -> Path:
    """Writes a model's directory with other tensors and a ``quantization_config``."""
    model.save_pretrained(path)
    save_file(stored({name: value.clone() for name, value in model.state_dict().items()}), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization} if quantization else config)
    )
    return path


@pytest.mark.parametrize(
    ("build", "stored", "quantization", "told"),
    [
        (llama, as_types(torch.float8_e4m3fn, ""), {"quant_method": "fp8"}, "FineGrainedFP8Config(dequantize=True)"),
        (llama, as_types(torch.float8_e4m3fn, "weight_scale_inv"), None, "down_proj.weight of F8_E4M3"),
        (llama, as_types(torch.int8, "SCB"), {"quant_method": "bitsandbytes"}, "(bitsandbytes)"),
        (llama, as_types(torch.int8, ""), None, "down_proj.weight of I8"),
        (gpt_oss, as_mxfp4, {"quant_method": "mxfp4"}, "Mxfp4Config(dequantize=True)"),
        (llama, as_types(torch.bfloat16, "weight_packed"), {"quant_method": "compressed-tensors"}, "weight_packed"),
    ],
)
def test_quantised_weights_are_refused_with_how_to_write_full_ones(
    tmp_path: Path,
    build: Callable[[], PreTrainedModel],
    stored: Callable[[Tensors], Tensors],
    quantization: dict[str, Any] | None,
    told: str,
) -> None:
    path = directory(tmp_path / "model", build(), stored, quantization)
    with pytest.raises(CheckpointError, match="holds quantised weights") as refused:
        build_meta(ModelConfig(name=str(path)))
    assert told in str(refused.value) and "save_pretrained" in str(refused.value)


def test_full_weights_beside_a_quantization_config_are_read_and_exported_without_it(tmp_path: Path) -> None:
    model = llama()
    path = directory(tmp_path / "model", model, lambda tensors: tensors, {"quant_method": "fp8"})
    module = build_meta(ModelConfig(name=str(path))).module
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(SafetensorsSource(path, module).read(name), model.state_dict()[name])
    assert "quantization_config" not in module.config.to_dict()


def test_a_plan_needs_no_full_weights(tmp_path: Path) -> None:
    full = directory(tmp_path / "full", llama(), lambda tensors: tensors, None)
    stored = as_types(torch.float8_e4m3fn, "weight_scale_inv")
    quantised = directory(tmp_path / "quantised", llama(), stored, {"quant_method": "fp8"})
    shapes = [plannable_model(str(path), 16).shape for path in (full, quantised)]
    assert dataclasses.replace(shapes[0], name="") == dataclasses.replace(shapes[1], name="")
