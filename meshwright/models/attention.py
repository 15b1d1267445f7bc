"""Attention of transformers' models by documents: registered with its attention and mask interfaces, for any family.

A model built with ``attention="varlen"`` runs as "sdpa" does until a call announces rows (`announce_rows`). Then the
masks that the model's own code asks for are document masks (`parallel.document_attention`), and its attention takes
the kernel for variable lengths. Whether a family's masks are causal within documents and windows, and nothing more, is
tried on a small clone (`varlen_refusal`), where the masks are compared element by element.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn

from meshwright.parallel.document_attention import (
    DocumentBounds,
    dense_mask,
    document_attention,
    is_packed_mask,
    pack_mask,
    row_bounds,
)

VARLEN: Final = "varlen"
"""Value of ``model.attention`` for attention by documents."""
_NAME = "meshwright_varlen"
"""The implementation's name in transformers; without "flash" in it, which transformers looks for."""
_RING_NAME = "meshwright_ring"
"""Its name where whole rows have a document mask too, since a ring reads no other."""


@dataclass(slots=True)
class _Rows:
    """The micro-batch whose forward runs."""

    bounds: DocumentBounds | None
    """Of its documents; None where each row is one."""
    refusals: list[str] | None = field(default=None)
    """What a trial finds that the kernel can't do; None outside of trials."""


_ROWS: ContextVar[_Rows | None] = ContextVar("rows", default=None)
_HAS_DOCUMENTS: ContextVar[bool | None] = ContextVar("has_documents", default=None)
"""Whether rows of the micro-batch may have several documents; None where nobody has said."""


@contextlib.contextmanager
def announce_rows(bounds: DocumentBounds | None, refusals: list[str] | None = None) -> Iterator[None]:
    """Makes forwards inside of it attend by documents.

    Args:
        bounds: of the micro-batch's documents; None where each row is one.
        refusals: filled by a trial with what the kernel can't do.
    """
    token = _ROWS.set(_Rows(bounds, refusals))
    try:
        yield
    finally:
        _ROWS.reset(token)


@contextlib.contextmanager
def skip_packing_check(has_documents: bool) -> Iterator[None]:
    """Keeps transformers' models from reading off their positions whether rows have several documents.

    For that the host would wait for the device in each forward, and fake tensors have nothing to read. A caller of a
    batch knows it. Where transformers' masks aren't loaded nobody asks.

    Args:
        has_documents: whether rows may have several; their positions then tell which, without a check whether any do.
    """
    if "transformers.masking_utils" in sys.modules:
        _replace_packing_check()
    token = _HAS_DOCUMENTS.set(has_documents)
    try:
        yield
    finally:
        _HAS_DOCUMENTS.reset(token)


@cache
def _replace_packing_check() -> None:
    """Has transformers ask what `skip_packing_check` says, and outside of it, or where code is traced, look as ever."""
    masks: Any = importlib.import_module("transformers.masking_utils")
    look: Callable[[torch.Tensor], torch.Tensor | None] = masks.find_packed_sequence_indices

    def known_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
        """Returns (B, S) int64, the number of each token's document in its row; None where all rows are one."""
        has_documents = None if torch.compiler.is_compiling() else _HAS_DOCUMENTS.get()
        if has_documents is None:
            return look(position_ids)
        if not has_documents:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    masks.find_packed_sequence_indices = known_documents


def rows_announced() -> bool:
    """Returns whether `announce_rows` is entered."""
    return _ROWS.get() is not None


def is_varlen(module: nn.Module) -> bool:
    """Returns whether a module's attention is by documents."""
    return getattr(getattr(module, "config", None), "_attn_implementation", "") in (_NAME, _RING_NAME)


