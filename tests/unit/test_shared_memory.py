"""Weights over one memory: refused where one of them is trained, at whatever place of it, and on meta too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.shared_memory import shared_memory_refusal
from meshwright.strategy.custom_module import read_model


def _pair(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    """A module of two weights over given memory."""
    module = nn.Module()
    module.first, module.second = nn.Parameter(first), nn.Parameter(second)
    return module


def transposed(vocab: int = 53) -> nn.Module:
    """An embedding, and a head whose weight is another parameter over a view of the embedding's."""
    embedding, head = nn.Embedding(vocab, 8), nn.Linear(8, vocab, bias=False)
    head.weight = nn.Parameter(embedding.weight.data.t().contiguous().t())
    embedding.weight = nn.Parameter(head.weight.data.t().t())
    return nn.Sequential(embedding, head)


def adapter_of_an_embedding(vocab: int = 53) -> nn.Module:
    """Adapters of an embedding and of the head, the second over the first's transposed, as peft ties them."""
    embedding, head = nn.Embedding(vocab, 8), nn.Linear(8, vocab, bias=False)
    embedding.lora_embedding_B = nn.Parameter(torch.randn(8, 2))
    head.lora_A = nn.Linear(8, 2, bias=False)
    head.lora_A.weight = nn.Parameter(embedding.lora_embedding_B.t())
    return nn.Sequential(embedding, head)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_memory_are_found_and_neighbours_in_it_are_not(device: str) -> None:
    memory = torch.empty(6, 8, device=device)
    shared = [(memory, memory.t()), (memory, memory[2:4]), (memory[:3], memory[2:]), (memory[:, 1:4], memory[:, 3:])]
    for first, second in shared:
        assert "'first' and 'second' are two tensors in one memory" in shared_memory_refusal(_pair(first, second))
        assert "'second'" in shared_memory_refusal(_pair(second, first))
    apart = [(memory[:3], memory[3:]), (memory[:, :4], memory[:, 4:]), (memory[::2], memory[1::2])]
    for first, second in (*apart, (memory, torch.empty(6, 8, device=device)), (memory[:0], memory)):
        assert shared_memory_refusal(_pair(first, second)) == ""


def test_buffers_and_plain_tensors_over_a_trained_weight_are_found_and_frozen_or_tied_ones_are_not() -> None:
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    assert shared_memory_refusal(tied) == ""
    frozen = transposed().requires_grad_(False)
    assert shared_memory_refusal(frozen) == ""
    frozen[1].weight.requires_grad_()
    assert "'0.weight' and '1.weight'" in shared_memory_refusal(frozen)
    buffered, plain = nn.Linear(4, 5), nn.Linear(4, 5)
    buffered.register_buffer("table", buffered.weight.data[1:3])
    plain.table = plain.weight.detach()
    for module in (buffered, plain):
        assert "'weight' and 'table'" in shared_memory_refusal(module)


@pytest.mark.parametrize("function", [transposed, adapter_of_an_embedding])
def test_a_run_and_a_custom_loop_refuse_them_before_a_rank_starts(function: Callable[[], nn.Module]) -> None:
    cure = r"two tensors in one memory.*nearest that works: one nn.Parameter .*ensure_weight_tying=False"
    with pytest.raises(ConfigError, match=cure):
        build_meta(ModelConfig(name=f"{__name__}:{function.__name__}"), vocab=53)
    for model in (function, function()):
        with pytest.raises(ConfigError, match=cure):
            read_model(model, 0)
