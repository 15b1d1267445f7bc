"""Builds a `ModelConfig` into a module on the meta device, with a way to compute any box of any of its weights."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.control_groups import available_bytes
from meshwright.errors import ConfigError, MeshwrightError, nearest
from meshwright.models.attention import VARLEN
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import (
    Box,
    InitRecipe,
    check_complete,
    materialise_buffers,
    materialise_tensor,
    recipe_of,
)
from meshwright.models.family import check_kernels, directory_config, family_config
from meshwright.models.hugging_face import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from meshwright.models.recorder import Recording, record
from meshwright.models.replay import Replay
from meshwright.models.structure import ModelStructure, read_structure
from meshwright.models.weight_checks import SPARSE, check_weights, makes_sparse_tensor, reads_values
from meshwright.models.weights import SafetensorsSource
from meshwright.units import format_bytes

GENERATION = "generation_config.json"
"""File in which transformers keeps how a model generates."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module on the meta device with its structure and the origin of its weights."""

    config: ModelConfig
    """The config that it was built from."""
    module: nn.Module
    """The module; every parameter and buffer is on meta, in float32 unless its code says otherwise."""
    recipe: InitRecipe
    """The recorded initialisation of its weights."""
    structure: ModelStructure
    """Its embedding, layers, norm and head by name."""
    source: SafetensorsSource | None
    """The directory's weights, None when they are drawn from the seed."""
    caching: tuple[Any, ...] = ()
    """Configs whose key-value cache was on before `without_cache`; an export turns it on again."""

    @property
    def hf_config(self) -> Any | None:
        """The transformers config, None for a module of another kind."""
        return getattr(self.module, "config", None) if is_transformers(self.module) else None

    @property
    def has_adapters(self) -> bool:
        """Whether it is a model of peft, which saves its adapters apart from the model that they are in."""
        module = self.module
        return bool(getattr(module, "peft_config", None)) and callable(getattr(module, "get_base_model", None))

    def save_config(self, folder: Path) -> None:
        """Writes the transformers config as it was before `without_cache`, to build the same architecture from.

        What a directory says of generation goes with it (tokens that end a text, sampling), unless weights are new.

        Args:
            folder: an existing directory.
        """
        config = self.hf_config
        assert config is not None
        # the exported architecture has its cache on, as its author published it
        for caching in self.caching:
            caching.use_cache = True
        try:
            config.save_pretrained(folder)
        finally:
            for caching in self.caching:
                caching.use_cache = False
        if self.config.kind == "directory" and not self.config.fresh:
            copy_generation_config(Path(self.config.name), folder)

    @property
    def vocab(self) -> int | None:
        """Vocabulary of the embedding, None where the structure knows no embedding."""
        return self.structure.vocab

    def tensor(self, name: str, box: Box | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Computes or reads one box of one parameter or buffer, on the CPU; the same bits on every rank.

        Args:
            name: dotted name.
            box: (start, stop) for each dim of the global tensor; None for the full tensor.
            dtype: result type; None keeps the type it was created in.

        Returns:
            A contiguous CPU tensor with the box's sizes.
        """
        if self.source is not None and name in self.source:
            return self.source.read(name, box, dtype)
        return materialise_tensor(self.recipe, name, self.config.seed, box=box, dtype=dtype)

    def fill_buffers(self, module: nn.Module, device: torch.device | str) -> None:
        """Sets the values of buffers and plain tensor attributes after ``to_empty``, as `materialise_buffers` does."""
        materialise_buffers(module, self.recipe, self.config.seed, device)
        if self.source is None:
            return
        # a checkpoint's persistent buffers win over recorded ones
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
        context: tokens in a row of the data; used where the config is silent, and checked against a directory's.
        weights: False leaves a directory's weights alone and reads its config only; they come from elsewhere.

    Raises:
        ConfigError: for a name, size or override that doesn't work.
        CheckpointError: for a directory whose weights are missing, foreign or of other sizes.
    """
    config.check()
    prepare = _function_factory if config.kind == "function" else _transformers_factory
    build = prepare(config, vocab, context)
    module, recording = _record_model(build, config)
    recipe = recipe_of(module, recording)
    check_complete(module, recipe)
    structure = read_structure(module)
    _check_sizes(config, structure, vocab, context)
    loads = weights and config.kind == "directory" and not config.fresh
    source = SafetensorsSource(Path(config.name), module) if loads else None
    return BuiltModel(config, module, recipe, structure, source, without_cache(module))


def check_function(config: ModelConfig) -> None:
    """Refuses a function's name that isn't one, and a size that it has no parameter for; nothing is built.

    Raises:
        ConfigError: with the nearest name, or the function's parameters.
    """
    config.check()
    _function_factory(config, None, None)


def _record_model(build: Callable[[], nn.Module], config: ModelConfig) -> tuple[nn.Module, Recording]:
    """Returns a model on the meta device and how it was made; of one whose code reads values, its real weights.

    Raises:
        ConfigError: it can be built neither way.
    """
    # nothing is computed: the recording replays the construction later, box by box
    with record(config.seed) as recording:
        recording.replayed = lambda tensor: Replay(recording).full_tensor(tensor, config.seed)
        try:
            return _checked_model(build(), config), recording
        except MeshwrightError:
            raise
        except Exception as error:
            # The text of a KeyError is its key alone.
            named = f"KeyError: {error}" if isinstance(error, KeyError) else error
            reason = SPARSE if makes_sparse_tensor(error) else named
            refusal = ConfigError(f"model '{config.name}' can't be built on the meta device: {reason}")
            if config.kind != "function" or not reads_values(error):
                raise refusal from error
            cause = error
    # At most, up to where it failed: what was freed meanwhile counts too.
    needed = sum(size * dtype.itemsize for size, dtype in recording.sizes.values())
    if needed > (available := available_bytes()):
        raise ConfigError(
            f"{refusal}; its code reads the values of weights, so that all of it must be made in memory, which takes "
            f"up to {format_bytes(needed)} of {format_bytes(available)}; nearest that works: make it once, save it "
            "with save_pretrained, and load that in the function"
        ) from cause
    try:
        return _build_real(build, config), Recording()
    except MeshwrightError:
        raise
    except Exception:
        # What failed first: the function may have changed what it finds now.
        raise refusal from cause


def _build_real(build: Callable[[], nn.Module], config: ModelConfig) -> nn.Module:
    """Returns a model with all its weights in memory, drawn from the seed; the caller's random numbers stay."""
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    # A decomposition's last bits depend on how many compute it, and ranks are forked from a process without threads.
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(config.seed)
    try:
        return _checked_model(build(), config)
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)


