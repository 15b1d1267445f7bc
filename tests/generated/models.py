"""Random language models: each seed is a plain nn.Module put together from parts that users' models have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn import functional

VOCABULARIES = (61, 97, 200)
LONGEST = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """What a random model is made of."""

    vocab: int
    heads: int
    kv_heads: int
    head: int
    layers: int
    hidden: int
    attention: tuple[str, ...]
    """Kind of each layer: full, window, latent, linear or conv."""
    feed_forward: tuple[str, ...]
    """Kind of each layer: plain, gated, mixture or dense mixture."""
    residual: str
    """serial, parallel or streams."""
    norm: str
    head_norm: bool
    bias: bool
    fused: bool
    gate: bool
    tied: bool
    positions: str
    """table, rotary or none."""
    dropout: float
    skip: float
    window: int

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.heads * self.head


def draw_spec(seed: int) -> Spec:
    """Returns the spec of a seed."""
    draw = Random(seed)
    kv_heads, layers = draw.choice((1, 2, 2, 3, 4)), draw.choice((2, 2, 3, 4))
    mixed = draw.random() < 0.5
    kinds = ("full", "full", "window", "latent", "linear", "conv")
    parts = ("plain", "gated", "gated", "mixture", "dense mixture")
    attention, feed_forward = draw.choice(kinds), draw.choice(parts)
    return Spec(
        vocab=draw.choice(VOCABULARIES),
        heads=kv_heads * draw.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        head=draw.choice((4, 6, 8)),
        layers=layers,
        hidden=draw.choice((16, 21, 24, 40)),
        attention=tuple(draw.choice(kinds) if mixed else attention for _ in range(layers)),
        feed_forward=tuple(draw.choice(parts) if mixed else feed_forward for _ in range(layers)),
        residual=draw.choice(("serial", "serial", "serial", "parallel", "streams")),
        norm=draw.choice(("layer", "rms", "after")),
        head_norm=draw.random() < 0.3,
        bias=draw.random() < 0.5,
        fused=draw.random() < 0.4,
        gate=draw.random() < 0.3,
        tied=draw.random() < 0.4,
        positions=draw.choice(("table", "rotary", "none")),
        dropout=draw.choice((0.0, 0.0, 0.0, 0.1)),
        skip=draw.choice((0.0, 0.0, 0.0, 0.2)),
        window=draw.choice((3, 7, 20)),
    )


class Attention(nn.Module):
    """Causal attention: grouped heads, a window, a latent key, a linear kernel, a gate, norms inside the heads."""

    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        self.spec, self.kind = spec, kind
        keys = spec.kv_heads * spec.head
        self.fused = spec.fused and kind != "latent"
        if self.fused:
            self.qkv = nn.Linear(spec.width, spec.width + 2 * keys, bias=spec.bias)
        else:
            self.q = nn.Linear(spec.width, spec.width, bias=spec.bias)
            inner = spec.width
            if kind == "latent":
                inner = max(4, spec.width // 2)
                self.compress = nn.Linear(spec.width, inner, bias=False)
            self.k, self.v = (nn.Linear(inner, keys, bias=spec.bias) for _ in range(2))
        self.out = nn.Linear(spec.width, spec.width, bias=spec.bias)
        self.gate = nn.Linear(spec.width, spec.width, bias=False) if spec.gate else None
        self.q_norm, self.k_norm = (nn.RMSNorm(spec.head) if spec.head_norm else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        spec = self.spec
        if self.fused:
            keys = spec.kv_heads * spec.head
            q, k, v = self.qkv(x).split((spec.width, keys, keys), dim=-1)
        else:
            inner = self.compress(x) if self.kind == "latent" else x
            q, k, v = self.q(x), self.k(inner), self.v(inner)
        q, k, v = (item.unflatten(-1, (-1, spec.head)).transpose(1, 2) for item in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = turned(q, angles), turned(k, angles)
        k, v = (item.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for item in (k, v))
        mixed = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return self.out(mixed if self.gate is None else mixed * torch.sigmoid(self.gate(x)))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind == "linear":
            q, k = functional.elu(q) + 1, functional.elu(k) + 1
            state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(dim=2)
            scale = (q * k.cumsum(dim=2)).sum(-1, keepdim=True)
            return (q.unsqueeze(-2) @ state).squeeze(-2) / scale
        dropout = self.spec.dropout if self.training else 0.0
        if self.kind != "window":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        place = torch.arange(q.shape[2])
        apart = place.unsqueeze(1) - place
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(apart >= 0) & (apart < self.spec.window), dropout_p=dropout
        )


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns pairs of a head's elements: x (B, H, S, head), angles (S, head / 2)."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class TimeConv(nn.Module):
    """A gated depthwise convolution over the three tokens before."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(spec.width, 2 * spec.width), nn.Linear(spec.width, spec.width)
        self.conv = nn.Conv1d(spec.width, spec.width, 3, groups=spec.width)

    def forward(self, x: torch.Tensor, _angles: torch.Tensor | None) -> torch.Tensor:
        value, gate = self.enter(x).chunk(2, dim=-1)
        mixed = self.conv(functional.pad(value.transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.out(mixed * functional.silu(gate))


class FeedForward(nn.Module):
    def __init__(self, spec: Spec, gated: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(spec.width, spec.hidden, bias=spec.bias),
            nn.Linear(spec.hidden, spec.width, bias=spec.bias),
        )
        self.gate = nn.Linear(spec.width, spec.hidden, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up)


class Mixture(nn.Module):
    """Four experts of a list: the two that a token likes best, or all of them by their weights."""

    def __init__(self, spec: Spec, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(spec.width, 4, bias=False)
        self.experts = nn.ModuleList([FeedForward(spec, True) for _ in range(4)])
        self.dense = dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(dim=-1)
        if not self.dense:
            least = weights.topk(2, dim=-1).values[..., -1:]
            weights = torch.where(weights >= least, weights, 0.0)
        parts = [weights[..., [number]] * expert(x) for number, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(dim=0)


class Block(nn.Module):
    def __init__(self, spec: Spec, number: int) -> None:
        super().__init__()
        kind, part = spec.attention[number], spec.feed_forward[number]
        self.spec = spec
        self.mixer = TimeConv(spec) if kind == "conv" else Attention(spec, kind)
        self.feed = Mixture(spec, part == "dense mixture") if "mixture" in part else FeedForward(spec, part == "gated")
        norm = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
        self.first, self.second = norm(spec.width), norm(spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        if spec.residual == "streams":
            self.streams = nn.Parameter(torch.tensor([[0.9, 0.2], [0.1, 0.7]]))

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        if self.spec.residual == "streams":
            read = x.mean(dim=-2)
            added = self.work(read, angles) - read
            return torch.einsum("bsnd,nm->bsmd", x, self.streams) + added.unsqueeze(-2)
        if self.training and self.spec.skip and torch.rand(()) < self.spec.skip:
            return x
        return self.work(x, angles)

    def work(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        if self.spec.residual == "parallel":
            inner = self.first(x)
            return x + self.dropout(self.mixer(inner, angles)) + self.feed(inner)
        if self.spec.norm == "after":
            x = self.first(x + self.dropout(self.mixer(x, angles)))
            return self.second(x + self.feed(x))
        x = x + self.dropout(self.mixer(self.first(x), angles))
        return x + self.feed(self.second(x))


class RandomModel(nn.Module):
    """Tokens (B, S) to logits (B, S, V)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.places = nn.Embedding(LONGEST, spec.width) if spec.positions == "table" else None
        if spec.positions == "rotary":
            rates = 1.0 / 100 ** (torch.arange(spec.head // 2) / (spec.head // 2))
            self.register_buffer("angles", torch.arange(LONGEST).unsqueeze(1) * rates, persistent=False)
        self.blocks = nn.ModuleList([Block(spec, number) for number in range(spec.layers)])
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * math.sqrt(self.spec.width)
        angles = self.angles[: tokens.shape[1]] if self.spec.positions == "rotary" else None
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        if self.spec.residual == "streams":
            x = x.unsqueeze(-2).repeat(1, 1, 2, 1)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x.sum(dim=-2) if self.spec.residual == "streams" else x))


def build(seed: int = 0) -> nn.Module:
    """Returns the model of a seed; what `ModelConfig` names."""
    return RandomModel(draw_spec(seed))
