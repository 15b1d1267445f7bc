"""Models that hold their layers otherwise than in one list: dicts, lists of lists, shared layers, own checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.odd_models import VOCAB, WIDTH, Attention, ChunkBlock


class DropBlock(ChunkBlock):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__(WIDTH, 0)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(super().forward(x))


class Model(nn.Module):
    """Embedding, blocks, norm and head; ``order`` gives the calls of the blocks."""

    def __init__(self, blocks: nn.Module, order: Callable[[nn.Module], Iterable[nn.Module]]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), blocks
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.order = order

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.order(self.blocks):
            x = self.call(block, x)
        return self.head(self.norm(x))

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


def dict_of_blocks(p: float = 0.0) -> nn.Module:
    return Model(nn.ModuleDict({f"block{index}": DropBlock(p) for index in range(4)}), lambda blocks: blocks.values())


def one_shared(p: float = 0.0) -> nn.Module:
    return Model(DropBlock(p), lambda block: [block] * 3)


def listed_thrice() -> nn.Module:
    block = DropBlock()
    return Model(nn.ModuleList([block, block, block]), list)


def taking_turns() -> nn.Module:
    first, second = DropBlock(), DropBlock()
    return Model(nn.ModuleList([first, second, first, second]), list)


class _Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class _Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def list_of_lists() -> nn.Module:
    pairs = nn.ModuleList([nn.ModuleList([_Mix(), _Feed()]) for _ in range(2)])
    return Model(pairs, lambda blocks: [part for pair in blocks for part in pair])


def dict_of_lists() -> nn.Module:
    pairs = nn.ModuleDict({f"pair{index}": nn.ModuleList([_Mix(), _Feed()]) for index in range(2)})
    return Model(pairs, lambda blocks: [part for pair in blocks.values() for part in pair])


class _Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([DropBlock() for _ in range(2)])


def list_in_a_wrapper() -> nn.Module:
    return Model(_Held(), lambda held: held.inner)


class _Named(nn.Module):
    """Blocks that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.early, self.late = DropBlock(), DropBlock()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.late(self.early(self.embedding(tokens))))


def named_blocks() -> nn.Module:
    return _Named()


class _StateBlock(DropBlock):
    """Takes a dict, and gives a new one."""

    def forward(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": super().forward(state["x"]), "start": state["start"]}


class _State(Model):
    """Hands its layers their state in a dict."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = self.embedding(tokens)
        state = {"x": start, "start": start}
        for block in self.order(self.blocks):
            state = block(state)
        return self.head(self.norm(state["x"] + state["start"]))


def state_in_a_dict() -> nn.Module:
    return _State(nn.ModuleList([_StateBlock() for _ in range(4)]), list)


class _Checkpointed(Model):
    """Leaves each block's activations out."""

    def __init__(self, p: float, reentrant: bool) -> None:
        super().__init__(nn.ModuleList([DropBlock(p) for _ in range(4)]), list)
        self.reentrant = reentrant

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class _InsideBlock(DropBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = checkpoint(self.attention, self.norm(x), use_reentrant=False)
        p, training = self.drop.p, self.training
        return checkpoint(lambda y: y + functional.dropout(y, p, training), x + mixed, use_reentrant=True)


def checkpointed(p: float = 0.0, reentrant: bool = False) -> nn.Module:
    return _Checkpointed(p, reentrant)


def checkpointed_inside(p: float = 0.0) -> nn.Module:
    return Model(nn.ModuleList([_InsideBlock(p) for _ in range(4)]), list)


def transformers_checkpointed(p: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": WIDTH, "n_head": 2, "vocab_size": VOCAB, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), p)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    # Its name since transformers 5.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


class Cache:
    def __init__(self) -> None:
        self.past: list[torch.Tensor] = []


class CachingBlock(ChunkBlock):
    """Adds what earlier calls with its cache put there, as transformers' attention does with past keys."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 0)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        past = torch.cat([*cache.past, x], dim=1)
        cache.past.append(x)
        return super().forward(x) + past.unflatten(1, (x.shape[1], -1)).squeeze(2)


class CachingModel(Model):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, Cache())


def caching() -> nn.Module:
    return CachingModel(nn.ModuleList([CachingBlock(), CachingBlock()]), list)
