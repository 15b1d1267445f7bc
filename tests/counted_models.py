"""Small models whose loss is a mean over targets that their own code chooses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.objectives import Backbone

PAD, PROMPT_END = 5, 7


def entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of each target, (B, S); 0 for -100."""
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


class PadIgnored(Backbone):
    """Its loss leaves out the word of padding."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        masked = targets.masked_fill(targets == PAD, -100)
        return logits, functional.cross_entropy(logits.flatten(0, 1), masked.flatten())


class Answers(Backbone):
    """Its loss is of what follows the end of a prompt, as fine-tuning has it; a row without that end has none."""

    floor = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        counts = ((tokens == PROMPT_END).cumsum(dim=1) > 0) & (targets != -100)
        total = counts.sum()
        loss = (entropies(logits, targets) * counts).sum() / (total.clamp(min=1) if self.floor else total)
        return {"logits": logits, "loss": loss, "answered": total.to(logits.dtype)}


class FlooredAnswers(Answers):
    """The same, of which a row without an answer gives 0."""

    floor = 1


class ShiftedAnswers(Answers):
    """The same, whose code shifts its labels."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def, override]
        logits = self.head(self.hidden(tokens))
        counts = ((tokens == PROMPT_END).cumsum(dim=1) > 0)[:, :-1] & (labels[:, 1:] != -100)
        loss = (entropies(logits[:, :-1].contiguous(), labels[:, 1:].contiguous()) * counts).sum() / counts.sum()
        return {"logits": logits, "loss": loss}


class WeightedWords(Backbone):
    """Each word weighs something else in its mean: which targets count doesn't tell the sum of their weights."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        weights = 1.0 + (targets == PAD) * 3.0
        weights = weights.to(logits.dtype) * (targets != -100)
        return logits, (entropies(logits, targets) * weights).sum() / weights.sum()


class PenalisedAnswers(Answers):
    """Beside a mean over chosen targets, a penalty on its hidden state."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def, override]
        hidden = self.hidden(tokens)
        logits = self.head(hidden)
        masked = targets.masked_fill(targets == PAD, -100)
        loss = functional.cross_entropy(logits.flatten(0, 1), masked.flatten())
        return logits, loss + 0.01 * hidden.square().mean().sqrt()


class MiddleAlone(Backbone):
    """Neither the first nor the last token of a row counts."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, functional.cross_entropy(logits[:, 1:-1].flatten(0, 1), targets[:, 1:-1].flatten())


class LastBeforePad(Backbone):
    """Its loss is of the target before padding, as a classifier's: one of a row."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        counts = torch.zeros_like(targets, dtype=torch.bool)
        counts[:, :-1] = (targets[:, 1:] == PAD) & (targets[:, :-1] != PAD) & (targets[:, :-1] != -100)
        return logits, (entropies(logits, targets) * counts).sum() / counts.sum().clamp(min=1)


class ShiftedMasked(Backbone):
    """Its code shifts its labels, and leaves out tokens of padding, as an attention mask says."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        counts = (tokens != PAD)[:, 1:] & (labels[:, 1:] != -100)
        loss = (entropies(logits[:, :-1].contiguous(), labels[:, 1:].contiguous()) * counts).sum() / counts.sum()
        return logits, loss


class InputMasked(Backbone):
    """What stands behind a token of padding isn't predicted."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        counts = (targets != -100) & (tokens != PAD)
        return logits, (entropies(logits, targets) * counts).sum() / counts.sum().clamp(min=1)


class Unlearned(Backbone):
    """Only targets that aren't learned yet count: all of them, at the start."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        each = entropies(logits, targets)
        counts = (targets != -100) & (each.detach() > 0.5)
        return logits, (each * counts).sum() / counts.sum().clamp(min=1)


class Limited(Backbone):
    """No target adds more than 20 to its loss: none does, at the start."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        return logits, entropies(logits, targets).clamp(max=20.0).sum() / (targets != -100).sum()


class LargeLogits(Backbone):
    """A penalty on logits beyond 50: there are none, at the start."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        penalty = functional.relu(logits.abs() - 50).sum(dim=-1).mean()
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * penalty


class WidenedLogits(Backbone):
    """It returns other logits than its loss reads: a copy, but in float32."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        logits = self.head(self.hidden(tokens))
        masked = targets.masked_fill(targets == PAD, -100)
        return logits.float(), functional.cross_entropy(logits.flatten(0, 1), masked.flatten())


def middle_alone(vocab: int = 61) -> nn.Module:
    return MiddleAlone(vocab)


def last_before_pad(vocab: int = 61) -> nn.Module:
    return LastBeforePad(vocab)


def shifted_masked(vocab: int = 61) -> nn.Module:
    return ShiftedMasked(vocab)


def input_masked(vocab: int = 61) -> nn.Module:
    return InputMasked(vocab)


def unlearned(vocab: int = 61) -> nn.Module:
    return Unlearned(vocab)


def limited(vocab: int = 61) -> nn.Module:
    return Limited(vocab)


def large_logits(vocab: int = 61) -> nn.Module:
    return LargeLogits(vocab)


def widened_logits(vocab: int = 61) -> nn.Module:
    return WidenedLogits(vocab)


def pad_ignored(vocab: int = 61) -> nn.Module:
    return PadIgnored(vocab)


def answers(vocab: int = 61) -> nn.Module:
    return Answers(vocab)


def floored_answers(vocab: int = 61) -> nn.Module:
    return FlooredAnswers(vocab)


def shifted_answers(vocab: int = 61) -> nn.Module:
    return ShiftedAnswers(vocab)


def weighted_words(vocab: int = 61) -> nn.Module:
    return WeightedWords(vocab)


def penalised_answers(vocab: int = 61) -> nn.Module:
    return PenalisedAnswers(vocab)
