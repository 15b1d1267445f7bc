"""A run of a model that states no context ends with a sample that is no longer than its rows are at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.runs import call, events, words, write_corpus

SEQUENCE = 16


class Positions(nn.Module):
    """Has learned as many positions as a row has tokens, under names that say nothing."""

    def __init__(self, vocab: int, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def positions(vocab: int, layers: int, width: int) -> nn.Module:
    return Positions(vocab, layers, width)


def test_a_sample_is_drawn_of_a_model_with_as_many_positions_as_tokens_in_a_row(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    more = ("--model", f"{__name__}:positions", "--data.no-mask-documents", "--train.steps", "3")
    code, text = call(words(tmp_path, "run", *more, "--train.sample-tokens", "40"), tmp_path / "out")
    assert code == 0, text
    (sampled,) = events(tmp_path / "run", "sampled")
    assert len(sampled["text"]) > SEQUENCE
