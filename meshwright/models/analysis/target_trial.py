"""Finds out whether a loss that is the cross-entropy of a few targets is that of any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import Clone
from meshwright.models.analysis.forward_trace import ForwardTrace, trace_forward
from meshwright.models.forward import IGNORED

LARGEST_VOCABULARY = 8192
"""Words up to which a loss is tried with each of them as a target."""
WORDS = 64
"""Words that are tried at once, a row each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTrial:
    """How a loss treats words as targets."""

    alike: bool
    """Whether it is the cross-entropy of all of them."""
    shown: bool = False
    """Whether its operators show that, whatever weights, tokens and targets are; or it is a library's own loss."""
    words: tuple[int, ...] = ()
    """Words that its code names, or which it was seen to treat in another way than the others."""


def try_targets(clone: Clone, length: int, excess: Callable[[torch.Tensor, torch.Tensor], float] | None) -> TargetTrial:
    """Tries how a loss treats words as targets: by its operators, and by each word of the vocabulary.

    Args:
        clone: of the model.
        length: tokens of a row.
        excess: how far its loss of tokens and targets, (B, S) int64 each, is off from the cross-entropy; None for a
            loss that is known to be another.

    Raises:
        ConfigError: for a forward that writes into its targets, which others count.
    """
    structure = clone.structure
    if structure.transformers:
        return TargetTrial(alike=excess is not None, shown=excess is not None)
    try:
        trace = trace_forward(clone.module, structure, length)
    except Exception:
        if excess is not None:
            raise
        return TargetTrial(alike=False)  # words of which nothing is known
    if trace.changes_targets:
        name = structure.target_argument
        raise ConfigError(
            f"the model's forward writes into its argument '{name}', whose targets were counted before; write into a "
            f"copy, as in {name} = {name}.masked_fill({name} == pad, {IGNORED})"
        )
    words = _named_words(trace, clone.vocab)
    if excess is None:
        return TargetTrial(alike=False, words=words)
    if trace.entropy_alone:
        return TargetTrial(alike=True, shown=True)
    if clone.vocab > LARGEST_VOCABULARY:
        return TargetTrial(alike=False, words=words)
    for tried in torch.arange(clone.vocab).split(WORDS):
        if excess(*_rows_of(tried, length, clone.vocab)):
            odd = [int(word) for word in tried if excess(*_rows_of(word.view(1), length, clone.vocab))]
            return TargetTrial(alike=False, words=tuple(dict.fromkeys((*words, *odd))))
    return TargetTrial(alike=True, words=words)


def _rows_of(words: torch.Tensor, length: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets, (B, S) int64: a row for each word, in which it is the last target and one between.

    It is the token there too: a mask may be of what stands before a target.
    """
    targets = torch.full((len(words), length), IGNORED)
    targets[:, -1] = targets[:, length // 2] = words
    tokens = torch.randint(vocab, targets.shape, generator=torch.Generator().manual_seed(3))
    tokens[:, length // 2] = words
    return tokens, targets


def _named_words(trace: ForwardTrace, vocab: int) -> tuple[int, ...]:
    return tuple(word for word in trace.compared if 0 <= word < vocab)
