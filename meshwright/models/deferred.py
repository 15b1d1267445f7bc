"""Deferred initialisation: any box of any weight, from one seed, without the rest of the weight.

A weight's value is a function of (seed, name, number of the operation, flat element index), so it is the same for any
layout and any number of ranks. Random operations are drawn in blocks of the row-major flattened weight, each from its
own generator; element-wise operations are replayed on the part that is asked for. What is no chain of element-wise
operations (tables made by arange, orthogonal matrices) is replayed whole for that one tensor and cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.recorder import Recording, TensorRef
from meshwright.models.replay import Replay

CHUNK = 1 << 20
"""Elements made at a time when a box takes only part of each row."""

Box = tuple[tuple[int, int], ...]
"""A hyper-rectangle of a tensor: (start, stop) for each dim."""


@dataclass
class InitRecipe:
    """How every parameter and buffer of one module came to be."""

    replay: Replay
    """The operations of its construction."""
    refs: dict[str, TensorRef] = field(default_factory=dict)
    """Parameters, buffers and plain tensor attributes, by dotted name; tied names share a ref."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that had real values already when the module was built."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter."""
    attributes: tuple[str, ...] = ()
    """Names that are neither parameter nor buffer."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a recorded tensor."""
        return tuple(self.constants[name].shape) if name in self.constants else self.refs[name].shape

    def whole_names(self) -> list[str]:
        """Names that can only be made whole and are then cut: what a rank pays more memory for."""
        return sorted(name for name, ref in self.refs.items() if not self.replay.by_runs(ref))


