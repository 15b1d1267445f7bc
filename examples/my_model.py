"""A language model of one's own: any nn.Module that turns tokens (B, S) into logits (B, S, V).

    meshwright verify --model examples.my_model:build --devices 2
    meshwright train --model examples.my_model:build --train.steps 100 --layout replicate=2 --data.mask-documents false

Its forward takes no `position_ids`, by which the documents of a row could be kept apart: they aren't. The function may
take `vocab` and `context`, which come from the data, and any `--model.*` size that is set.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Mixer(nn.Module):
    """A block without attention: each token looks back through a causal convolution, then thinks for itself."""

    def __init__(self, width: int, reach: int) -> None:
        """Takes the width D and how many tokens a convolution looks back."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.look = nn.Conv1d(width, width, reach, groups=width)
        self.gate = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        seen = functional.pad(self.norm(x).transpose(1, 2), (self.reach - 1, 0))
        left, right = self.gate(self.look(seen).transpose(1, 2)).chunk(2, dim=-1)
        return x + self.out(left * torch.sigmoid(right))


class MixerModel(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        """Takes the sizes V, D and the number of blocks."""
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Mixer(width, reach=2 ** min(5, 2 + layer)) for layer in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, S) int64 to logits (B, S, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(vocab: int = 199, width: int = 96, layers: int = 4) -> nn.Module:
    """What `--model examples.my_model:build` calls."""
    return MixerModel(vocab, width, layers)
