"""Mixtures of experts inside of a wrapper's module, as peft makes one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.errors import PlanError
from meshwright.models.analysis.experts import require_experts
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig


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
    return build_meta(ModelConfig(name=f"tests.unit.test_wrapped_mixtures:{function}"))


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
