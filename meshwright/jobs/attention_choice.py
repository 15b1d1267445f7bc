"""Chooses how a training attends: by documents with a kernel of variable lengths, or as the model's own code does."""

from __future__ import annotations

import dataclasses

from meshwright.errors import ConfigError
from meshwright.models.analysis.document_masks import varlen_refusal
from meshwright.models.attention import VARLEN
from meshwright.models.build import BuiltModel
from meshwright.models.sizes import WINDOWS
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import ModelAnalysis

_KERNEL_PRECISIONS = ("bf16", "fp16")


def choose_attention(
    built: BuiltModel, layout: Layout, analysis: ModelAnalysis, kind: str, documents: bool, sequence: int
) -> tuple[BuiltModel, str]:
    """Chooses the attention of a run.

    Args:
        built: the model, on meta.
        layout: that it will run under.
        analysis: of the model for the layout.
        kind: of the devices, ``cpu`` or ``cuda``.
        documents: whether documents of a row are kept apart, and the text has several.
        sequence: tokens a row, S.

    Returns:
        The model, with ``varlen`` as its config's attention where that was chosen; and a line for the run's header, ""
        where neither documents nor windows need a mask.

    Raises:
        ConfigError: ``model.attention = varlen`` was asked for and can't be.
    """
    asked = built.config.attention == VARLEN
    if not asked and (
        built.config.attention != "auto" or kind != "cuda" or not _needs_mask(built, documents, sequence)
    ):
        return built, ""
    refusal = _refusal(built, layout, analysis, kind)
    if asked and refusal:
        raise ConfigError(f"model.attention = varlen: {refusal}; set model.attention = auto")
    if refusal:
        return built, f"with a mask (B, 1, S, S), not by documents: {refusal}"
    chosen = dataclasses.replace(built, config=dataclasses.replace(built.config, attention=VARLEN))
    kernel = "torch's kernel for variable lengths" if kind == "cuda" else "the kernel's reference, which is slow"
    return chosen, f"by documents and windows, without a mask: {kernel}"


def _needs_mask(built: BuiltModel, documents: bool, sequence: int) -> bool:
    """Returns whether a row's attention is more than causal: it has documents, or windows shorter than itself."""
    if documents or built.hf_config is None:
        return documents
    fields = built.hf_config.get_text_config(decoder=True).to_dict()
    return any(isinstance(window := fields.get(key), int) and 0 < window < sequence for key in WINDOWS)


def _refusal(built: BuiltModel, layout: Layout, analysis: ModelAnalysis, kind: str) -> str:
    if kind == "cuda" and layout.precision not in _KERNEL_PRECISIONS:
        return f"the kernel computes in {' and '.join(_KERNEL_PRECISIONS)}, not in {layout.precision}"
    if analysis.attention == "gather":
        return "attention=gather cuts the mask for each rank's tokens"
    return varlen_refusal(built)
