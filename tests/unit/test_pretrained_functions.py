"""Functions that load a pretrained model: transformers gives real tensors values that other code computes on meta."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig

_FOLDER = ""


def _pretrained() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(_FOLDER)


def _with_added_tokens() -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(_FOLDER)
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    return model


class _Loaded(nn.Module):
    """What a file's author writes into real tensors, of tensors that are on meta while a model is recorded."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (10.0 ** (torch.arange(0, 8, 2).float() / 8))
        drawn = torch.randn(4)
        real = torch.zeros(4, 4, device="cpu")
        real[0] = frequencies
        real[1].add_(frequencies).mul_(torch.full((4,), 2.0))
        torch.add(frequencies, 1.0, out=real[2])
        real[3].copy_(drawn)
        self.register_buffer("table", real)
        self.drawn = nn.Parameter(drawn)
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) @ self.table + self.drawn


def _with_loaded_layer() -> nn.Module:
    """A layer that is made anew, and loaded by its author: torch warns that nothing is copied to meta."""
    layer = nn.Linear(3, 3)
    layer.load_state_dict({"weight": torch.eye(3, device="cpu"), "bias": torch.ones(3, device="cpu")})
    return layer


def _values(built: BuiltModel) -> dict[str, torch.Tensor]:
    names = [name for name, _ in (*built.module.named_parameters(), *built.module.named_buffers())]
    return {name: built.tensor(name) for name in names}


def _build(function: str) -> BuiltModel:
    return build_meta(ModelConfig(name=f"tests.unit.test_pretrained_functions:{function}"))


@pytest.fixture(params=("llama", "gpt2"))
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small pretrained model."""
    torch.manual_seed(3)
    if request.param == "llama":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=64))
    model.save_pretrained(tmp_path / "base")
    monkeypatch.setattr("tests.unit.test_pretrained_functions._FOLDER", str(tmp_path / "base"))
    return tmp_path / "base"


def test_a_pretrained_model_has_the_values_that_its_author_sees(folder: Path) -> None:
    """Rotary frequencies are a buffer that no file has: transformers computes them once the weights are loaded."""
    wanted = AutoModelForCausalLM.from_pretrained(folder)
    values = _values(_build("_pretrained"))
    assert values.keys() == {name for name, _ in (*wanted.named_parameters(), *wanted.named_buffers())}
    for name, tensor in (*wanted.named_parameters(), *wanted.named_buffers()):
        torch.testing.assert_close(values[name], tensor.detach(), rtol=0, atol=0, msg=name)


def test_added_tokens_are_the_same_in_every_process(folder: Path) -> None:
    first, second = (_values(_build("_with_added_tokens")) for _ in range(2))
    wanted = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    embedding = next(value for name, value in first.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    assert len(embedding) == 67
    assert torch.equal(embedding[:64], wanted)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_an_author_loads_into_a_new_layer_is_there_without_a_warning() -> None:
    values = _values(_build("_with_loaded_layer"))
    assert torch.equal(values["weight"], torch.eye(3))
    assert torch.equal(values["bias"], torch.ones(3))


def test_what_is_written_into_a_real_tensor_is_what_was_computed() -> None:
    values = _values(_build("_Loaded"))
    frequencies = 1.0 / (10.0 ** (torch.arange(0, 8, 2).float() / 8))
    assert torch.equal(values["table"][0], frequencies)
    assert torch.equal(values["table"][1], 2 * frequencies)
    assert torch.equal(values["table"][2], frequencies + 1)
    assert torch.equal(values["table"][3], values["drawn"])


_LATE = """
import torch

TABLE = torch.arange(4.0)


def build():
    import late_layers

    return late_layers.Layer()
"""
_LATE_LAYERS = """
import torch
from torch import nn

SCALE = torch.full((4,), 3.0) * torch.arange(4.0)
DRAWN = torch.randn(7)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        nn.init.normal_(self.weight)
        self.real = nn.Parameter(torch.randn(4, device="cpu"))

    def forward(self, x):
        return x @ self.weight * SCALE + self.real
"""


def test_what_a_function_imports_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model of a process, whose function imports its layers, equals the second, which finds them there."""
    (tmp_path / "late_model.py").write_text(_LATE, encoding="utf-8")
    (tmp_path / "late_layers.py").write_text(_LATE_LAYERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_model", "late_layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    finders, random_state = list(sys.meta_path), torch.random.get_rng_state()
    first, second = (_values(build_meta(ModelConfig(name="late_model:build"))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("weight", "real"))
    layers = sys.modules.pop("late_layers")
    assert not layers.SCALE.is_meta
    assert layers.SCALE.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert "class Layer" in inspect.getsource(layers)
    assert sys.meta_path == finders
    assert torch.equal(torch.random.get_rng_state(), random_state)
    del sys.modules["late_model"]
