"""Tests on a small clone whether an architecture keeps the documents of a row apart."""

from __future__ import annotations

import torch

from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import realise_model
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.forward import model_forward

_VOCAB, _ROW, _WALL = 64, 24, 11


def check_documents(built: BuiltModel) -> None:
    """Refuses document masks for a model in which they don't hold.

    A clone of two narrow layers (for a function: nothing is run, its forward must take ``position_ids``) reads two
    documents in a row; when the first is changed, the logits of the second must not move.

    Raises:
        ConfigError: with the reason, and the advice to set ``data.mask_documents = false``.
    """
    if not built.structure.takes_positions:
        raise ConfigError(_refusal(built.config.name, "its forward takes no position_ids"))
    if built.config.kind == "function":
        return
    moved = document_leak(built.config)
    if moved > 1e-9:
        raise ConfigError(_refusal(built.config.name, f"a second document's logits move by {moved:.1e} with the first"))


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
    return f"the model '{name}' can't keep the documents of a row apart: {reason}; set data.mask_documents = false"
