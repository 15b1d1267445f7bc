"""What a model's own forward does with tokens between its layers, where ``sequence=true`` gives each rank some."""

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.strategy import HybridParallelStrategy
from tests.contract.test_shared_modules import VOCAB, WIDTH, Block, StackedModel, make_mlp
from tests.ranks.group import run_ranks

POSITIONS = 32
"""Fewer than the tokens of the rows on which a loop's model is tried when nothing is known of its rows."""


class _Between(StackedModel):
    """Adds a table's rows, by the number of tokens that it sees, or the embedding, between its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__(VOCAB, [Block(nn.LayerNorm(WIDTH), make_mlp()) for _ in range(2)])
        self.kind, self.places = kind, nn.Embedding(POSITIONS, WIDTH)
        self.register_buffer("table", torch.sin(torch.arange(POSITIONS)[:, None] * torch.arange(1, WIDTH + 1)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, S) int64 to logits (B, S, V)."""
        embedded = self.embedding(tokens)
        x = embedded + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            if self.kind == "table":
                x = x + self.table[: x.shape[1]]
            if self.kind == "embedding":
                x = x + embedded
        return self.head(self.norm(x))


def _shard(_rank: int, kind: str) -> str:
    try:
        HybridParallelStrategy("tp=2,sequence=true").shard(_Between(kind).double())
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "reason"), [("table", "logits are off"), ("embedding", "tensor a (16) must match"), ("", "")]
)
def test_reads_of_tokens_between_layers_are_refused(kind: str, reason: str) -> None:
    """A table of few positions kept the model from being tried, and its rows would have begun anew on each rank."""
    for refusal in run_ranks(2, _shard, kind):
        assert reason in refusal
        assert bool(refusal) == bool(kind)
        assert not kind or "sequence=true splits the tokens" in refusal
        assert not kind or f"rows of {POSITIONS} tokens" in refusal
        assert not kind or refusal.endswith("leave sequence out")
