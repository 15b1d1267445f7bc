"""Ready layers in a model that one writes oneself: attention and a feed-forward part, each communicating once.

python examples/tensor_parallel_layers.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

from meshwright import TensorParallelLinear, TensorParallelMultiheadAttention, device_mesh, launch_ranks

RANKS = 4


class Block(nn.Module):
    """A transformer block whose matrices are split over the ranks of a mesh's dim."""

    def __init__(self, width: int, ranks: Any, seed: int) -> None:
        """Takes the width, who shares the block, and what its weights come from."""
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = TensorParallelMultiheadAttention(width, 8, kv_heads=4, ranks=ranks, causal=True, seed=seed)
        # Columns that stay split, then rows that take them so: nothing is sent in between.
        self.up = TensorParallelLinear(width, 4 * width, "columns", ranks, gather_output=False, seed=seed + 1000)
        self.down = TensorParallelLinear(4 * width, width, "rows", ranks, input_is_split=True, seed=seed + 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D), the same on all ranks, to the same shape."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(gelu(self.up(self.norms[1](x))))


def gradient(ranks: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns two blocks' output, their gradient by the input, and the elements of weights that this rank holds."""
    model = nn.Sequential(Block(64, ranks, seed=1), Block(64, ranks, seed=2)).double()
    x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    found = model(x)
    found.square().sum().backward()
    assert x.grad is not None
    return found.detach(), x.grad, sum(item.numel() for item in model.parameters())


def work(context: Any) -> None:
    """What every rank does: the split model, and the same one on this rank alone."""
    mesh = device_mesh(f"tp={RANKS}")
    alone = [dist.new_group([rank]) for rank in range(RANKS)][context.rank]
    *split, held = gradient(mesh["tp"])
    *whole, weights = gradient(alone)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    if context.rank == 0:
        print(f"tp={RANKS}: output and gradient equal to one device; {held} of {weights} weights a rank")


if __name__ == "__main__":
    launch_ranks(work, RANKS, kind="cpu", timeout_s=100)
