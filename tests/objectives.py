"""Small models whose loss has more in it than the cross-entropy of the logits, or that change buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.plain_model import Block

VOCAB, WIDTH = 61, 12
RARE = 1999
"""A word that few batches hold."""


class Backbone(nn.Module):
    """Embedding, blocks and head; what its loss is, others say."""

    def __init__(self, vocab: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Plain(Backbone):
    """Its loss is the cross-entropy of its logits."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, None if targets is None else entropy(logits, targets)


class OtherIgnored(Backbone):
    """Its loss leaves out targets of -1."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class RareIgnored(Backbone):
    """Its loss leaves out one word of the vocabulary, as one of padding."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, entropy(logits, targets.masked_fill(targets == RARE, -100))


class WritesTargets(Backbone):
    """The same, written into the targets that it is handed."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        targets[targets == RARE] = -100
        logits = self.head(self.hidden(tokens))
        return logits, entropy(logits, targets)


class ByHand(Backbone):
    """Its loss is the cross-entropy of its logits, written out."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        counted = targets != -100
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return logits, -(chosen * counted).sum() / counted.sum()


class HiddenFirst(Backbone):
    """Returns its hidden state in front of its logits."""

    def forward(self, tokens: torch.Tensor):  # type: ignore[no-untyped-def]
        x = self.hidden(tokens)
        return x, self.head(x)


class NamedLogits(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


class HiddenNamed(HiddenFirst):
    """Returns the same by name."""

    def forward(self, tokens: torch.Tensor):  # type: ignore[no-untyped-def]
        return NamedLogits(*super().forward(tokens))


class LogitPenalty(Backbone):
    """z-loss: the squared log of the partition sum, over all tokens."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        z = logits.logsumexp(-1).square().mean()
        return {"logits": logits, "loss": entropy(logits, targets) + 0.01 * z, "z": z}


class PenaltyInPlace(Backbone):
    """Its loss is written into after the cross-entropy was computed."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        loss = entropy(logits, targets)
        loss += 0.01 * logits.square().mean()
        return logits, loss


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        return upstream[0] / 2.0


class HalvedGradient(Backbone):
    """Its loss is the cross-entropy, and its gradient half of that."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, _Halved.apply(entropy(logits, targets))


class CooledInPlace(Backbone):
    """Its loss is of a copy of the logits that was written into."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, entropy(logits.clone().div_(2.0), targets)


class ScoredInPlace(Backbone):
    """Its logits are written into after the loss was computed of them."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        loss = entropy(logits, targets)
        return logits.mul_(2.0), loss


class StraightThrough(Backbone):
    """Its penalty has a gradient and no value."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        z = logits.logsumexp(-1).square().mean()
        return logits, entropy(logits, targets) + z - z.detach()


class TwoHeads(Backbone):
    """Predicts the token after the next one too."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab, layers=4)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        x = self.hidden(tokens)
        logits = self.head(x)
        further = self.head(self.second(x)[:, :-1])
        return logits, entropy(logits, targets) + 0.3 * entropy(further, targets[:, 1:])


class FurtherHeads(Backbone):
    """Heads of their own predict the second and third token ahead, and its code shifts all labels, as Medusa's does."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        heads = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, vocab, False)) for _ in range(2)]
        self.further = nn.ModuleList(heads)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def]
        x = self.hidden(tokens)
        logits = self.head(x)
        loss = entropy(logits[:, :-1], labels[:, 1:])
        for ahead, head in enumerate(self.further, start=2):
            loss = loss + 0.5**ahead * entropy(head(x)[:, :-ahead], labels[:, ahead:])
        return {"logits": logits, "loss": loss}


class Balanced(Backbone):
    """A balancing loss over all tokens of the batch, as mixtures have it: a product of two means."""

    def __init__(self, vocab: int, dropout: float = 0.0) -> None:
        super().__init__(vocab)
        self.gates = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in self.blocks])
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        x, balance = self.embedding(tokens), torch.zeros((), dtype=self.head.weight.dtype)
        for block, gate in zip(self.blocks, self.gates):
            x = block(x)
            shares = gate(self.dropout(x)).softmax(-1).flatten(0, 1)
            chosen = functional.one_hot(shares.argmax(-1), 4).to(shares.dtype)
            balance = balance + 4 * (shares.mean(0) * chosen.mean(0)).sum()
        logits = self.head(self.norm(x))
        z = logits.logsumexp(-1).square().mean()
        loss = entropy(logits, targets) + 0.1 * balance + 0.01 * z
        return {"logits": logits, "loss": loss, "balance": balance, "z": z}


class LossAlone(Backbone):
    """Gives no logits."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return entropy(self.head(self.hidden(tokens)), targets)


class ShiftedAlone(Backbone):
    """Shifts its labels itself, as its author calls it: model(tokens, labels=tokens)."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return entropy(self.head(self.hidden(tokens))[:, :-1], labels[:, 1:])


