"""Tests on a small clone whether an architecture keeps the documents of a row apart."""

from __future__ import annotations

import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import realise_model
from meshwright.models.analysis.objective import nothing_dropped
from meshwright.models.analysis.small_config import shrink_config, with_every_kind
from meshwright.models.attention import announce_rows, use_varlen
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.forward import model_forward
from meshwright.parallel.document_attention import DocumentBounds, document_bounds
from meshwright.parallel.float64_ops import Float64Ops

_VOCAB, _ROW, _WALL = 64, 24, 11


def check_documents(built: BuiltModel) -> None:
    """Refuses document masks for a model in which they don't hold.

    A clone of two narrow layers (for a function: nothing is run, its forward must take ``position_ids``) reads two
    documents in a row; when the first is changed, the logits of the second must not move.

    Raises:
        ConfigError: with the reason, and the advice to set ``data.mask_documents = false``.
    """
    check_positions(built)
    if built.config.kind == "function":
        return
    try:
        moved = document_leak(built.config)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise ConfigError(_refusal(built.config.name, f"a small clone doesn't run in float64: {reason}")) from error
    if moved > 1e-9:
        raise ConfigError(_refusal(built.config.name, f"a second document's logits move by {moved:.1e} with the first"))


def check_positions(built: BuiltModel) -> None:
    """Refuses document masks for a model whose forward takes no positions.

    Raises:
        ConfigError: with the advice to set ``data.mask_documents = false``.
    """
    if not built.structure.takes_positions:
        raise ConfigError(_refusal(built.config.name, "its forward takes no position_ids"))


def document_leak(config: ModelConfig) -> float:
    """Returns by how much the logits of a second document move when the first changes, in float64 on a small clone.

    Args:
        config: a model type or directory.
    """
    built = build_meta(shrink_config(config), _VOCAB, 2 * _ROW)
    module = realise_model(built, lambda name, _: built.tensor(name)).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(_VOCAB, (2, _ROW), generator=generator)
    changed_tokens = tokens.clone()
    # every token of the first document changes, none of the second
    changed_tokens[:, :_WALL] = (changed_tokens[:, :_WALL] + 7) % _VOCAB
    row_positions = torch.cat([torch.arange(_WALL), torch.arange(_ROW - _WALL)])
    positions = torch.stack([row_positions, row_positions])
    with torch.no_grad():
        logits, changed_logits = (
            model_forward(module, built.structure, rows, positions, True) for rows in (tokens, changed_tokens)
        )
    return float((logits - changed_logits)[:, _WALL:].abs().max())


def _refusal(name: str, reason: str) -> str:
    """Words the refusal."""
    return (
        f"the model '{name}' can't keep the documents of a row apart: {reason}; set data.mask_documents = false, or "
        "data.packing = single, which puts one in a row"
    )


def varlen_refusal(built: BuiltModel) -> str:
    """Returns why a model can't attend by documents (`models.attention`); "" when it can.

    A clone's masks are compared element by element with those that the kernel would apply, and its logits, in float64
    with the reference of the kernel, with those of the model's own attention: with documents, and with whole rows.

    Args:
        built: the model, on meta.
    """
    if built.hf_config is None:
        return "its attention is its own code, not transformers'"
    own_attention = getattr(built.hf_config.get_text_config(decoder=True), "_attn_implementation", "")
    if own_attention != "sdpa":
        return f"its attention is transformers' '{own_attention}'"
    small = with_every_kind(built, shrink_config(built.config))
    clone = build_meta(small, _VOCAB, 2 * _ROW)
    module = realise_model(clone, lambda name, _: clone.tensor(name))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(_VOCAB, (2, _ROW), generator=generator)
    first_row = torch.cat([torch.arange(size) for size in (1, _WALL + 2, _ROW - _WALL - 3)])
    second_row = torch.cat([torch.arange(size) for size in (_WALL, _ROW - _WALL)])
    documents = torch.stack([first_row, second_row]) if built.structure.takes_positions else None
    # Training, since a model may drop attention weights there; what else it drops isn't dropped here.
    module.train()

    def logits(positions: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad(), nothing_dropped(), Float64Ops():
            return model_forward(module, clone.structure, tokens, positions, positions is not None)

    own_logits = [logits(positions) for positions in (documents, None)]
    use_varlen(module)
    refusals: list[str] = []
    for positions, own in zip((documents, None), own_logits):
        bounds: DocumentBounds | None = None if positions is None else document_bounds(positions)
        try:
            with announce_rows(bounds, refusals):
                difference = float((logits(positions) - own).abs().max())
        except Exception as error:  # code of any family, which gets a mask of another form
            return f"its code takes no other mask than its own ({str(error)[:100]})"
        if not difference <= 1e-9 * float(own.abs().max()):
            refusals.append(f"its logits differ by {difference:.1e} from those of its own attention")
    return refusals[0] if refusals else ""