def _checked_model(module: object, config: ModelConfig) -> nn.Module:
    """Returns what a model's function returned, initialised.

    Raises:
        ConfigError: it is no model, or has weights that can't be trained.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model '{config.name}' returned a {type(module).__name__}; it must return an nn.Module")
    check_weights(module, config.name)
    if is_transformers(module) and not getattr(module, "_is_hf_initialized", False):
        module.initialize_weights()
        module.tie_weights()
    return module


def copy_generation_config(source: Path, folder: Path) -> None:
    """Copies what a directory in Hugging Face format says of generation, where it does, in place of a default."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source / GENERATION, folder / GENERATION)


def is_transformers(module: nn.Module) -> bool:
    """Returns whether a module is a transformers model."""
    # without importing it: nobody has built a transformers model while it isn't loaded
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def without_cache(module: nn.Module) -> tuple[Any, ...]:
    """Turns the key-value cache off in a model's configs, in place; returns the configs in which it was on.

    Some families' forwards have no argument for it. Training never reads the cache, and a recomputed layer would find
    the keys of its first run in it. The model may lie in a module of other code: a wrapper, or adapters of peft.
    """
    inner_models: list[Any] = [child for child in module.modules() if is_transformers(child)]
    # composite models have a config for each submodel
    configs = [
        *(inner.config.get_text_config(decoder=True) for inner in inner_models),
        *(vars(child).get("config") for inner in inner_models for child in inner.modules()),
    ]
    caching_configs = tuple({id(config): config for config in configs if getattr(config, "use_cache", False)}.values())
    for config in caching_configs:
        config.use_cache = False
    return caching_configs


