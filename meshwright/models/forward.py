"""One way to call any model: tokens to logits, with or without walls between the documents of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.anatomy import Anatomy

IGNORED = -100
"""Target that counts for nothing, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a forward gave: exactly one of the two is set."""

    logits: torch.Tensor | None
    """(B, S, V), the logits of the token after each token."""
    loss: torch.Tensor | None
    """Scalar, the mean over the targets that aren't `IGNORED`: multiply by their number to sum over micro-batches."""


def model_forward(
    module: nn.Module,
    anatomy: Anatomy,
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
) -> torch.Tensor:
    """Computes logits.

    Args:
        module: the model.
        anatomy: its parts.
        tokens: (B, S) int64.
        positions: (B, S) int64, the position of each token in its document, starting anew at each boundary; None when
            no row has a boundary, which builds no mask and keeps the causal kernel.
        mask_documents: whether tokens see only their own document. Without it positions are not used.

    Returns:
        Logits (B, S, V), in the type that the model computes them in.

    Raises:
        ConfigError: for a model that gives only a loss, or that takes no positions though documents are masked.
    """
    output = model_output(module, anatomy, tokens, None, positions, mask_documents)
    if output.logits is None:
        raise ConfigError("the model's forward gives only a loss; return logits (B, S, V) to use it here")
    return output.logits


def model_output(
    module: nn.Module,
    anatomy: Anatomy,
    tokens: torch.Tensor,
    targets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
) -> ModelOutput:
    """Computes logits, or the loss of a model that gives nothing else.

    A transformers model is never handed the targets. Another module gets them when its forward has an argument for
    them (``targets``, ``labels``, ``y``); if it then returns logits for every token these are taken and its own loss
    is not, else the loss must be a mean over the targets that aren't -100.

    Args:
        module: as `model_forward`.
        anatomy: as `model_forward`.
        tokens: as `model_forward`.
        targets: (B, S) int64, `IGNORED` where there is none.
        positions: as `model_forward`.
        mask_documents: as `model_forward`.

    Raises:
        ConfigError: as `model_forward`, and for an output that is neither logits nor a loss.
    """
    arguments: dict[str, Any] = {anatomy.token_argument: tokens}
    if mask_documents and positions is not None:
        if not anatomy.takes_positions:
            raise ConfigError(_no_documents("its forward takes no position_ids"))
        arguments["position_ids"] = positions
    if anatomy.transformers:
        if "use_cache" in anatomy.arguments:
            arguments["use_cache"] = False
        return ModelOutput(module(**arguments).logits, None)
    if targets is not None and anatomy.target_argument is not None:
        arguments[anatomy.target_argument] = targets
    return _read(module(**arguments), tokens)


def _read(result: Any, tokens: torch.Tensor) -> ModelOutput:
    """Finds logits or a loss in whatever a user's module returned."""
    if isinstance(result, torch.Tensor):
        parts = [result]
    elif isinstance(result, dict):
        parts = [result.get("logits"), result.get("loss")]
    elif isinstance(result, (tuple, list)):
        parts = list(result)
    else:
        parts = [getattr(result, "logits", None), getattr(result, "loss", None)]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    for part in tensors:
        if part.ndim == 3 and part.shape[:2] == tokens.shape:
            return ModelOutput(part, None)
    for part in tensors:
        if part.numel() == 1 and part.is_floating_point():
            return ModelOutput(None, part.reshape(()))
    shapes = ", ".join(str(tuple(part.shape)) for part in tensors) or type(result).__name__
    raise ConfigError(
        f"the model's forward gave {shapes} for tokens {tuple(tokens.shape)}; it must give logits (B, S, V), an "
        "object, dict or tuple that holds them, or a scalar loss"
    )


def document_positions(starts: torch.Tensor) -> torch.Tensor | None:
    """Turns document boundaries into positions.

    Args:
        starts: (B, S) bool, True where a document starts; on the CPU, since the answer decides what is computed.

    Returns:
        (B, S) int64 positions, 0 at the start of each row and of each document; None when no document starts inside a
        row.
    """
    if not bool(starts[:, 1:].any()):
        return None
    index = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    first = torch.where(starts, index, 0)
    first[:, 0] = 0
    return index - first.cummax(dim=1).values


def _no_documents(reason: str) -> str:
    return f"the model can't keep documents of a row apart: {reason}; set data.mask_documents = false"
