"""A custom training loop that can be proven: it takes a strategy, trains, and returns the losses of its rows.

    meshwright verify --loop examples/my_loop.py:loop --devices 2

On one device the strategy is plain torch with the same methods, so that the function runs there as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCAB = 53


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        """Takes the width D."""
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    """Embedding, two blocks, head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 16), Block(16), Block(16), nn.Linear(16, VOCAB))


def loop(strategy: Any) -> list[torch.Tensor]:
    """Trains three steps and returns the losses of this rank's rows."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = strategy.shard(model, optimizer)
    index, count = strategy.reader
    losses = []
    for rows in torch.randint(VOCAB, (3, 8, 9), generator=torch.Generator().manual_seed(1)):
        mine = rows.chunk(count)[index]
        loss = cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses
