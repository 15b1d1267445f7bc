"""Configures a model: its name, sizes and initial weights."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.models.sizes import SYNONYMS

SIZE_FIELDS = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "context", "experts")
"""Fields of `ModelConfig` that size a model; None means the preset, or what the caller hands to ``build_meta``."""
_OTHER_SIZES = ("word_embed_proj_dim", "vocab_size_per_layer_input", "dense_intermediate_size")
"""Attributes that follow a size field unless they are set, and may differ from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Config):
    """A model: a Hugging Face type with a size, a local directory, or a function that returns an nn.Module."""

    name: str = "llama"
    """A Hugging Face causal-LM type (``gpt2``, ``llama``, ``qwen3``, ``mixtral`` ...), a directory in Hugging Face
    format (its weights are loaded), or ``module.path:function`` returning an nn.Module that gives logits or a loss."""
    layers: int | None = None
    """Number of blocks; 4 when not given."""
    width: int | None = None
    """Size of the residual stream, D; 256 when not given."""
    heads: int | None = None
    """Query heads, H; width / 64 when not given, at least 4."""
    kv_heads: int | None = None
    """Key and value heads; as many as query heads when not given."""
    ffn: int | None = None
    """Hidden size of the feed-forward part, F; when not given 8/3 of the width (gated) or 4 times (plain)."""
    vocab: int | None = None
    """Vocabulary, V; that of the data when not given."""
    context: int | None = None
    """Longest sequence in tokens; that of the data when not given."""
    experts: int | None = None
    """Experts of each mixture layer, X; 4 when not given. An error for a dense family."""
    dropout: float = 0.0
    """Probability for every dropout of the family."""
    attention: Literal["auto", "varlen", "sdpa", "eager", "flex_attention", "flash_attention_2"] = "auto"
    """Attention kernel of a transformers model; auto is sdpa where the family has it, else eager, and on GPUs varlen
    where rows would need a mask and it can be. varlen attends by documents and windows without a mask, by torch's
    kernel for variable lengths on GPUs in bf16 or fp16."""
    overrides: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Any attribute of the family's transformers config; a string that parses as a TOML value is one."""
    sharding: dict[str, str] = field(default_factory=dict)
    """Rows of the sharding table that override what was read: a glob on weight names to ``whole``, ``columns`` or
    ``rows``; ``"model.layers.*.mlp.down_proj" = "whole"``."""
    seed: int = 1
    """Seed of the initial weights: the same weights for every layout and number of ranks."""
    tie: bool | None = None
    """Whether embedding and head are one weight; the family's own habit when not given."""
    fresh: bool = False
    """With a directory: take its architecture and make new weights; needed when a size field is set with it."""

    @property
    def kind(self) -> Literal["type", "directory", "function"]:
        """How ``name`` is to be read."""
        if Path(self.name).is_dir():
            return "directory"
        return "function" if ":" in self.name else "type"

    @property
    def sizes(self) -> dict[str, int]:
        """The size fields that are set."""
        return {key: getattr(self, key) for key in SIZE_FIELDS if getattr(self, key) is not None}

    @property
    def extra(self) -> dict[str, Any]:
        """``overrides`` with their strings parsed as TOML values where possible."""
        return {key: _toml_value(value) for key, value in self.overrides.items()}

    def check(self) -> None:
        """Checks the fields without building the model.

        Raises:
            ConfigError: for sizes below 1, heads that don't divide, a missing path, sizes on a directory.
        """
        if not self.name.strip():
            raise ConfigError(
                "model.name is empty; give a type such as llama, a local directory, or module.path:function"
            )
        for key, value in self.sizes.items():
            if value < 1:
                raise ConfigError(f"model.{key} = {value}; it must be 1 or more")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"model.seed = {self.seed}; torch takes whole numbers from -2^63 to 2^64 - 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout = {self.dropout}; it must lie in [0, 1)")
        # a head size that is set by hand needn't divide the width
        if self.width and self.heads and self.width % self.heads and "head_dim" not in self.overrides:
            raise ConfigError(
                f"model.width = {self.width} does not divide by model.heads = {self.heads}; choose a multiple, or set "
                "model.overrides.head_dim"
            )
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.heads = {self.heads} does not divide by model.kv_heads = {self.kv_heads}")
        if self.kind == "type" and ("/" in self.name or self.name.startswith(".")):
            raise ConfigError(f"model.name = '{self.name}': no such directory; give a local directory or a model type")
        if self.kind == "directory" and self.sizes and not self.fresh:
            raise ConfigError(
                f"model.{next(iter(self.sizes))} is set, but {self.name} has its own sizes and weights; "
                "drop it, or set model.fresh to build its architecture anew"
            )
        if self.fresh and self.kind != "directory":
            raise ConfigError("model.fresh has no effect without a directory; a type and a function are always fresh")
        if self.kind != "function":
            self._check_overrides()

    def _check_overrides(self) -> None:
        """Refuses overrides that contradict a size field, and those that nothing would follow."""
        extra = self.extra
        for name in ("dtype", "torch_dtype"):
            if name in extra:
                raise ConfigError(
                    f"model.overrides.{name} has no effect: weights are trained in the layout's precision, over "
                    "float32; write --layout precision=bf16"
                )
        for name, value in extra.items():
            # attention_dropout, resid_pdrop, layerdrop, ...: probabilities in every family
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "drop" in name and is_number and not 0.0 <= value <= 1.0:
                raise ConfigError(
                    f"model.overrides.{name} = {value}: it is a probability, from 0 to 1; model.dropout sets every "
                    "dropout of a family at once"
                )
        for size_field, value in self.sizes.items():
            for name in SYNONYMS[size_field]:
                if name in extra and name not in _OTHER_SIZES and extra[name] != value:
                    raise ConfigError(
                        f"model.{size_field} = {value}, and model.overrides.{name} = {extra[name]}: both are the same "
                        "size; drop one"
                    )


def _toml_value(value: Any) -> Any:
    """Returns a string parsed as a TOML value, unchanged where it is none."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return value
