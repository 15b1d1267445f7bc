"""Reads weights of a local directory in Hugging Face format, one slice at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from meshwright.errors import CheckpointError
from meshwright.models.deferred import Box
from meshwright.models.hugging_face import (
    WeightConverter,
    WeightRenaming,
    get_model_conversion_mapping,
    rename_source_key,
)
from meshwright.names import plain_name
from meshwright.records import parse_json

_FULL_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored tensors, by safetensors' names, whose values are the weights themselves."""
_DEQUANTISED = {
    "mxfp4": "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))",
    "fp8": "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))",
}
"""How transformers loads full weights of a method that doesn't need another package for it."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The stored tensors of one parameter, and the conversion that builds it from them."""

    keys: tuple[tuple[str, str], ...]
    """(pattern, key in the files), in the conversion's order."""
    converter: Any | None
    """transformers' conversion, None for a plain copy."""
    target: str
    """First name that the conversion yields."""


class SafetensorsSource:
    """Reads boxes of a module's parameters from the safetensors files of a directory.

    Only headers are read at construction; `read` maps a file and copies the box alone. Checkpoints that store a weight
    in another form than the module (an expert a file entry, fused projections, other names) go through transformers'
    own conversions, one parameter at a time.
    """

    def __init__(self, directory: Path, module: nn.Module) -> None:
        """Reads the headers and matches every key.

        Args:
            directory: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
            module: the model on meta.

        Raises:
            CheckpointError: for missing or damaged files, and for missing, foreign or wrongly sized weights, listed.
        """
        self.directory = directory
        self._files = _index_files(directory)
        self._module = module
        self._ties = _tied_names(module)
        self._tensors = dict(module.named_parameters(remove_duplicate=False)) | _persistent_buffers(module)
        self._origins = self._match_keys()
        self._check_complete()

    def __contains__(self, name: str) -> bool:
        """Returns whether the files store the parameter or buffer, under its own name or a tied one."""
        return self._stored_name(name) is not None

    def read(self, name: str, box: Box | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads one box of one parameter.

        Args:
            name: dotted parameter or buffer name in the module.
            box: (start, stop) for each dim; None for the full tensor.
            dtype: result type; None keeps the file's.

        Returns:
            A contiguous CPU tensor with the box's sizes.

        Raises:
            CheckpointError: when the files don't store it or can't be read.
        """
        stored_name = self._stored_name(name)
        if stored_name is None:
            raise CheckpointError(f"{self.directory} holds no weight '{name}'")
        origin = self._origins[stored_name]
        if origin.converter is None:
            value = self._read_box(origin.keys[0][1], box)
        else:
            # a conversion yields the full parameter, of which the box is cut
            value = self._run_conversion(origin, stored_name)
            value = value if box is None else value[tuple(slice(start, stop) for start, stop in box)]
        return value.to(dtype or value.dtype).contiguous()

    def _stored_name(self, name: str) -> str | None:
        """Returns the name under which a parameter or one of its ties is stored, None without one."""
        return next((alias for alias in (name, *self._ties.get(name, ())) if alias in self._origins), None)

    def _read_box(self, key: str, box: Box | None) -> torch.Tensor:
        """Reads a box of one stored tensor: a CPU tensor with the box's sizes, in the file's type."""
        try:
            with safe_open(self._files[key], framework="pt") as file:
                if box is None or not box:
                    return file.get_tensor(key)
                return file.get_slice(key)[tuple(slice(start, stop) for start, stop in box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read '{key}' from {self._files[key]}: {error}") from error

    def _run_conversion(self, origin: _Origin, name: str) -> torch.Tensor:
        # a converter collects tensors in itself, so each parameter needs a fresh one
        """Builds one full parameter from its stored tensors by transformers' conversion."""
        converter: Any = deepcopy(origin.converter)
        for pattern, key in origin.keys:
            converter.add_tensor(origin.target, key, pattern, self._read_box(key, None))
        converted = converter.convert(origin.target, model=self._module, config=self._module.config)
        value = converted[name]
        return value[0] if isinstance(value, list) else value

    def _match_keys(self) -> dict[str, _Origin]:
        """Maps every parameter name to the stored tensors that it is built from."""
        rename, converters = _conversions(self._module)
        module_tensors = self._tensors
        keys_by_target: dict[str, list[tuple[str, str]]] = {}
        origins: dict[str, _Origin] = {}
        self._foreign: list[str] = []
        for key in sorted(self._files, key=_natural_sort_key):
            target, pattern = rename(key)
            # the key is a name of the module already, so its renaming doesn't apply
            if target not in module_tensors and key in module_tensors:
                target, pattern = key, None
            if target not in module_tensors:
                self._foreign.append(key)
            elif pattern is None:
                origins[target] = _Origin(((key, key),), None, target)
            else:
                keys_by_target.setdefault(target, []).append((pattern, key))
        for target, keys in keys_by_target.items():
            converter = converters[keys[0][0]]
            for name in _conversion_outputs(converter, target, module_tensors):
                origins[name] = _Origin(tuple(keys), converter, target)
        return origins

    def _check_complete(self) -> None:
        """Refuses files with missing, foreign or wrongly sized weights."""
        ignored_patterns = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ()
        foreign = [key for key in self._foreign if not any(re.search(pattern, key) for pattern in ignored_patterns)]
        missing = [name for name in self._tensors if self._stored_name(name) is None]
        optional_patterns = getattr(self._module, "_keys_to_ignore_on_load_missing", None) or ()
        # transformers lists parameters that checkpoints of the family may lack
        missing = [name for name in missing if not any(re.search(pattern, name) for pattern in optional_patterns)]
        self._check_full_types(foreign, is_partial=bool(missing or foreign))
        if missing or foreign:
            raise CheckpointError(
                f"{self.directory} does not fit the model: {len(missing)} missing{_examples(missing)}; "
                f"{len(foreign)} foreign{_examples(foreign)}; its config.json must describe the same model as its files"
            )
        # shapes of converted parameters are known only after the conversion
        for name, origin in self._origins.items():
            if origin.converter is None:
                key = origin.keys[0][1]
                with safe_open(self._files[key], framework="pt") as file:
                    stored_shape = tuple(file.get_slice(key).get_shape())
                if stored_shape != tuple(self._tensors[name].shape):
                    raise CheckpointError(
                        f"{self.directory}: '{key}' is {stored_shape}, the model's '{name}' is "
                        f"{tuple(self._tensors[name].shape)}; its config.json states other sizes than its files"
                    )

    def _check_full_types(self, foreign: list[str], is_partial: bool) -> None:
        """Refuses quantised weights, whose numbers are no weights without scales that nothing here applies.

        Args:
            foreign: keys of the files that the module doesn't have.
            is_partial: whether the files lack weights of the module, or have others.
        """
        own = [
            key
            for name, origin in self._origins.items()
            if self._tensors[name].is_floating_point()
            for _, key in origin.keys
        ]
        types = _stored_types(self._files, {*own, *foreign})
        quantised = [f"{key} of {dtype}" for key, dtype in types.items() if dtype not in _FULL_TYPES]
        method = quantisation_method(self.directory)
        if quantised or (method and is_partial):
            cure = _DEQUANTISED.get(method, "from_pretrained(...).dequantize()")
            raise CheckpointError(
                f"{self.directory} holds quantised weights{f' ({method})' if method else ''}, of which training needs "
                f"the full values{_examples(quantised or foreign)}; load them in transformers by {cure}, save them "
                "elsewhere by save_pretrained, and give that directory"
            )


def _stored_types(files: dict[str, Path], keys: set[str]) -> dict[str, str]:
    """Returns the type of each of these keys by safetensors' name, from the headers of their files."""
    types: dict[str, str] = {}
    for path in sorted({files[key] for key in keys}):
        with safe_open(path, framework="pt") as file:
            types |= {key: file.get_slice(key).get_dtype() for key in file.keys() if key in keys}  # noqa: SIM118
    return types


def quantisation_method(directory: Path) -> str:
    """Returns the method of a directory's ``quantization_config``, "" without one."""
    try:
        stated = parse_json((directory / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(stated.get("quant_method", "")) if isinstance(stated, dict) else ""


def _index_files(directory: Path) -> dict[str, Path]:
    """Returns the file of every key; reads headers, so a missing or truncated file shows at once."""
    listing = directory / "model.safetensors.index.json"
    if listing.is_file():
        try:
            listed_keys = dict(parse_json(listing.read_text(encoding="utf-8"))["weight_map"])
            listed_files = set(listed_keys.values())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{listing} is damaged: {error}; fetch or export it again") from error
        files = sorted(directory / plain_name(file, listing, CheckpointError) for file in listed_files)
    else:
        listed_keys, files = None, [directory / "model.safetensors"]
    file_of_key: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                # headers alone: no tensor is read here
                file_of_key |= dict.fromkeys(reader.keys(), file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing; only safetensors weights are read") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch or export it again") from error
    # the index may list weights of a file that was truncated or replaced
    unstored_keys = sorted(set(listed_keys or ()) - set(file_of_key))
    if unstored_keys:
        raise CheckpointError(
            f"{listing} lists {len(unstored_keys)} weights that its files lack{_examples(unstored_keys)}"
        )
    return file_of_key


def _conversions(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' renaming of one key to (name, pattern), and its conversions by pattern."""
    if not hasattr(module, "base_model_prefix"):
        return (lambda key: (key, None)), {}
    mapping = get_model_conversion_mapping(module)
    renamings = [value for value in mapping if isinstance(value, WeightRenaming)]
    converters = [value for value in mapping if isinstance(value, WeightConverter)]
    state, prefix = module.state_dict(), module.base_model_prefix

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state:
            # without the family's rules: only the base-model prefix is added or removed
            plain, _ = rename_source_key(key, [], [], prefix, state)
            if plain in state:
                return plain, None
        return name, pattern

    return rename, {pattern: item for item in converters for pattern in item.source_patterns}


def _conversion_outputs(converter: Any, target: str, module_names: Iterable[str]) -> list[str]:
    """Returns the names that one conversion yields: the target, and its siblings when it splits."""
    names = {target}
    for pattern in converter.target_patterns:
        if pattern in target:
            names |= {target.replace(pattern, sibling) for sibling in converter.target_patterns}
    return [name for name in names if name in module_names]


def _tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the names of each tied parameter by each of its names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names if len(names) > 1}


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a state dict contains, by name."""
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _natural_sort_key(key: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders numbers in a dotted name by value: experts.10 follows experts.9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _examples(names: list[str]) -> str:
    """Returns the first names in parentheses, "" for none."""
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f" ({shown})" if names else ""
