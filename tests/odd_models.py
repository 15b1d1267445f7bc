"""Models whose layers do what few layers do: what a trial on short rows, or on plain layers, would never see."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCAB, WIDTH = 61, 16


class Attention(nn.Module):
    """Two heads of causal attention from a fused matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ChunkBlock(nn.Module):
    """Shows every run of ``span`` tokens the mean of the run before; 0 for no such thing."""

    def __init__(self, width: int, span: int) -> None:
        super().__init__()
        self.span = span
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.span:
            means = [torch.zeros_like(x[:, : self.span])]
            for start in range(self.span, x.shape[1], self.span):
                before = x[:, start - self.span : start].mean(dim=1, keepdim=True)
                means.append(before.expand(-1, min(self.span, x.shape[1] - start), -1))
            x = x + torch.cat(means, dim=1)
        return x + self.down(functional.gelu(self.up(x)))


class ChunkModel(nn.Module):
    def __init__(self, span: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([ChunkBlock(WIDTH, span) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def chunks(span: int = 0) -> nn.Module:
    return ChunkModel(span)


class StreamBlock(nn.Module):
    """Two residual streams, mixed by a matrix: its output is a permuted view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.streams = nn.Parameter(torch.tensor([[0.9, 0.2], [0.1, 0.7]]))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.down(functional.gelu(self.up(self.norm(x.mean(dim=2)))))
        return torch.einsum("bsnd,nm->bsmd", x, self.streams) + added.unsqueeze(2)


class StreamModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([StreamBlock(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).unsqueeze(2).repeat(1, 1, 2, 1).transpose(1, 2).contiguous().transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.sum(dim=2))


def streams() -> nn.Module:
    return StreamModel()


class NoStack(nn.Module):
    """No repeated layers: embedding, one product and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(functional.gelu(self.up(x))))


def no_stack() -> nn.Module:
    return NoStack()


class Reader(nn.Module):
    """A decoder's layer: attends to the memory of an encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        return x + self.out(functional.scaled_dot_product_attention(self.q(x), k, v, is_causal=True))


class EncoderDecoder(nn.Module):
    def __init__(self, encoders: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.encoder = nn.ModuleList([ChunkBlock(WIDTH, 0) for _ in range(encoders)])
        self.decoder = nn.ModuleList([Reader(WIDTH) for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = x = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def encoder_decoder(encoders: int = 2) -> nn.Module:
    return EncoderDecoder(encoders)


class GatedBlock(ChunkBlock):
    """Weighs what attention adds by a number."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 0)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.gate.shape == ()
        x = x + self.gate * self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(x)))


class GatedModel(ChunkModel):
    """Has parameters of shape (): a gate in each layer and a scale outside of them."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([GatedBlock(WIDTH) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(tokens)


def gated() -> nn.Module:
    return GatedModel()


class SpareModel(ChunkModel):
    """Has a second head that nothing calls, as models do that are trained without it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.second = nn.Linear(self.head.in_features, 7)


def spare() -> nn.Module:
    return SpareModel()


class LossModel(ChunkModel):
    """Gives the cross-entropy of its logits alone."""

    def __init__(self) -> None:
        super().__init__(0)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def loss_alone() -> nn.Module:
    return LossModel()
