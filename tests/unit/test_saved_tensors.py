"""Layers that save a tensor behind their last row-parallel linear are told from those that don't."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.models.analysis.saved_tensors import count_saved_tensors, saves_after_sums
from meshwright.spec.sharding_table import LayerSharding, ShardingGroup


class Layer(nn.Module):
    """Two linears, and what stands behind them."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.behind = nn.Linear(4, 8), nn.Linear(8, 4), behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    ("behind", "row_linear", "saves"),
    [
        (nn.Identity(), "down", False),
        (nn.LayerNorm(4), "down", True),
        (nn.Identity(), "up", True),  # were `up` the last one, relu would save behind it
        (nn.LayerNorm(4), "elsewhere", False),
    ],
)
def test_what_is_saved_behind_the_sum(behind: nn.Module, row_linear: str, saves: bool) -> None:
    layer, x = Layer(behind), torch.ones(2, 4, requires_grad=True)
    before = torch.get_rng_state()
    counts = count_saved_tensors({"h": layer}, lambda: layer(x).sum() + torch.rand(()))["h"]
    assert torch.equal(torch.get_rng_state(), before)
    group = ShardingGroup(
        module="", column_linears=("up",), column_inputs=("up",), replicated_inputs=(), row_linear=row_linear,
        units=8, splits=(),
    )  # fmt: skip
    assert saves_after_sums(counts, LayerSharding(groups=(group,))) == saves
    assert not saves_after_sums(counts, LayerSharding(groups=()))
    assert not layer._forward_hooks and not layer.down._forward_hooks
