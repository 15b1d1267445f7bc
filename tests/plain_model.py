"""A language model that isn't from transformers, for proofs: tied head, odd sizes, a parameter that is in no layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(x)))


class PlainModel(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(vocab: int = 199) -> nn.Module:
    return PlainModel(vocab, 30, 3)


class BufferedModel(PlainModel):
    """One with a buffer that its state holds: biases of logits that nobody trains."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__(vocab, width, layers)
        self.register_buffer("offsets", torch.linspace(-0.1, 0.1, vocab))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.offsets


def build_buffered(vocab: int = 199) -> nn.Module:
    return BufferedModel(vocab, 30, 3)
