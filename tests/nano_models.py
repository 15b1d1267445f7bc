"""Attention as it is written by hand: sizes are read off the hidden state, and parts reshaped by them."""

from __future__ import annotations

import types

import torch
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 64, 32, 4, 2, 64


class Attention(nn.Module):
    """Of nanoGPT: splits by an attribute, and reshapes by the hidden state's width."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        shape = (rows, tokens, self.n_head, width // self.n_head)
        y = functional.scaled_dot_product_attention(
            *(part.view(shape).transpose(1, 2) for part in parts), is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, tokens, width))


class ShapeAttention(Attention):
    """Knows its width by the hidden state alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        shape = (rows, tokens, self.n_head, width // self.n_head)
        y = functional.scaled_dot_product_attention(
            *(part.view(shape).transpose(1, 2) for part in parts), is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).reshape(rows, tokens, width))


class ScaledAttention(ShapeAttention):
    """Computes with the hidden state as well, which no stand-in has numbers for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x[..., :1]


class HookedAttention(Attention):
    """A hook of its own computes with what the matrix returned."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn.register_forward_hook(lambda _module, _args, out: functional.silu(out))


class ReplacedAttention(Attention):
    """Its matrices are plain modules of torch's with a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn.forward = types.MethodType(_activated, self.c_attn)
        self.c_proj.forward = types.MethodType(_doubled, self.c_proj)


def _activated(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.silu(functional.linear(x, linear.weight, linear.bias))


def _doubled(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2.0 * functional.linear(x, linear.weight, linear.bias)


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), attention()
        self.ln_2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList([Block(attention) for _ in range(LAYERS)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def nano() -> nn.Module:
    return Model(Attention)


def by_shape() -> nn.Module:
    return Model(ShapeAttention)


def scaled() -> nn.Module:
    return Model(ScaledAttention)


def hooked() -> nn.Module:
    return Model(HookedAttention)


def replaced() -> nn.Module:
    return Model(ReplacedAttention)