def use_varlen(module: nn.Module, in_ring: bool = False) -> None:
    """Makes a transformers model attend by documents where it used "sdpa", in place.

    Args:
        module: the model.
        in_ring: whether rows without a boundary have a document mask too, for ``attention=ring``. Without one
            transformers reads from the device whether a dense mask is needed.
    """
    name = _RING_NAME if in_ring else _NAME
    attention: Any = importlib.import_module("transformers.modeling_utils")
    masks: Any = importlib.import_module("transformers.masking_utils")
    attention.AttentionInterface.register(name, _attend)
    masks.AttentionMaskInterface.register(name, partial(_make_mask, whole_rows=True) if in_ring else _make_mask)
    # composite models have a config for each submodel
    for config in {id(child.config): child.config for child in module.modules() if hasattr(child, "config")}.values():
        if getattr(config, "_attn_implementation", "") == "sdpa":
            config._attn_implementation = name


def _make_mask(
    *, q_length: int, kv_length: int, local_size: int | None = None, whole_rows: bool = False, **options: Any
) -> torch.Tensor | None:
    """Returns the mask of one kind of layers, in place of ``sdpa_mask``.

    Args:
        q_length: S, tokens that ask.
        kv_length: tokens that are looked at; others than S under a cache.
        local_size: window in tokens.
        whole_rows: whether rows of one document, without a window, have a document mask.
        options: ``sdpa_mask``'s other arguments.
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    rows = _ROWS.get()
    own_masks = options.get("use_vmap") or options.get("attention_mask") is not None
    if rows is None or own_masks or q_length != kv_length:
        if rows is not None and rows.refusals is not None:
            rows.refusals.append("its code adds something of its own to the causal mask")
        return _plain_mask(masks, q_length, kv_length, local_size, options)
    window = local_size if local_size and local_size < q_length else 0
    if rows.bounds is None and not window and not whole_rows:
        # the causal kernel, which needs no mask; of a window as long as the row transformers would make one
        return _plain_mask(masks, q_length, kv_length, None, options)
    batch, device = options["batch_size"], options["device"]
    mask = pack_mask(rows.bounds or row_bounds(batch, q_length, device), window)
    if rows.refusals is not None:
        options["allow_is_causal_skip"] = False
        plain = _plain_mask(masks, q_length, kv_length, local_size, options)
        if plain is None or not torch.equal(plain.expand(batch, 1, -1, -1), dense_mask(mask, batch, q_length)):
            rows.refusals.append("its mask isn't causal within documents and windows alone")
    return mask


def _plain_mask(
    masks: Any, q_length: int, kv_length: int, local_size: int | None, options: dict[str, Any]
) -> torch.Tensor | None:
    local = {} if local_size is None else {"local_size": local_size}
    plain: torch.Tensor | None = masks.sdpa_mask(q_length=q_length, kv_length=kv_length, **local, **options)
    return plain


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention, in place of ``sdpa_attention_forward``.

    Args:
        module: the attention module.
        query: (B, H, S, E).
        key: (B, K, S, E).
        value: (B, K, S, E').
        attention_mask: a document mask, or what "sdpa" takes.
        dropout: of the attention weights.
        scaling: factor on the scores.
        options: of some families.

    Returns:
        (B, S, H, E'), and no attention weights.
    """
    if not is_packed_mask(attention_mask):
        plain: Any = importlib.import_module("transformers.integrations.sdpa_attention")
        return plain.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )  # type: ignore[no-any-return]
    assert attention_mask is not None
    if (rows := _ROWS.get()) is not None and rows.refusals is not None:
        rows.refusals += _kernel_refusals(query, value, dropout, options)
    return document_attention(query, key, value, attention_mask, scaling), None


_UNSUPPORTED = {
    "softcap": "it caps its attention scores",
    "position_bias": "it adds a bias to its attention scores",
    "s_aux": "its softmax has attention sinks",
}


def _kernel_refusals(query: torch.Tensor, value: torch.Tensor, dropout: float, options: dict[str, Any]) -> list[str]:
    """Returns what one call of a trial asks for that the kernel can't do."""
    refusals = [reason for key, reason in _UNSUPPORTED.items() if options.get(key) is not None]
    if dropout:
        refusals.append(f"it drops attention weights (p = {dropout:g})")
    if options.get("is_causal") is False:
        refusals.append("some of its attention isn't causal")
    return refusals
