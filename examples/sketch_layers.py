"""The tutorial's split layers and tensors: a mesh as the third argument, heads by the names that torch gives them.

python examples/sketch_layers.py
"""

from __future__ import annotations

import torch
from sketch_ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshwright import ShardingSpec, TensorParallelLinear, TensorParallelMultiheadAttention


def work() -> None:
    """What every rank does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer = TensorParallelLinear(16, 32, mesh, seed=3)
    attention = TensorParallelMultiheadAttention(embed_dim=32, num_heads=4, mesh=mesh, seed=4)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    unsharded: nn.Module = layer.to_linear()
    torch.testing.assert_close(layer(x), unsharded(x))
    assert attention(layer(x)).shape == (2, 5, 32)

    weight = torch.arange(32.0).view(8, 4)
    by_rows, by_columns = ShardingSpec([Shard(0)]), ShardingSpec([Shard(1)])
    parts = [spec.shard(weight, mesh).to_local().shape for spec in (by_rows, by_columns)]
    assert [tuple(part) for part in parts] == [(4, 4), (8, 2)]
    if mesh.get_rank() == 0:
        held = sum(item.numel() for item in layer.parameters())
        print(f"tp=2: a linear layer equals the whole one, {held} of {16 * 32 + 32} weights a rank")


if __name__ == "__main__":
    run(2, work)
