"""A model and a loop of one's own on a mesh of two dims: two copies, each split over two ranks.

    python examples/data_and_tensor.py

The ranks are forked by `launch_ranks`; under torchrun they are there already, and it calls `work` on each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from my_model import MixerModel
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from meshwright import HybridParallelStrategy, launch_ranks

LAYOUT, RANKS, VOCAB = "replicate=2,tp=2", 4, 61


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over the rows that this rank reads."""
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


def on_one_device(model: nn.Module, rows: torch.Tensor) -> list[float]:
    """The same training without ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in rows.chunk(4):
        loss = loss_of(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(context: Any) -> None:
    """What every rank does."""
    torch.manual_seed(0)  # the same weights everywhere
    model = MixerModel(VOCAB, width=32, layers=2).double()
    rows = torch.randint(VOCAB, (32, 17), generator=torch.Generator().manual_seed(1))
    wanted = on_one_device(copy.deepcopy(model), rows)

    strategy = HybridParallelStrategy(LAYOUT)
    model = strategy.shard(model)
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-2)
    index, count = strategy.reader
    sampler: Any = DistributedSampler(TensorDataset(rows), num_replicas=count, rank=index, shuffle=False)
    for (batch,), expected in zip(DataLoader(sampler.dataset, batch_size=8 // count, sampler=sampler), wanted):
        loss = loss_of(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        strategy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(strategy.mean(loss) - expected) < 1e-9 * expected
    if context.rank == 0:
        print(f"{LAYOUT}: 4 steps equal to one device, last loss {wanted[-1]:.4f}, {strategy.bytes} bytes of weights")


if __name__ == "__main__":
    launch_ranks(work, RANKS, kind="cpu", timeout_s=50)
