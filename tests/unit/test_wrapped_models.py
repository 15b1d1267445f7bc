"""Models inside of a wrapper as peft makes one: mixtures of experts, documents of a row, weights in a list."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from meshwright.errors import ConfigError, PlanError
from meshwright.models.analysis.experts import require_experts
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.forward import model_forward
from meshwright.models.structure import read_structure


class _Wrapper(nn.Module):
    """Holds a model as peft does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.base_model(input_ids=input_ids).logits


class _Added(nn.Module):
    """Adds a product of low rank to one weight of a module in its forward."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base, name
        experts, out, inner = base.get_parameter(name).shape
        self.low = nn.Parameter(torch.randn(experts, out, 2))
        self.high = nn.Parameter(torch.zeros(experts, 2, inner))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        class Sum(nn.Module):
            def forward(_, weight: torch.Tensor) -> torch.Tensor:
                return weight + self.low @ self.high

        parametrize.register_parametrization(self.base_layer, self.parameter_name, Sum())
        try:
            return self.base_layer(*args)
        finally:
            parametrize.remove_parametrizations(self.base_layer, self.parameter_name, leave_parametrized=False)


def _mixture() -> MixtralForCausalLM:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 12, "vocab_size": 53, "num_local_experts": 4, "max_position_embeddings": 16}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more))


def wrapped() -> nn.Module:
    return _Wrapper(_mixture())


def adapted() -> nn.Module:
    model = _mixture()
    block = model.model.layers[0].mlp
    block.experts = _Added(block.experts, "down_proj")
    return _Wrapper(model)


def _build(function: str):
    return build_meta(ModelConfig(name=f"tests.unit.test_wrapped_models:{function}"))


def test_a_wrapped_mixture_is_tried_out_in_float64() -> None:
    """Grouped products have no float64: a wrapper's model takes the plain ones too, as transformers' own does."""
    built = _build("wrapped")
    assert try_forward(built).objective.plain
    assert len(require_experts(built.module, 2)) == 1


def test_experts_that_a_module_around_them_changes_stay_on_one_rank() -> None:
    built = _build("adapted")
    assert len(require_experts(built.module, 1)) == 1
    with pytest.raises(PlanError, match=r"_Added '.*experts' adds to .*down_proj.*nearest that works: tp=2"):
        require_experts(built.module, 2)


class _Adapter(nn.Module):
    """Names few arguments and hands on the others, as peft's models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **rest)


class _Deaf(_Adapter):
    """Hands on nothing."""

    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return self.base_model(input_ids=input_ids)


def _llama() -> LlamaForCausalLM:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=53, max_position_embeddings=16, use_cache=False))


def test_documents_of_a_row_are_kept_apart_in_a_wrapped_model() -> None:
    model = _Adapter(_llama())
    structure = read_structure(model)
    tokens = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    found = model_forward(model, structure, tokens, positions, True)
    parts = [model.base_model(input_ids=part).logits for part in (tokens[:, :5], tokens[:, 5:])]
    torch.testing.assert_close(found, torch.cat(parts, dim=1))
    assert not torch.allclose(found[:, 5:], model.base_model(input_ids=tokens).logits[:, 5:])


def test_a_wrapper_that_hands_on_nothing_takes_no_documents() -> None:
    assert not read_structure(_Deaf(_llama())).takes_positions


class _Listed(nn.Module):
    """Reads a weight from a list, which has it from before it got values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(53, 8), nn.Linear(8, 53, bias=False)
        self.weights = [self.head.weight]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.embedding(tokens), self.weights[0])


def listed() -> nn.Module:
    return _Listed()


def test_weights_that_forward_reads_from_a_list_are_refused_before_a_rank_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"reads a weight of \(53, 8\) \(.*'head.weight'\) .*nearest that works: .*self"
    ):
        try_forward(_build("listed"))
