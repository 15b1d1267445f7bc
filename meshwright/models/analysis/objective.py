"""Describes a model's own loss: the cross-entropy of its logits, and terms that are means over something else.

A loss may also be a mean over targets that its own code chooses (a mask of its own). Which these are shows in the
gradient of the loss by the logits: each call's mean is weighted by their number, and the sum is the mean of the batch.

A term of a global batch is defined by the author's call on one micro-batch: the mean of its values over all
micro-batches of all readers, each weighted by the size of the set over which the term is a mean. A term that is a mean
over targets, tokens or rows has the same value however the rows are split. Another term, such as the balancing loss of
a mixture, depends on which rows lie in one micro-batch; layouts with the same micro-batches agree, and it is weighted
by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.models.forward import IGNORED, ModelOutput, author_output
from meshwright.models.structure import ModelStructure
from meshwright.parallel.random_ops import RandomOpsMode, RandomSource

OFFSETS = 4
"""Tokens ahead up to which the targets of a term are looked for: heads that predict several tokens."""
SHARE = 0.3
"""Share of the tokens and of the targets of a trial that become words which a loss treats in a way of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerm:
    """One term of a model's own loss."""

    name: str
    """The scalar's name in forward's output; ``rest`` for the remainder of the loss."""
    coefficient: float
    """Factor of the scalar that forward returns by this name; 1 for ``rest``."""
    mean: str
    """The set of its mean: ``targets``, ``targets+K`` (those K tokens further) or ``rows``."""
    exact: bool
    """False for a term whose value depends on which rows lie in one micro-batch."""

    def weight(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns a micro-batch's weight in the term's mean, a float64 scalar.

        Args:
            targets: (B, S) int64, `IGNORED` where there is none.
        """
        if self.mean == "rows":
            return torch.tensor(float(len(targets)), dtype=torch.float64, device=targets.device)
        # targets+K: a term that predicts K tokens further has a target wherever that token has one
        offset = int(self.mean.partition("+")[2] or 0)
        return (targets[:, offset:] != IGNORED).sum().to(torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The terms of the loss that a model returns, found by trial."""

    labels: str = ""
    """The form of forward's targets, one of `forward.LABELS`; "" for a forward without targets or loss."""
    logits: bool = True
    """Whether it returns logits; a model without logits has its loss as its only term."""
    terms: tuple[LossTerm, ...] = ()
    """Terms beside the cross-entropy of the logits; the last is the remainder of the loss."""
    counts_targets: bool = False
    """Whether the loss is a mean over targets that its own code chooses, found by `count_targets`; it has no terms."""
    words: tuple[int, ...] = ()
    """Words by which its code chooses, as far as it names them: a trial on random ones alone might choose none."""

    @property
    def plain(self) -> bool:
        """True when the cross-entropy of the logits is the whole loss."""
        return not self.terms and not self.counts_targets

    @property
    def content(self) -> str:
        """What it has beside the cross-entropy of all targets, for people."""
        return "targets of its own choice" if self.counts_targets else ", ".join(term.name for term in self.terms)

    @property
    def exact(self) -> bool:
        """True when the loss of a batch doesn't depend on its micro-batches."""
        return all(term.exact for term in self.terms)

    @property
    def reported(self) -> tuple[LossTerm, ...]:
        """Terms that are reported beside the cross-entropy."""
        return self.terms if self.logits else ()

    def counted(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns ``targets: (B, S)`` as the model counts them: without the last of a row where its code shifts."""
        if self.labels != "shifted" or self.plain:
            return targets
        return torch.cat([targets[:, :-1], torch.full_like(targets[:, :1], IGNORED)], dim=1)

    def weights(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns (1 + terms,) float64: the number of targets, and the micro-batch's weight in each term.

        Args:
            targets: (B, S) int64 of a micro-batch.
        """
        targets = self.counted(targets)
        count = (targets != IGNORED).sum().to(torch.float64)
        return torch.stack([count, *(term.weight(targets) for term in self.terms)])

    def values(self, output: ModelOutput, cross_entropy: torch.Tensor | float) -> list[torch.Tensor]:
        """Returns the value of each term, scalars, from one output and the mean cross-entropy of its logits."""
        assert output.loss is not None
        # some terms exist in training alone
        zero = torch.zeros_like(output.loss)
        named = [term.coefficient * output.scalars.get(term.name, zero) for term in self.terms[:-1]]
        # the last term is the remainder of the loss, so that the values always add up to it
        unexplained = output.loss - cross_entropy
        for value in named:
            unexplained = unexplained - value
        return [*named, unexplained]


def mean_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean over targets of the cross-entropy of ``logits: (B, S, V)`` with ``targets: (B, S)``."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def count_targets(
    loss: torch.Tensor, logits: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Finds the targets that a loss is a mean over: those whose logits it has a gradient by.

    A target whose logits are so far above the others that its gradient is zero to the last bit isn't seen.

    Args:
        loss: () floating; what its graph keeps behind the logits is freed.
        logits: (B, S, V) floating, that it was computed of.
        factor: on the gradient, which fp16 would round to zero for a mean over many targets.

    Returns:
        Which targets count, (B, S) bool; their number, () float64; and the gradient by the logits, (B, S, V), times
        ``factor``. Zeros, no NaN, for a mean over none. None for a loss that wasn't computed of these logits.
    """
    (gradient,) = torch.autograd.grad(loss * factor, logits, allow_unused=True)
    if gradient is None:
        return None
    largest = gradient.abs().amax(dim=-1)
    # 0 / 0 over finite logits: no target was chosen. Logits that overflowed give a NaN that must be seen.
    is_empty = loss.detach().isnan() & ~(largest.isfinite() & (largest > 0)).any() & logits.detach().isfinite().all()
    gradient.masked_fill_(is_empty, 0.0)
    counted = (largest != 0) & ~is_empty
    return counted, counted.sum().to(torch.float64), gradient


def with_words(ids: torch.Tensor, words: Sequence[int], seed: int) -> torch.Tensor:
    """Returns ``ids: (B, S)`` with some of them, but no ignored one, replaced by words at random."""
    if not words:
        return ids
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(words)[torch.randint(len(words), ids.shape, generator=generator)].to(ids.device)
    is_replaced = (torch.rand(ids.shape, generator=generator) < SHARE).to(ids.device) & (ids != IGNORED)
    return torch.where(is_replaced, chosen, ids)


def trial_output(
    module: nn.Module,
    structure: ModelStructure,
    objective: Objective,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the tensor that a rehearsal compares: logits (B, S, V), to each of which the model's own terms are added.

    Args:
        module: the model, or a stage of it.
        structure: of the model.
        objective: its loss.
        tokens: (B, S) int64.
        targets: (B, S) int64.
        positions: (B, S) int64 where documents are masked.

    Returns:
        (B, S, V), or the scalar loss of a model without logits.
    """
    tokens, targets = with_words(tokens, objective.words, 0), with_words(targets, objective.words, 1)
    output = author_output(module, structure, tokens, targets, objective.labels, positions, positions is not None)
    if output.logits is None:
        assert output.loss is not None
        return output.loss
    counted = objective.counted(targets)
    extra_terms = sum(objective.values(output, mean_cross_entropy(output.logits, counted)))
    # a sum, so that one comparison of logits and gradients covers the terms too
    return output.logits + extra_terms


def clone_failure(error: Exception) -> str:
    """Returns why a clone doesn't run, for people."""
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    if f"Target {IGNORED} is out of" in reason:
        return f"{IGNORED} is no target, and its loss takes it for a class; write ignore_index={IGNORED}"
    if "deepcopy protocol" in reason:
        return (
            "an object in one of its attributes has a tensor with a gradient, which can't be copied; leave such "
            "tensors in attributes of a module, or in lists, tuples and dicts there"
        )
    return reason


class _NoDropout(RandomSource):
    """Random numbers that drop nothing, so that a row has the same result in any batch."""

    def dropout_mask(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """Returns a mask of ``shape`` that keeps every element."""
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns 0.5 everywhere, float64 of ``shape``."""
        return torch.full(tuple(shape), 0.5, dtype=torch.float64, device=device)

    def attention_dropout_mask(self, query: torch.Tensor, keys: int, p: float) -> torch.Tensor:
        """Returns a mask (B, H, S, keys) that keeps every attention weight."""
        return self.dropout_mask((*query.shape[:3], keys), p, query.device)


class _NoDropoutMode(RandomOpsMode):
    """Leaves calls with an explicit generator alone: those come from a trial's hooks, not from forward."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def nothing_dropped() -> RandomOpsMode:
    """Returns a mode in which forward draws nothing that differs from row to row."""
    return _NoDropoutMode(_NoDropout())
