"""Finds out whether a loss that is the cross-entropy of a few targets is that of any."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import Clone
from meshwright.models.analysis.forward_trace import trace_forward
from meshwright.models.forward import IGNORED

LARGEST_VOCABULARY = 8192
"""Words up to which a loss is tried with each of them as a target."""
WORDS = 64
"""Words that are tried at once, a row each."""


def treats_targets_alike(clone: Clone, length: int, excess: Callable[[torch.Tensor, torch.Tensor], float]) -> bool:
    """Returns whether a loss that is the cross-entropy of a few targets is that of any.

    True where its operators show it, or a trial with each word of the vocabulary as a target.

    Args:
        clone: of the model.
        length: tokens of a row.
        excess: how far its loss of tokens and targets, (B, S) int64 each, is off from the cross-entropy.

    Raises:
        ConfigError: for a forward that writes into its targets, which others count.
    """
    structure = clone.structure
    if structure.transformers:
        return True
    trace = trace_forward(clone.module, structure, length)
    if trace.changes_targets:
        name = structure.target_argument
        raise ConfigError(
            f"the model's forward writes into its argument '{name}', whose targets were counted before; write into a "
            f"copy, as in {name} = {name}.masked_fill({name} == pad, {IGNORED})"
        )
    if trace.entropy_alone:
        return True
    if clone.vocab > LARGEST_VOCABULARY:
        return False
    for words in torch.arange(clone.vocab).split(WORDS):
        # A row for each word, in which it is the last target and one between.
        targets = torch.full((len(words), length), IGNORED)
        targets[:, -1] = targets[:, length // 2] = words
        tokens = torch.randint(clone.vocab, targets.shape, generator=torch.Generator().manual_seed(3))
        if excess(tokens, targets):
            return False
    return True
