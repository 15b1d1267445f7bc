"""Weights of a local directory in Hugging Face format, a slice at a time."""

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
from meshwright.names import plain_name
from meshwright.records import parse_json


@dataclass(frozen=True, slots=True)
class _Origin:
    """What one parameter is made from."""

    keys: tuple[tuple[str, str], ...]
    """(pattern, key in the files), in the order that a conversion wants."""
    converter: Any | None
    """transformers' conversion, None for a plain copy."""
    target: str
    """First name that the conversion gives."""


class SafetensorsSource:
    """Reads boxes of a module's parameters from the safetensors files of a directory.

    Only headers are read when it is made; `read` maps a file and copies the box alone. Checkpoints that store a weight
    in another form than the module (an expert a file entry, fused projections, other names) go through transformers'
    own conversions, one parameter at a time.
    """

    def __init__(self, directory: Path, module: nn.Module) -> None:
        """Reads the headers and matches every key.

        Args:
            directory: holds ``model.safetensors`` or ``model.safetensors.index.json`` with its files.
            module: the model on meta.

        Raises:
            CheckpointError: for missing or damaged files, and for missing, foreign or wrongly sized weights, listed.
        """
        self.directory = directory
        self._files = _index(directory)
        self._module = module
        self._ties = _tied_names(module)
        self._tensors = dict(module.named_parameters(remove_duplicate=False)) | _persistent_buffers(module)
        self._origins = self._match()
        self._check()

    def __contains__(self, name: str) -> bool:
        """True when the files hold the parameter or buffer, under its own name or a tied one."""
        return self._resolve(name) is not None

    def read(self, name: str, box: Box | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads one box of one parameter.

        Args:
            name: dotted parameter or buffer name in the module.
            box: (start, stop) for each dim; None for all of it.
            dtype: result type; None keeps the file's.

        Returns:
            A contiguous CPU tensor.

        Raises:
            CheckpointError: when the files don't hold it or can't be read.
        """
        found = self._resolve(name)
        if found is None:
            raise CheckpointError(f"{self.directory} holds no weight '{name}'")
        origin = self._origins[found]
        if origin.converter is None:
            value = self._slice(origin.keys[0][1], box)
        else:
            value = self._convert(origin, found)
            value = value if box is None else value[tuple(slice(start, stop) for start, stop in box)]
        return value.to(dtype or value.dtype).contiguous()

    def _resolve(self, name: str) -> str | None:
        return next((other for other in (name, *self._ties.get(name, ())) if other in self._origins), None)

    def _slice(self, key: str, box: Box | None) -> torch.Tensor:
        try:
            with safe_open(self._files[key], framework="pt") as file:
                if box is None or not box:
                    return file.get_tensor(key)
                return file.get_slice(key)[tuple(slice(start, stop) for start, stop in box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read '{key}' from {self._files[key]}: {error}") from error

    def _convert(self, origin: _Origin, name: str) -> torch.Tensor:
        converter: Any = deepcopy(origin.converter)
        for pattern, key in origin.keys:
            converter.add_tensor(origin.target, key, pattern, self._slice(key, None))
        made = converter.convert(origin.target, model=self._module, config=self._module.config)
        value = made[name]
        return value[0] if isinstance(value, list) else value

    def _match(self) -> dict[str, _Origin]:
        """Maps every parameter name to the keys that it is made from."""
        rename, converters = _conversions(self._module)
        wanted = self._tensors
        collected: dict[str, list[tuple[str, str]]] = {}
        plain: dict[str, _Origin] = {}
        self._foreign: list[str] = []
        for key in sorted(self._files, key=_natural):
            target, pattern = rename(key)
            if target not in wanted and key in wanted:
                target, pattern = key, None
            if target not in wanted:
                self._foreign.append(key)
            elif pattern is None:
                plain[target] = _Origin(((key, key),), None, target)
            else:
                collected.setdefault(target, []).append((pattern, key))
        for target, keys in collected.items():
            converter = converters[keys[0][0]]
            for name in _outputs(converter, target, wanted):
                plain[name] = _Origin(tuple(keys), converter, target)
        return plain

    def _check(self) -> None:
        ignored = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ()
        foreign = [key for key in self._foreign if not any(re.search(pattern, key) for pattern in ignored)]
        missing = [name for name in self._tensors if self._resolve(name) is None]
        allowed = getattr(self._module, "_keys_to_ignore_on_load_missing", None) or ()
        missing = [name for name in missing if not any(re.search(pattern, name) for pattern in allowed)]
        if missing or foreign:
            raise CheckpointError(
                f"{self.directory} does not fit the model: {len(missing)} missing{_some(missing)}; "
                f"{len(foreign)} foreign{_some(foreign)}; its config.json must describe the same model as its files"
            )
        for name, origin in self._origins.items():
            if origin.converter is None:
                key = origin.keys[0][1]
                with safe_open(self._files[key], framework="pt") as file:
                    found = tuple(file.get_slice(key).get_shape())
                if found != tuple(self._tensors[name].shape):
                    raise CheckpointError(
                        f"{self.directory}: '{key}' is {found}, the model's '{name}' is "
                        f"{tuple(self._tensors[name].shape)}; its config.json states other sizes than its files"
                    )


def _index(directory: Path) -> dict[str, Path]:
    """Returns the file of every key; reads headers, so a missing or truncated file shows at once."""
    listing = directory / "model.safetensors.index.json"
    if listing.is_file():
        try:
            named = dict(parse_json(listing.read_text(encoding="utf-8"))["weight_map"])
            asked = set(named.values())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{listing} is damaged: {error}; fetch or export it again") from error
        files = sorted(directory / plain_name(file, listing, CheckpointError) for file in asked)
    else:
        named, files = None, [directory / "model.safetensors"]
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing; only safetensors weights are read") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch or export it again") from error
    lost = sorted(set(named or ()) - set(found))
    if lost:
        raise CheckpointError(f"{listing} lists {len(lost)} weights that its files lack{_some(lost)}")
    return found


def _conversions(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' renaming of one key to (name, pattern), and its conversions by pattern."""
    if not hasattr(module, "base_model_prefix"):
        return (lambda key: (key, None)), {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(module)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    state, prefix = module.state_dict(), module.base_model_prefix

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state:
            plain, _ = rename_source_key(key, [], [], prefix, state)
            if plain in state:
                return plain, None
        return name, pattern

    return rename, {pattern: item for item in converters for pattern in item.source_patterns}


def _outputs(converter: Any, target: str, wanted: Iterable[str]) -> list[str]:
    """Names that one conversion yields: the target, and its siblings when it splits."""
    names = {target}
    for pattern in converter.target_patterns:
        if pattern in target:
            names |= {target.replace(pattern, other) for other in converter.target_patterns}
    return [name for name in names if name in wanted]


def _tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names if len(names) > 1}


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f" ({shown})" if names else ""
