"""A `ModelConfig` to a module on the meta device, with a way to make any part of any of its weights."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError, nearest
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import (
    Box,
    InitRecipe,
    check_complete,
    materialise_buffers,
    materialise_tensor,
    recipe_of,
)
from meshwright.models.recorder import record
from meshwright.models.structure import ModelStructure, read_structure
from meshwright.models.weights import SafetensorsSource


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module on the meta device and where its weights come from."""

    config: ModelConfig
    """What was asked for."""
    module: nn.Module
    """The module; every parameter and buffer is on meta, in float32 unless its code says otherwise."""
    recipe: InitRecipe
    """How its weights are initialised."""
    structure: ModelStructure
    """Its parts by name."""
    source: SafetensorsSource | None
    """The directory's weights, None when they are made from the seed."""
    caching: tuple[Any, ...] = ()
    """Configs that asked for a cache of keys before `without_cache`; an export says so again."""

    @property
    def hf_config(self) -> Any | None:
        """The transformers config, None for a module of another kind."""
        return getattr(self.module, "config", None) if is_transformers(self.module) else None

    def save_config(self, folder: Path) -> None:
        """Writes the transformers config as it was before `without_cache`, from which the same architecture is built.

        Args:
            folder: an existing directory.
        """
        config = self.hf_config
        assert config is not None
        for caching in self.caching:
            caching.use_cache = True
        try:
            config.save_pretrained(folder)
        finally:
            for caching in self.caching:
                caching.use_cache = False

    @property
    def vocab(self) -> int | None:
        """Vocabulary of the embedding, None where the structure knows no embedding."""
        return self.structure.vocab

    def tensor(self, name: str, box: Box | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Makes or reads one box of one parameter or buffer, on the CPU; the same bits on every rank.

        Args:
            name: dotted name.
            box: (start, stop) for each dim of the global tensor; None for all of it.
            dtype: result type; None keeps the type it was made in.
        """
        if self.source is not None and name in self.source:
            return self.source.read(name, box, dtype)
        return materialise_tensor(self.recipe, name, self.config.seed, box=box, dtype=dtype)

    def fill_buffers(self, module: nn.Module, device: torch.device | str) -> None:
        """Gives buffers and plain tensor attributes their values after ``to_empty``; see `materialise_buffers`."""
        materialise_buffers(module, self.recipe, self.config.seed, device)
        if self.source is None:
            return
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self.source:
                    buffer.copy_(self.source.read(name, None, buffer.dtype))


def build_meta(
    config: ModelConfig, vocab: int | None = None, context: int | None = None, weights: bool = True
) -> BuiltModel:
    """Builds the model on the meta device.

    Args:
        config: which model.
        vocab: vocabulary of the data; used where the config is silent, and checked against a directory's.
        context: tokens in a row of the data, likewise.
        weights: False leaves a directory's weights alone and reads its config only; they come from elsewhere.

    Raises:
        ConfigError: for a name, size or override that doesn't work.
        CheckpointError: for a directory whose weights are missing, foreign or of other sizes.
    """
    config.check()
    prepare = _function if config.kind == "function" else _transformers
    build = prepare(config, vocab, context)
    with record(config.seed) as recording:
        try:
            module = build()
        except MeshwrightError:
            raise
        except Exception as error:
            raise ConfigError(f"model '{config.name}' can't be built on the meta device: {error}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model '{config.name}' returned a {type(module).__name__}; it must return an nn.Module")
        if is_transformers(module) and not getattr(module, "_is_hf_initialized", False):
            module.initialize_weights()
            module.tie_weights()
    recipe = recipe_of(module, recording)
    check_complete(module, recipe)
    structure = read_structure(module)
    _check_sizes(config, structure, vocab, context)
    loads = weights and config.kind == "directory" and not config.fresh
    source = SafetensorsSource(Path(config.name), module) if loads else None
    return BuiltModel(config, module, recipe, structure, source, without_cache(module))


def is_transformers(module: nn.Module) -> bool:
    """True for a transformers model."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def without_cache(module: nn.Module) -> tuple[Any, ...]:
    """Lets forward build no cache of keys unless it is asked to, in place; returns the configs that said otherwise.

    Some families' forwards take no argument that says so. Training never reads the cache, and a recomputed layer would
    find in it what its first run left there.
    """
    if not is_transformers(module):
        return ()
    configs = [module.config.get_text_config(decoder=True), *(vars(part).get("config") for part in module.modules())]
    found = tuple({id(config): config for config in configs if getattr(config, "use_cache", False)}.values())
    for config in found:
        config.use_cache = False
    return found


def use_float64(module: nn.Module) -> None:
    """Switches kernels that know no float64 (grouped experts) to plain ones, in place."""
    if is_transformers(module) and hasattr(module.config, "_experts_implementation"):
        module.config._experts_implementation = "eager"


def _transformers(config: ModelConfig, vocab: int | None, context: int | None) -> Callable[[], nn.Module]:
    from transformers import AutoModelForCausalLM

    from meshwright.models.family import check_kernels, directory_config, family_config

    make = directory_config if config.kind == "directory" else family_config
    hf_config = make(config, vocab, context)
    check_kernels(config.name, hf_config)
    kernel = {} if config.attention == "auto" else {"attn_implementation": config.attention}

    def make_model() -> nn.Module:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, **kernel)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # what transformers takes then, with a warning at each first call
        return model.train()

    return make_model


def _function(config: ModelConfig, vocab: int | None, context: int | None) -> Callable[[], nn.Module]:
    """Imports ``module.path:function`` and binds the sizes that it takes."""
    path, _, name = config.name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(f"model.name = '{config.name}': can't import '{path}' from {here}: {error}") from error
    function = getattr(found, name, None)
    if not callable(function):
        hint = nearest(name, [key for key in vars(found) if not key.startswith("_")])
        raise ConfigError(f"model.name = '{config.name}': '{path}' has no function '{name}'{hint}")
    taken = inspect.signature(function).parameters
    anything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in taken.values())
    given = {"vocab": vocab, "context": context} | config.sizes | config.extra
    if config.dropout or "dropout" in taken:
        given["dropout"] = config.dropout
    wanted = set(config.sizes) | set(config.extra) | ({"dropout"} if config.dropout else set())
    for key in wanted:
        if key not in taken and not anything:
            raise ConfigError(f"model.{key} has no effect: {config.name} takes {', '.join(taken) or 'nothing'}")
    if config.tie is not None:
        raise ConfigError(f"model.tie has no effect on the function {config.name}; drop it")
    known = {key: item for key, item in given.items() if item is not None and (key in taken or key in wanted)}
    return lambda: function(**known)


def _check_sizes(config: ModelConfig, structure: ModelStructure, vocab: int | None, context: int | None) -> None:
    if vocab and structure.vocab and vocab > structure.vocab:
        raise ConfigError(
            f"the data's vocabulary of {vocab} is larger than the model's {structure.vocab}; set model.vocab to "
            f"{vocab} or more, or prepare the data with the model's tokenizer"
        )
    if context and structure.positions and context > structure.positions:
        raise ConfigError(
            f"rows of {context} tokens are longer than the model's {structure.positions} learned positions; shorten "
            f"the rows, or set model.context to {context}"
        )