def recipe_of(module: nn.Module, recording: Recording) -> InitRecipe:
    """Reads a module built under `record`, and moves whatever of it is real to the meta device.

    Args:
        module: the module; its parameters and buffers are on meta afterwards.
        recording: what `record` yielded.

    Returns:
        The recipe; names are those of ``named_parameters(remove_duplicate=False)`` and ``named_buffers``.
    """
    recipe = InitRecipe(Replay(recording))
    groups: dict[int, list[str]] = {}
    moved: dict[int, torch.Tensor] = {}
    attributes = []
    for path, child in module.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(child).items() if isinstance(value, torch.Tensor)}
        for kind, tensors in ((0, child._parameters), (1, child._buffers), (2, plain)):
            for key, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                attributes += [name] if kind == 2 else []
                if tensor.is_meta:
                    ref = recipe.refs[name] = recording.ref(tensor)
                    recipe.replay.labels.setdefault(ref.storage, name)
                else:
                    recipe.constants[name] = tensor.detach()
                    if id(tensor) not in moved:
                        meta = tensor.detach().to("meta")
                        moved[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if kind == 0 else meta
                    if kind == 2:
                        setattr(child, key, moved[id(tensor)])
                    else:
                        tensors[key] = moved[id(tensor)]
                    tensor = moved[id(tensor)]
                if kind == 0:
                    groups.setdefault(id(tensor), []).append(name)
    recipe.ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    recipe.attributes = tuple(attributes)
    return recipe


def materialise_tensor(
    recipe: InitRecipe, name: str, seed: int, *, box: Box | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Makes one box of one weight.

    Args:
        recipe: from `recipe_of` (or `build_meta`).
        name: dotted name of a parameter or buffer.
        seed: seed of the weights.
        box: (start, stop) for each dim of the global tensor; None for all of it.
        dtype: result type; values are made in the type that the module was built with and then cast, so that runs in
            float64 and float32 start from the same numbers.

    Returns:
        A contiguous CPU tensor with the box's sizes.

    Raises:
        KeyError: for a name that the module hasn't.
    """
    shape = recipe.shape(name)
    box = tuple((0, size) for size in shape) if box is None else tuple(box)
    if name in recipe.constants:
        return _cut(recipe.constants[name], box).to(dtype=dtype, device="cpu", copy=True).contiguous()
    ref = recipe.refs[name]
    size = [max(0, stop - start) for start, stop in box]
    if 0 in size:
        return torch.empty(size, dtype=dtype or ref.dtype)
    if not recipe.replay.by_runs(ref):
        return _cut(recipe.replay.whole(ref, seed), box).to(dtype or ref.dtype).contiguous()
    return _boxed(recipe.replay, ref, seed, box).to(dtype or ref.dtype)


def materialise_buffers(module: nn.Module, recipe: InitRecipe, seed: int, device: torch.device | str) -> None:
    """Gives every buffer, persistent or not, and every plain tensor attribute its value, after ``to_empty``.

    Args:
        module: the module of the recipe, or a part of it that kept its names (FSDP2 keeps them).
        recipe: from `recipe_of`.
        seed: seed of the weights.
        device: where buffers that are still on meta go.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(child).items() if isinstance(value, torch.Tensor)}
        for key, tensor in [*child._buffers.items(), *plain.items()]:
            name = f"{path}.{key}" if path else key
            if tensor is None or (name not in recipe.refs and name not in recipe.constants):
                continue
            value = materialise_tensor(recipe, name, seed, dtype=tensor.dtype)
            if tensor.is_meta or key in plain:
                value = value.to(device)
                if key in plain:
                    setattr(child, key, value)
                else:
                    child._buffers[key] = value
            else:
                with torch.no_grad():
                    tensor.copy_(value)


def materialise(module: nn.Module, recipe: InitRecipe, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Makes a whole module real on one device, in the types that the module has: one rank without sharding.

    Returns:
        The same module, ties kept.
    """
    kinds = {name: tensor.dtype for name, tensor in module.named_parameters(remove_duplicate=False)}
    module.to_empty(device=device)
    retie(module, recipe.ties)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(materialise_tensor(recipe, name, seed, dtype=kinds[name]))
    materialise_buffers(module, recipe, seed, device)
    return module


def retie(module: nn.Module, ties: tuple[tuple[str, ...], ...]) -> None:
    """Makes the names of each group one parameter again; ``to_empty`` gives each name its own.

    Args:
        module: module that holds the names; a group with names that it lacks (another stage) is skipped.
        ties: groups of names, `InitRecipe.ties`.
    """
    for names in ties:
        owners = []
        for name in names:
            path, _, key = name.rpartition(".")
            try:
                owners.append((module.get_submodule(path), key))
            except AttributeError:
                continue
        first = owners[0][0]._parameters[owners[0][1]] if owners else None
        for owner, key in owners[1:]:
            owner._parameters[key] = first


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def _boxed(replay: Replay, ref: TensorRef, seed: int, box: Box) -> torch.Tensor:
    """Fills a box run by run: ``cut`` is the last dim that the box doesn't take whole."""
    shape = ref.shape
    partial = [dim for dim, (start, stop) in enumerate(box) if (start, stop) != (0, shape[dim])]
    cut = partial[-1] if partial else 0
    inner = math.prod(shape[cut + 1 :])
    out = torch.empty([stop - start for start, stop in box], dtype=ref.dtype)
    if cut == 0 or not shape:
        first, last = box[0] if shape else (0, 1)
        out.view(-1).copy_(replay.run(ref, seed, first * inner, last * inner))
        return out
    row = shape[cut] * inner
    (start, stop), per = box[cut], max(1, CHUNK // row)
    rows_first, rows_last = box[cut - 1]
    target = out.view(-1, rows_last - rows_first, stop - start, inner)
    for outer, index in enumerate(np.ndindex(*[last - first for first, last in box[: cut - 1]])):
        base = 0
        for dim, step in enumerate(index):
            base = base * shape[dim] + box[dim][0] + step
        base *= shape[cut - 1]
        for low in range(rows_first, rows_last, per):
            high = min(low + per, rows_last)
            if per == 1:
                run = replay.run(ref, seed, (base + low) * row + start * inner, (base + low) * row + stop * inner)
                target[outer, low - rows_first] = run.view(stop - start, inner)
            else:
                run = replay.run(ref, seed, (base + low) * row, (base + high) * row)
                part = run.view(high - low, shape[cut], inner)[:, start:stop]
                target[outer, low - rows_first : high - rows_first] = part
    return out


def check_complete(module: nn.Module, recipe: InitRecipe) -> None:
    """Refuses a module with weights that the recipe can't make.

    Raises:
        ConfigError: naming them; they were on the meta device before the module's own construction began.
    """
    lost = [name for name, ref in recipe.refs.items() if ref.numel and not recipe.replay.made(ref)]
    if lost:
        raise ConfigError(
            f"{len(lost)} tensors of the model have no recorded origin ({', '.join(lost[:3])}, ...): they were made on "
            "the meta device outside the model's function; build them inside it"
        )
