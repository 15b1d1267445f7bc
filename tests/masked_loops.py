"""Training loops of fine-tuning: prompts that don't count, rows without any target, preferences between two rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional

from tests.objectives import Backbone

VOCAB, SEQUENCE, ROWS, STEPS = 37, 10, 8, 3


class Logits(Backbone):
    """Gives logits alone."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Logits(VOCAB).to(torch.get_default_dtype())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def labelled_rows(seed: int, with_empty: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels, (ROWS, SEQUENCE) int64 each: prompts of several lengths; three rows have no label."""
    tokens = torch.randint(0, VOCAB, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 2 + row] = -100
    if with_empty:
        labels[torch.tensor([0, 1, 4])] = -100
    return tokens, labels


def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def steps(strategy: Any) -> list[float]:
    """Fine-tunes by `step`; the first micro-batch has no target."""
    strategy.shard(*model_and_optimizer(), loss=entropy, microbatches=4 // strategy.reader[1], clip=0.5)
    index, count = strategy.reader
    part = slice(index * ROWS // count, (index + 1) * ROWS // count)
    return [
        strategy.step({"input_ids": tokens[part], "labels": labels[part]})
        for tokens, labels in map(labelled_rows, range(STEPS))
    ]


def preferences(strategy: Any) -> list[torch.Tensor]:
    """DPO (Rafailov et al. 2023): two forwards of the policy a step, two of a frozen reference beside it."""
    model, optimizer = model_and_optimizer()
    reference = copy.deepcopy(model).requires_grad_(False)
    for weight in reference.parameters():
        weight.mul_(0.9)
    model, optimizer = strategy.shard(model, optimizer)
    index, count = strategy.reader

    def row_scores(module: torch.nn.Module, seed: int) -> torch.Tensor:
        tokens, labels = (item[index::count] for item in labelled_rows(seed))
        scores, targets = module(tokens)[:, :-1].log_softmax(-1), labels[:, 1:]
        chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (chosen * (targets != -100)).sum(-1)

    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            bar = row_scores(reference, 2 * step) - row_scores(reference, 2 * step + 1)
        margin = row_scores(model, 2 * step) - row_scores(model, 2 * step + 1)
        loss = -functional.logsigmoid(0.1 * (margin - bar)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def row_mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over rows of the mean over a row's targets; a row without any counts as 0."""
    entropies = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    is_target = targets != -100
    return ((entropies * is_target).sum(1) / is_target.sum(1).clamp(min=1)).mean()


def padding_mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over targets that are none at 0, which nobody outside of it knows."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def mixed_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches in which every target counts, by which rows and targets can't be told apart, and three with -100."""
    whole = [(labelled_rows(seed)[0],) * 2 for seed in (11, 12)]
    return whole + [labelled_rows(seed) for seed in range(STEPS)]  # type: ignore[operator]


def train_pairs(
    strategy: Any,
    loss: Any,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    microbatches: int,
    with_head: bool = True,
) -> list[float]:
    """Trains on pairs by `step`; without ``with_head`` the head begins as zeros, so that every target has one loss."""
    model, optimizer = model_and_optimizer()
    if not with_head:
        model.head.weight.data.zero_()
    strategy.shard(model, optimizer, loss=loss, microbatches=microbatches)
    index, count = strategy.reader
    part = slice(index * ROWS // count, (index + 1) * ROWS // count)
    return [strategy.step((tokens[part], labels[part])) for tokens, labels in batches]
