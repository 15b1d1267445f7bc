"""Finds by trial whether what a model computes for a row depends on the other rows of the call."""

from __future__ import annotations

from collections.abc import Callable

import torch

TOLERANCE = 1e-6
"""Largest difference of equal logits, relative to the largest: tables in float32 stay below it, other rows don't."""


def mixes_rows(logits: torch.Tensor, run_last_row: Callable[[int], torch.Tensor | None]) -> bool:
    """Returns whether the last row of a batch has other logits in a call of its own.

    So it is where experts have a capacity, which the tokens of all rows share, or where a norm is over the batch. A
    model whose logits follow from random numbers shows nothing here, since a smaller call draws others.

    Args:
        logits: (B, S, V) float64 of a batch of two rows or more.
        run_last_row: returns the logits (1, S, V) of its last row alone under a seed, that of the batch at 0, with
            nothing dropped and the same buffers; None for none.
    """
    expected, own_logits = logits[-1:], run_last_row(0)
    if own_logits is None or own_logits.shape != expected.shape:
        return False
    # written so that NaN shows nothing: one device trains nothing on it either
    if not float((own_logits - expected).abs().max()) > TOLERANCE * float(logits.abs().max()):
        return False
    other_draws = run_last_row(1)
    return other_draws is not None and torch.equal(own_logits, other_draws)