def use_float64(module: nn.Module) -> None:
    """Switches kernels without float64 support (grouped experts) to plain ones, in place, in wrapped models too."""
    for inner in module.modules():
        if is_transformers(inner) and hasattr(inner.config, "_experts_implementation"):
            inner.config._experts_implementation = "eager"  # type: ignore[union-attr]


def _transformers_factory(config: ModelConfig, vocab: int | None, context: int | None) -> Callable[[], nn.Module]:
    """Returns a function that builds a transformers model of the config."""
    config_of = directory_config if config.kind == "directory" else family_config
    hf_config = config_of(config, vocab, context)
    check_kernels(config.name, hf_config)
    # Imported ahead of the recording: what modules compute as they are imported would be in it, and move the addresses
    # of all random numbers. A family of another library has no entry.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    # Attention by documents is switched on where a layout is made true; until then the model runs as its author's.
    named = config.attention not in ("auto", VARLEN)
    attention_option = {"attn_implementation": config.attention} if named else {}

    def make_model() -> nn.Module:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, **attention_option)
        if getattr(model, "loss_type", "") is None:
            # transformers' own default, which it would use with a warning at the first call
            model.loss_type = "ForCausalLM"
        return model.train()

    return make_model


def _check_module_name(name: str, working_directory: str) -> None:
    """Refuses ``folder/mine.py:build``, a file where a module's name is wanted."""
    module_path, _, function = name.partition(":")
    if "/" not in module_path and not module_path.startswith(".") and not module_path.endswith(".py"):
        return
    path = os.path.relpath(module_path, working_directory).removesuffix(".py")
    # A file above the working directory has no name from it.
    dotted = "FOLDER.MODULE" if path.startswith("..") else path.strip(".").replace("/", ".")
    raise ConfigError(
        f"model.name = '{name}': a module is named with dots from {working_directory}, not as a file; write "
        f"{dotted}:{function}"
    )


def _function_factory(config: ModelConfig, vocab: int | None, context: int | None) -> Callable[[], nn.Module]:
    """Imports ``module.path:function`` and binds the sizes that it has parameters for."""
    module_path, _, name = config.name.partition(":")
    working_directory = os.getcwd()
    _check_module_name(config.name, working_directory)
    # as `python -m` would find the user's file
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        user_module = importlib.import_module(module_path)
    except ImportError as error:
        raise ConfigError(
            f"model.name = '{config.name}': can't import '{module_path}' from {working_directory}: {error}"
        ) from error
    function = getattr(user_module, name, None)
    if not callable(function):
        hint = nearest(name, [key for key in vars(user_module) if not key.startswith("_")])
        raise ConfigError(f"model.name = '{config.name}': '{module_path}' has no function '{name}'{hint}")
    parameters = inspect.signature(function).parameters
    takes_any = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())
    values = {"vocab": vocab, "context": context} | config.sizes | config.extra
    if config.dropout or "dropout" in parameters:
        values["dropout"] = config.dropout
    required_keys = set(config.sizes) | set(config.extra) | ({"dropout"} if config.dropout else set())
    for key in required_keys:
        if key not in parameters and not takes_any:
            raise ConfigError(f"model.{key} has no effect: {config.name} takes {', '.join(parameters) or 'nothing'}")
    if config.tie is not None:
        raise ConfigError(f"model.tie has no effect on the function {config.name}; drop it")
    # an optional size is dropped where the function has no parameter for it; a configured one is an error above
    bound_values = {
        key: value for key, value in values.items() if value is not None and (key in parameters or key in required_keys)
    }
    return lambda: function(**bound_values)


def _check_sizes(config: ModelConfig, structure: ModelStructure, vocab: int | None, context: int | None) -> None:
    """Refuses a vocabulary or a row length of the data that the model has no rows for."""
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
