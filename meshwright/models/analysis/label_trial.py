"""Finds out how a model's forward takes targets: as they stand, or as tokens that its code shifts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import Clone
from meshwright.models.analysis.loss_coefficients import float_of
from meshwright.models.analysis.objective import with_words
from meshwright.models.analysis.target_trial import try_targets
from meshwright.models.forward import IGNORED, ModelOutput

ATTEMPTS = 8
"""Batches on which a loss that isn't 0 is looked for."""
TOLERANCE = 1e-9
"""Largest relative difference between equal losses, in float64."""

Rows = tuple[torch.Tensor, torch.Tensor]
"""Tokens and targets, (B, S) int64 each."""
RunForward = Callable[[torch.Tensor, torch.Tensor, str], ModelOutput]
"""(tokens, targets, one of `forward.LABELS`) to what the clone gives in float64, with nothing dropped."""


def find_labels(clone: Clone, length: int, rows: Callable[[int], Rows], run: RunForward) -> str:
    """Returns how forward takes targets: which of them the loss raises, at the logits that it returns.

    Of a loss that its logits don't lead to, by the targets that have an effect: its code shifts them where neither the
    first target of a row has any, nor the last token one that depends on the targets.

    Args:
        clone: of a model whose forward takes targets.
        length: tokens of a row.
        rows: random ones by a seed, of which the first and the last token have a target.
        run: runs the clone.

    Returns:
        One of `forward.LABELS`; "" for a forward that gives no loss.

    Raises:
        ConfigError: for a loss that depends on no target, or of which random rows show nothing.
    """
    label_conventions = ("shift_labels", "aligned") if clone.structure.transformers else ("aligned",)
    telling_rows = _telling_rows(clone, length, rows, run, label_conventions)
    first_rows = next(telling_rows, None)
    if first_rows is None:
        raise ConfigError(
            "the loss that the model's forward gives is 0 or no number for rows of random words, so that nothing "
            "can be read off it; compare words by ==, as in mask = targets != pad"
        )
    tokens, targets = first_rows
    more_rows: list[Rows] = []
    first_target_changed, other_targets_changed = targets.clone(), _other_targets(targets, clone.vocab)
    # another valid target id for the first token of each row
    first_target_changed[:, 0] = (first_target_changed[:, 0] + 1) % clone.vocab
    other_targets_changed[:, 0] = targets[:, 0]
    depends_on_targets = False
    for labels in label_conventions:
        try:
            output = run(tokens, targets, labels)
        except TypeError:
            continue  # its forward has no argument shift_labels
        if output.loss is None:
            # its forward has targets, and returns no loss
            return ""
        loss = float_of(output.loss)
        if (place := _raised_targets(output, targets)) is not None:
            if place == 0:
                return labels
            depends_on_targets = True
            continue
        if float_of(run(tokens, first_target_changed, labels).loss) != loss:
            return labels
        # Only now, since each takes forwards of a model that may be large.
        more_rows = more_rows or [first_rows, *telling_rows]
        if any(_last_token_meets_targets(item, clone.vocab, labels, run) for item in more_rows):
            return labels
        depends_on_targets |= float_of(run(tokens, other_targets_changed, labels).loss) != loss
    if not depends_on_targets:
        raise ConfigError(
            f"the loss that the model's forward gives doesn't depend on its argument "
            f"'{clone.structure.target_argument}'; return the whole loss, with the cross-entropy in it"
        )
    return "shifted"


def _telling_rows(
    clone: Clone, length: int, rows: Callable[[int], Rows], run: RunForward, conventions: Sequence[str]
) -> Iterator[Rows]:
    """Yields rows of which some loss is a number other than 0: random ones, and with words that its code names."""
    words: tuple[int, ...] = ()
    for seed in range(ATTEMPTS):
        tokens, targets = (with_words(ids, words, 2 * seed + place) for place, ids in enumerate(rows(seed)))
        if any(_tells(tokens, targets, labels, run) for labels in conventions):
            yield tokens, targets
        else:
            words = words or try_targets(clone, length, None).words


def _tells(tokens: torch.Tensor, targets: torch.Tensor, labels: str, run: RunForward) -> bool:
    """Returns whether a loss of ``tokens`` and ``targets``, (B, S) each, is another number than 0, or there is none."""
    try:
        loss = run(tokens, targets, labels).loss
    except TypeError:
        if labels != "shift_labels":
            raise
        return False  # its forward has no argument shift_labels
    return loss is None or (math.isfinite(float_of(loss)) and bool(float_of(loss)))


def _raised_targets(output: ModelOutput, targets: torch.Tensor) -> int | None:
    """Returns which target the loss raises at a token: its own, 0, or the next token's, 1; None where it doesn't show.

    A cross-entropy falls along one logit of each token alone, that of its target, whatever weighs or masks it.
    """
    if output.loss is None or output.logits is None or not output.logits.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(output.loss, output.logits, allow_unused=True, retain_graph=True)
    if gradient is None or gradient.shape[:2] != targets.shape:
        return None
    least, raised = gradient.min(dim=-1)
    own, following = (
        int(((raised == wanted) & (least < 0)).sum())
        for wanted in (targets, torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], dim=1))
    )
    return None if own == following else int(following > own)


def _other_targets(targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns another valid id for each of ``targets: (B, S)``."""
    return torch.where(targets == IGNORED, IGNORED, (targets + 1) % vocab)


def _last_token_meets_targets(rows: Rows, vocab: int, labels: str, run: RunForward) -> bool:
    """Returns whether what the last token changes in the loss depends on the targets: its logits have one then."""
    tokens, targets = rows
    last_token_changed = tokens.clone()
    last_token_changed[:, -1] = (last_token_changed[:, -1] + 1) % vocab
    # A second difference: what a term makes of all tokens, as one that balances experts, drops out.
    losses = [
        float_of(run(some_tokens, some_targets, labels).loss)
        for some_targets in (targets, _other_targets(targets, vocab))
        for some_tokens in (tokens, last_token_changed)
    ]
    difference = losses[0] - losses[1] - losses[2] + losses[3]
    return abs(difference) > TOLERANCE * max(map(abs, losses))