class Loose(Backbone):
    """Gives a term of which nobody says how it enters the loss."""

    def forward(self, tokens: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, logits.square().mean()


class RunningNorm(Backbone):
    """Keeps running statistics of its batches."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.hidden(tokens))  # a bias in front of the norm would have no gradient
        return self.head(self.batch(x.transpose(1, 2)).transpose(1, 2))


class RowNorm(Backbone):
    """Its hidden state has the batch's mean taken off, of which no buffer keeps anything."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.hidden(tokens))
        return self.head(x - x.mean(dim=(0, 1)))


class WarmingLogits(Backbone):
    """Counts its calls in a buffer, and scales its logits by them."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.head(self.hidden(tokens)) * (1 - 0.5 ** self.calls.to(self.head.weight.dtype))


class PlainlyWarming(Backbone):
    """Counts them in a plain attribute."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.head(self.hidden(tokens)) * (1 - 0.5**self.calls)


class CountingBlock(Block):
    """Counts its calls, which scale what it does."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class AverageBlock(Block):
    """Subtracts a moving average of what it has seen."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)).to(self.average.dtype))
        return super().forward(x - self.average)


class DroppingBlock(AverageBlock):
    """Drops some of what it adds, too: computed again, it needs both the numbers and the average of the first time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(super().forward(x), 0.2, self.training)


class BalancingBlock(Block):
    """Corrects a scale by the sign of a measure of its tokens, as routers that are balanced without a loss do.

    The sign is the same for batches of many random words.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("correction", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.correction += 0.1 * torch.sign(x.detach().var((0, 1)).mean() - 1e-3).to(self.correction.dtype)
        return super().forward(x) * (1 + self.correction)


class RowCountingBlock(Block):
    """Counts the rows that it has seen, which scale what it does."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.rows += len(x)
        return super().forward(x) * (1 + 0.01 * self.rows)


class Moving(Backbone):
    """Blocks that change buffers."""

    def __init__(self, vocab: int, kind: type[Block]) -> None:
        super().__init__(vocab)
        self.blocks = nn.ModuleList([kind(WIDTH) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def plain(vocab: int = VOCAB) -> nn.Module:
    return Plain(vocab)


def logit_penalty(vocab: int = VOCAB) -> nn.Module:
    return LogitPenalty(vocab)


def straight_through(vocab: int = VOCAB) -> nn.Module:
    return StraightThrough(vocab)


def two_heads(vocab: int = VOCAB) -> nn.Module:
    return TwoHeads(vocab)


def further_heads(vocab: int = VOCAB) -> nn.Module:
    return FurtherHeads(vocab)


def balanced(vocab: int = VOCAB) -> nn.Module:
    return Balanced(vocab)


def balanced_dropout(vocab: int = VOCAB) -> nn.Module:
    return Balanced(vocab, 0.3)


def halved_gradient(vocab: int = VOCAB) -> nn.Module:
    return HalvedGradient(vocab)


def penalty_in_place(vocab: int = VOCAB) -> nn.Module:
    return PenaltyInPlace(vocab)


def cooled_in_place(vocab: int = VOCAB) -> nn.Module:
    return CooledInPlace(vocab)


def scored_in_place(vocab: int = VOCAB) -> nn.Module:
    return ScoredInPlace(vocab)


def loss_alone(vocab: int = VOCAB) -> nn.Module:
    return LossAlone(vocab)


def shifted_alone(vocab: int = VOCAB) -> nn.Module:
    return ShiftedAlone(vocab)


def loose(vocab: int = VOCAB) -> nn.Module:
    return Loose(vocab)


def other_ignored(vocab: int = VOCAB) -> nn.Module:
    return OtherIgnored(vocab)


def rare_ignored(vocab: int = VOCAB) -> nn.Module:
    return RareIgnored(vocab)


def writes_targets(vocab: int = VOCAB) -> nn.Module:
    return WritesTargets(vocab)


def by_hand(vocab: int = VOCAB) -> nn.Module:
    return ByHand(vocab)


def hidden_first(vocab: int = VOCAB) -> nn.Module:
    return HiddenFirst(vocab)


def hidden_named(vocab: int = VOCAB) -> nn.Module:
    return HiddenNamed(vocab)


def running_norm(vocab: int = VOCAB) -> nn.Module:
    return RunningNorm(vocab)


def row_norm(vocab: int = VOCAB) -> nn.Module:
    return RowNorm(vocab)


def warming_logits(vocab: int = VOCAB) -> nn.Module:
    return WarmingLogits(vocab)


def plainly_warming(vocab: int = VOCAB) -> nn.Module:
    return PlainlyWarming(vocab)


def counting(vocab: int = VOCAB) -> nn.Module:
    return Moving(vocab, CountingBlock)


def averaging(vocab: int = VOCAB) -> nn.Module:
    return Moving(vocab, AverageBlock)


def dropping(vocab: int = VOCAB) -> nn.Module:
    return Moving(vocab, DroppingBlock)


def balancing(vocab: int = VOCAB) -> nn.Module:
    return Moving(vocab, BalancingBlock)


def row_counting(vocab: int = VOCAB) -> nn.Module:
    return Moving(vocab, RowCountingBlock)
