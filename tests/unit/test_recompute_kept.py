"""What selective recompute keeps of experts: the results of their products, which aren't computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.parallel.recompute import apply
from meshwright.spec.layout_choices import Recompute
from meshwright.torch_compat.tensors import GROUPED_PRODUCT, TorchDispatchMode


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch._grouped_mm(tokens, self.weight, offs=ends)).sin()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append("product" if func.overloadpacket is GROUPED_PRODUCT else func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_selective_recompute_keeps_the_products_of_experts() -> None:
    tokens, ends = torch.randn(64, 16, dtype=torch.bfloat16), torch.tensor([10, 20, 40, 64], dtype=torch.int32)
    found = {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        experts = Experts()
        if mode != "none":
            apply([experts], Recompute.parse(mode), None)
        with Counted() as counted:
            experts(tokens.clone().requires_grad_(), ends).square().sum().backward()
        assert experts.weight.grad is not None
        found[mode] = counted.names.count("product"), counted.names.count("silu"), experts.weight.grad
    assert [found[mode][:2] for mode in found] == [(3, 1), (3, 2), (4, 2)]
    assert all(torch.equal(found[mode][2], found["none"][2]) for mode in found)
