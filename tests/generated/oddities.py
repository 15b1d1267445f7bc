"""Whole models that no family has: what a stranger would try. Each equals one device or is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, HEAD = 61, 16, 4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over (B, S, D) in heads of `HEAD`."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(attend(self.q(x), self.k(x), self.v(x)))


class Feed(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(x)))


class Plain(nn.Module):
    """Norms, attention and feed-forward."""

    def __init__(self, width: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed = Attention(width), Feed(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Odd(nn.Module):
    """Embedding, four blocks, norm and head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrence(nn.Module):
    """Shifts tokens by one and keeps a decaying state of each channel, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), Feed()
        self.mix, self.decay = nn.Parameter(torch.full((WIDTH,), 0.4)), nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
        self.k, self.v, self.r, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = torch.lerp(functional.pad(y[:, :-1], (0, 0, 1, 0)), y, self.mix)
        k, v, rate = self.k(y).exp(), self.v(y), torch.sigmoid(self.decay)
        top, bottom, states = torch.zeros_like(v[:, 0]), torch.full_like(v[:, 0], 1e-3), []
        for at in range(x.shape[1]):
            top, bottom = rate * top + k[:, at] * v[:, at], rate * bottom + k[:, at]
            states.append(top / bottom)
        x = x + self.out(torch.sigmoid(self.r(y)) * torch.stack(states, dim=1))
        return x + self.feed(x)


def rwkv() -> nn.Module:
    return Odd([Recurrence() for _ in range(4)])


class Depths(Plain):
    """Computes the half of a row's tokens that a router likes best (mixture of depths)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).squeeze(-1)
        best = scores.topk(max(1, x.shape[1] // 2), dim=1).indices.sort(dim=1).values
        index = best.unsqueeze(-1).expand(-1, -1, x.shape[2])
        chosen = super().forward(x.gather(1, index)) * scores.gather(1, best).sigmoid().unsqueeze(-1)
        return x.scatter_add(1, index, chosen)


def mixture_of_depths() -> nn.Module:
    return Odd([Depths() for _ in range(4)])


class Hyper(Plain):
    """Hyper-connections: two streams (B, S, 2, D), read and written by weights that follow from them."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.across = nn.Parameter(torch.tensor([[1.0, 0.1], [0.2, 0.9]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward((x * torch.tanh(self.read(x)).softmax(dim=2)).sum(dim=2))
        return torch.einsum("bsnd,nm->bsmd", x, self.across) + torch.tanh(self.write(x)) * y.unsqueeze(2)


class Streams(Odd):
    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens).unsqueeze(2).expand(-1, -1, 2, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=2)))


def hyper_connections() -> nn.Module:
    return Streams([Hyper() for _ in range(4)])


class Memory(Odd):
    """Three learned tokens before each row."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(4)])
        self.memory = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        x = torch.cat([self.memory.to(x).expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 3:]))


def memory_tokens() -> nn.Module:
    return Memory()


class Asking(nn.Module):
    """Asks keys and values that an earlier layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.feed = nn.LayerNorm(WIDTH), Feed()

    def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attend(self.q(self.norm(x)), k, v))
        return x + self.feed(x)


class SharedKeys(Odd):
    def __init__(self) -> None:
        super().__init__([Asking() for _ in range(4)])
        self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        k, v = self.k(x), self.v(x)
        for block in self.blocks:
            x = block(x, k, v)
        return self.head(self.norm(x))


def shared_keys() -> nn.Module:
    return SharedKeys()


class Parallel(nn.Module):
    """One matrix makes queries, keys, values and the hidden features; one brings all back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH + 24)
        self.leave = nn.Linear(WIDTH + 24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, hidden = self.enter(self.norm(x)).split((WIDTH, WIDTH, WIDTH, 24), dim=-1)
        return x + self.leave(torch.cat([attend(q, k, v), functional.gelu(hidden)], dim=-1))


def parallel_fused() -> nn.Module:
    return Odd([Parallel() for _ in range(4)])


class Resized(nn.Module):
    """Works in a width of its own."""

    def __init__(self, inputs: int, width: int, hidden: int) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(inputs, width), Plain(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.enter(x))


def widths() -> nn.Module:
    return Odd([Resized(16, 8, 12), Resized(8, 24, 40), Resized(24, 12, 20), Resized(12, 16, 24)])


class Placed(Plain):
    """Adds a table of positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.places[: x.shape[1]])


def table_in_each_layer() -> nn.Module:
    return Odd([Placed() for _ in range(4)])


class Mapping(Odd):
    """Takes inputs that nobody gives, and returns a dict with more than logits."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        hidden = [self.embedding(tokens) * scale]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return {"hidden": hidden, "logits": self.head(self.norm(hidden[-1])), "mask": mask}


def mapping() -> nn.Module:
    return Mapping([Plain() for _ in range(4)])


class Skips(Odd):
    """The last layers read what the first made, as a U-Net's do."""

    def forward(self, tokens: torch.Tensor) -> Any:
        x, made = self.embedding(tokens), []
        for block in self.blocks[:2]:
            x = block(x)
            made.append(x)
        for block in self.blocks[2:]:
            x = block(x + made.pop())
        return self.head(self.norm(x))


def skips() -> nn.Module:
    return Skips([Plain() for _ in range(4)])


class Exits(Odd):
    """Adds up the logits of all layers by learned weights."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(4)])
        self.weights = nn.Parameter(torch.zeros(4))

    def forward(self, tokens: torch.Tensor) -> Any:
        x, total = self.embedding(tokens), 0.0
        for block, weight in zip(self.blocks, self.weights.softmax(dim=0)):
            x = block(x)
            total = total + weight * self.head(self.norm(x))
        return total


def exits() -> nn.Module:
    return Exits()


class Adapted(nn.Module):
    """A frozen linear and a trained product of rank two beside it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapters() -> nn.Module:
    model = Odd([Plain() for _ in range(4)]).requires_grad_(False)
    for block in model.blocks:
        block.attention.q, block.attention.v = Adapted(block.attention.q), Adapted(block.attention.v)
    return model


ALL = (rwkv, mixture_of_depths, hyper_connections, memory_tokens, shared_keys, parallel_fused, widths)
ALL += (table_in_each_layer, mapping, skips, exits, adapters)
