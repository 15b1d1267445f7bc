"""Models of users of the strategy's faces, their data, and the same training on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.parallel.float64_ops import Float64Ops
from meshwright.spec.layout import Layout
from tests.plain_model import PlainModel

VOCAB, STEPS, CLIP = 53, 3, 0.3
Batch = tuple[torch.Tensor, torch.Tensor]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return PlainModel(VOCAB, 12, 2).double()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": VOCAB, "n_positions": 16}
    calm = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **calm, bos_token_id=0, eos_token_id=0)).double()


class EmbeddingAdapter(nn.Module):
    """What peft makes of an embedding: the frozen table, and beside it a trained product of rank two."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.low, self.high = nn.Embedding(VOCAB, 2), nn.Linear(2, base.embedding_dim, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base_layer(tokens) + self.high(self.low(tokens))


class Wrapped(nn.Module):
    """A transformers model, whose cache is on, in a module of one's own that has a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.lm: Any = gpt2()
        self.lm.config.use_cache = True
        self.lm.transformer.wte = EmbeddingAdapter(self.lm.transformer.wte)
        self.scale = nn.Linear(VOCAB, VOCAB)
        self.same_scale = self.scale

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.transformer.wte

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.same_scale(torch.tanh(self.scale(self.lm(input_ids=tokens).logits)))


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return Wrapped().double()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 12, "vocab_size": VOCAB, "num_local_experts": 4, "max_position_embeddings": 16}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, experts_implementation="eager")).double()


class Block(nn.Module):
    """A block of a perceptron or of a convolutional net, halving its image."""

    def __init__(self, inputs: int, outputs: int, image: bool) -> None:
        super().__init__()
        self.up = nn.Conv2d(inputs, outputs, 3, 2, 1) if image else nn.Linear(inputs, 3 * outputs)
        self.scale = nn.Identity() if image else nn.LayerNorm(outputs)
        self.norm = nn.GroupNorm(2, outputs) if image else nn.Linear(3 * outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.norm(torch.relu(self.up(x))))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(6, 6, False), Block(6, 6, False), nn.Linear(6, 4)).double()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(3, 4, True), Block(4, 6, True), Block(6, 8, True), Block(8, 8, True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()


def flat_convolutional() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).double()


def rows(*shape: int) -> list[Batch]:
    """Global batches of eight: tokens where no shape is given, else numbers with a class each."""
    draw = torch.Generator().manual_seed(7)
    if shape:
        xs = [torch.randn(8, *shape, generator=draw, dtype=torch.float64) for _ in range(STEPS)]
        return [(x, torch.randint(4, (8,), generator=draw)) for x in xs]
    found = [torch.randint(VOCAB, (8, 9), generator=draw) for _ in range(STEPS)]
    return [(item[:, :-1], item[:, 1:].contiguous()) for item in found]


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: Any = model(x)
    return getattr(found, "logits", found)


def mean_loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(out.flatten(0, -2), targets.flatten())


def plainly(make: Callable[[], nn.Module], batches: list[Batch]) -> tuple[list[float], list[float]]:
    """Trains on one device; returns losses and norms."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for x, y in batches:
        with Float64Ops():
            loss = mean_loss(output(model, x), y)
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def equal(found: list[Any], wanted: Any, bound: float = 1e-9) -> None:
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(wanted), rtol=bound, atol=bound)


def world(text: str) -> int:
    return Layout.parse(text).world
