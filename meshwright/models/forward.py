"""Calls any model the same way: tokens to logits, or as its author calls it, targets to the model's own loss."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.attention import announce_rows, is_varlen, rows_announced, skip_packing_check
from meshwright.models.structure import ModelStructure
from meshwright.parallel.document_attention import DocumentBounds, document_bounds
from meshwright.parallel.model_checkpointing import restoring_first_run

IGNORED = -100
"""Target that counts for nothing, as in `torch.nn.functional.cross_entropy`."""


LABELS = ("aligned", "shift_labels", "shifted")
"""How forward takes targets. ``aligned``: the target of each token at its place. ``shift_labels``: the same, beside
``labels``, as transformers' losses take what is shifted already. ``shifted``: the tokens themselves, which its code
shifts, so that the last token of a row has no target."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The output of one forward: logits, a loss, or both."""

    logits: torch.Tensor | None
    """(B, S, V), the logits of the token after each token."""
    loss: torch.Tensor | None
    """Scalar, the model's own loss of the micro-batch."""
    scalars: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Other scalars of the output by name: terms of its loss, or reported values."""


def model_forward(
    module: nn.Module,
    structure: ModelStructure,
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
) -> torch.Tensor:
    """Computes logits.

    Args:
        module: the model.
        structure: of the model.
        tokens: (B, S) int64.
        positions: (B, S) int64, the position of each token in its document, starting anew at each boundary; None when
            no row has a boundary, which builds no mask and keeps the causal kernel.
        mask_documents: whether tokens attend only within their document. Without it positions are not used.

    Returns:
        Logits (B, S, V), in the type that the model computes them in.

    Raises:
        ConfigError: for a model that returns only a loss, or without position ids though documents are masked.
    """
    # A forward may require targets, or without them return the logits of the last token alone.
    ignored_targets = (
        torch.full_like(tokens, IGNORED) if structure.target_argument and not structure.transformers else None
    )
    output = model_output(module, structure, tokens, ignored_targets, positions, mask_documents)
    if output.logits is None:
        raise ConfigError("the model's forward gives only a loss; return logits (B, S, V) to use it here")
    return output.logits


def model_output(
    module: nn.Module,
    structure: ModelStructure,
    tokens: torch.Tensor,
    targets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
    token_parts: int = 1,
    bounds: DocumentBounds | None = None,
) -> ModelOutput:
    """Computes logits, or the loss of a model that returns nothing else.

    A transformers model isn't handed the targets here. Another module gets them when its forward has an argument for
    them (``targets``, ``labels``, ``y``); if it returns logits for every token these are used, else its loss. Terms
    that a model adds to the cross-entropy of its logits are found by `models.analysis.objective_trial` and trained by
    `author_output`.

    Args:
        module: the model.
        structure: of the model.
        tokens: (B, S) int64.
        targets: (B, S) int64, `IGNORED` where there is none.
        positions: (B, S) int64, as `model_forward`.
        mask_documents: whether tokens see only their own document.
        token_parts: number of shards into which an axis splits the rows' tokens inside the module; logits are of one.
        bounds: of the documents of ``positions``, for attention by documents; computed from them where not given.

    Returns:
        Logits (B, S / token_parts, V), or a scalar loss.

    Raises:
        ConfigError: for an output that is neither logits nor a loss, or masked documents without position ids.
    """
    result = call_model(module, structure, tokens, targets, positions, mask_documents, bounds)
    if structure.transformers:
        return ModelOutput(result.logits, None)
    return _read_output(result, tokens, token_parts, structure.vocab)


def call_model(
    module: nn.Module,
    structure: ModelStructure,
    tokens: torch.Tensor,
    targets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
    bounds: DocumentBounds | None = None,
) -> Any:
    """Returns what a module's forward returns.

    Args:
        module: the model.
        structure: of the model.
        tokens: (B, S) int64.
        targets: (B, S) int64, for a module of one's own that takes them.
        positions: (B, S) int64, that start again with each document.
        mask_documents: whether attention stays within documents.
        bounds: of the documents, for attention without a mask.
    """
    # transformers' models compute a loss from labels, which costs time and isn't used here
    if structure.transformers or targets is None or structure.target_argument is None:
        labels = {}
    else:
        labels = {structure.target_argument: targets}
    return _call_module(module, structure, tokens, labels, positions, mask_documents, bounds)


def author_output(
    module: nn.Module,
    structure: ModelStructure,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    labels: str,
    positions: torch.Tensor | None = None,
    mask_documents: bool = False,
    bounds: DocumentBounds | None = None,
) -> ModelOutput:
    """Calls a model with its targets, as its author does, and reads its loss beside the logits.

    Args:
        module: the model.
        structure: of the model.
        tokens: (B, S) int64.
        targets: (B, S) int64, the token after each token; `IGNORED` where there is none.
        labels: one of `LABELS`; "" for a forward without targets.
        positions: (B, S) int64, as `model_forward`.
        mask_documents: whether tokens see only their own document.
        bounds: of the documents, as `model_output`.

    Raises:
        ConfigError: for an output with neither logits nor a loss, or with several scalars that could be the loss.
    """
    labels_by_argument: dict[str, torch.Tensor] = {}
    if labels:
        assert structure.target_argument is not None
        labels_by_argument[structure.target_argument] = targets
        if labels == "shift_labels":
            labels_by_argument["shift_labels"] = targets
        elif labels == "shifted":
            # the model shifts: hand it the tokens so that its shift restores the targets
            labels_by_argument[structure.target_argument] = torch.cat([tokens[:, :1], targets[:, :-1]], dim=1)
    result = _call_module(module, structure, tokens, labels_by_argument, positions, mask_documents, bounds)
    return read_loss(result, tokens, structure.vocab)


def _call_module(
    module: nn.Module,
    structure: ModelStructure,
    tokens: torch.Tensor,
    labels: Mapping[str, torch.Tensor],
    positions: torch.Tensor | None,
    mask_documents: bool,
    bounds: DocumentBounds | None,
) -> Any:
    """Calls forward with the arguments that it has.

    Args:
        module: the model.
        structure: of the model.
        tokens: (B, S) int64.
        labels: (B, S) int64 by argument name.
        positions: (B, S) int64 or None.
        mask_documents: whether positions are passed.
        bounds: of the documents; None to compute them where they are needed.
    """
    arguments: dict[str, Any] = {structure.token_argument: tokens, **labels}
    if mask_documents and positions is not None:
        if not structure.takes_positions:
            raise ConfigError(_no_documents("its forward takes no position_ids"))
        arguments["position_ids"] = positions
    # a cache of keys is of no use to training
    if structure.transformers and "use_cache" in structure.arguments:
        arguments["use_cache"] = False
    has_documents = mask_documents and positions is not None
    with contextlib.ExitStack() as stack:
        if is_varlen(module) and not rows_announced():
            stack.enter_context(announce_rows(bounds or document_bounds(positions) if has_documents else None))
            stack.enter_context(skip_packing_check(has_documents))
        elif not has_documents and _is_library_model(module):
            # Dense masks of rows with documents are worth a look whether there are any: the causal kernel needs none.
            stack.enter_context(skip_packing_check(has_documents=False))
        stack.enter_context(restoring_first_run())
        return module(**arguments)


def _is_library_model(module: nn.Module) -> bool:
    """Whether a module's code is transformers' own: a class derived from one may make positions of documents itself."""
    # FSDP2 derives a class from each unit's.
    own_class = next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
    return own_class.__module__.startswith("transformers.")


def read_loss(result: Any, tokens: torch.Tensor, vocab: int | None) -> ModelOutput:
    """Finds logits, loss and named scalars in a module's output of any type.

    Args:
        result: what a forward returned.
        tokens: (B, S) int64, those that it was called with.
        vocab: of the model; None where it isn't known.

    Raises:
        ConfigError: as `author_output`.
    """
    if isinstance(result, torch.Tensor):
        named: dict[str, Any] = {"": result}
    elif isinstance(result, Mapping):
        named = dict(result)
    elif hasattr(result, "_asdict"):
        named = result._asdict()
    elif isinstance(result, (tuple, list)):
        named = {f"output {index}": item for index, item in enumerate(result)}
    else:
        named = {key: value for key, value in vars(result).items() if not key.startswith("_")}
    tensors = {key: tensor for key, tensor in named.items() if isinstance(tensor, torch.Tensor)}
    logits = [item for item in tensors.values() if item.ndim == 3 and item.shape[:2] == tokens.shape]
    # a tensor that is called logits wins over others of that shape
    if isinstance(tensors.get("logits"), torch.Tensor) and tensors["logits"].ndim == 3:
        logits.insert(0, tensors["logits"])
    elif isinstance(result, (tuple, list)) and not hasattr(result, "logits"):
        _check_order(logits, vocab)
    scalars = {key: item.reshape(()) for key, item in tensors.items() if item.numel() == 1 and item.is_floating_point()}
    # a single unnamed scalar is the loss; among several none can be chosen
    loss = scalars.pop("loss", None)
    if loss is None and scalars:
        if len(scalars) > 1:
            raise ConfigError(
                f"the model's forward gives several scalars ({', '.join(scalars)}), and one of them is the loss; "
                "return a dict, a named tuple or an object that calls it loss"
            )
        loss = scalars.pop(next(iter(scalars)))
    if not logits and loss is None:
        # raises, naming the shapes
        _read_output(result, tokens, 1, vocab)
    return ModelOutput(logits[0] if logits else None, loss, scalars)


def _check_order(candidates: list[torch.Tensor], vocab: int | None) -> None:
    """Refuses a tuple whose first (B, S, ...) tensor isn't as wide as the vocabulary, while another one is.

    Raises:
        ConfigError: with the shapes.
    """
    widths = [candidate.shape[-1] for candidate in candidates]
    if widths and vocab in widths and widths[0] != vocab:
        shapes = ", ".join(str(tuple(candidate.shape)) for candidate in candidates)
        raise ConfigError(
            f"the model's forward gives {shapes}; the first is taken for its logits, and a later one is as wide as the "
            f"vocabulary of {vocab}; return the logits first, or a dict or an object that calls them logits"
        )


def _read_output(result: Any, tokens: torch.Tensor, token_parts: int, vocab: int | None) -> ModelOutput:
    """Finds logits (B, S / token_parts, V) or a scalar loss in a module's output of any type."""
    if isinstance(result, torch.Tensor):
        candidates = [result]
    elif isinstance(result, dict):
        candidates = [result.get("logits"), result.get("loss")]
    elif isinstance(result, (tuple, list)):
        named = [result.logits] if hasattr(result, "logits") else []
        candidates = [*named, *result]
    else:
        candidates = [getattr(result, "logits", None), getattr(result, "loss", None)]
    tensors = [candidate for candidate in candidates if isinstance(candidate, torch.Tensor)]
    shape = (tokens.shape[0], tokens.shape[1] // token_parts)
    of_tokens = [candidate for candidate in tensors if candidate.ndim == 3 and candidate.shape[:2] == shape]
    if of_tokens:
        if isinstance(result, (tuple, list)) and not hasattr(result, "logits"):
            _check_order(of_tokens, vocab)
        return ModelOutput(of_tokens[0], None)
    for candidate in tensors:
        if candidate.numel() == 1 and candidate.is_floating_point():
            return ModelOutput(None, candidate.reshape(()))
    shapes = ", ".join(str(tuple(candidate.shape)) for candidate in tensors) or type(result).__name__
    cure = "; one value a token is (B, S, 1)" if any(candidate.shape == shape for candidate in tensors) else ""
    raise ConfigError(
        f"the model's forward gave {shapes} for tokens {tuple(tokens.shape)}; it must give logits (B, S, V), an "
        f"object, dict or tuple that holds them, or a scalar loss{cure}"
    )


def _no_documents(reason: str) -> str:
    """Words the refusal of document masks."""
    return (
        f"the model can't keep documents of a row apart: {reason}; set data.mask_documents = false, or data.packing = "
        "single"
    )
