"""Deferred initialisation: computes any box of any weight from one seed, without the other elements of the weight.

A weight's value is a function of (seed, name, number of the operation, flat element index), so it is the same for any
layout and any number of ranks. Random operations are drawn in blocks of the row-major flattened weight, each from its
own generator; element-wise operations are replayed on the requested run of elements. A weight that isn't a chain of
element-wise operations (tables by arange, orthogonal matrices) is replayed in full and then cut.
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
from meshwright.parallel.weights import view_box

CHUNK = 1 << 20
"""Elements computed at a time when a box has only a range of each row."""

Box = tuple[tuple[int, int], ...]
"""A hyper-rectangle of a tensor: (start, stop) for each dim."""


@dataclass
class InitRecipe:
    """The recorded initialisation of every parameter and buffer of one module."""

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
        """Returns the sizes of a recorded tensor."""
        return tuple(self.constants[name].shape) if name in self.constants else self.refs[name].shape


def recipe_of(module: nn.Module, recording: Recording) -> InitRecipe:
    """Reads a module built under `record`, and moves its real tensors to the meta device.

    Args:
        module: the module; its parameters and buffers are on meta afterwards.
        recording: the recording that `record` yielded.

    Returns:
        The recipe; names are those of ``named_parameters(remove_duplicate=False)`` and ``named_buffers``.
    """
    recipe = InitRecipe(Replay(recording))
    groups: dict[int, list[str]] = {}
    meta_copies: dict[int, torch.Tensor] = {}
    values_of_copies: dict[int, torch.Tensor] = {}
    attributes = []
    for path, child in module.named_modules(remove_duplicate=False):
        attribute_tensors = {key: value for key, value in vars(child).items() if isinstance(value, torch.Tensor)}
        # 0: parameters, 1: buffers, 2: plain attributes, which to_empty() doesn't move and named_buffers() doesn't list
        for tensor_kind, tensors in ((0, child._parameters), (1, child._buffers), (2, attribute_tensors)):
            for key, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                attributes += [name] if tensor_kind == 2 else []
                if id(tensor) in values_of_copies:
                    # its module has two names, and its tensors were moved under the first
                    recipe.constants[name] = values_of_copies[id(tensor)]
                # the first name of a storage is the address of its random draws: the same on every rank
                elif tensor.is_meta:
                    ref = recipe.refs[name] = recording.ref(tensor)
                    recipe.replay.labels.setdefault(ref.storage, name)
                else:
                    recipe.constants[name] = tensor.detach()
                    # a tied weight must stay one object
                    if id(tensor) not in meta_copies:
                        meta_tensor = tensor.detach().to("meta")
                        meta_copies[id(tensor)] = (
                            nn.Parameter(meta_tensor, tensor.requires_grad) if tensor_kind == 0 else meta_tensor
                        )
                    if tensor_kind == 2:
                        setattr(child, key, meta_copies[id(tensor)])
                    else:
                        tensors[key] = meta_copies[id(tensor)]
                    tensor = meta_copies[id(tensor)]
                    values_of_copies[id(tensor)] = recipe.constants[name]
                if tensor_kind == 0:
                    groups.setdefault(id(tensor), []).append(name)
    recipe.ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    recipe.attributes = tuple(attributes)
    return recipe


def materialise_tensor(
    recipe: InitRecipe, name: str, seed: int, *, box: Box | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Computes one box of one weight.

    Args:
        recipe: from `recipe_of` (or `build_meta`).
        name: dotted name of a parameter or buffer.
        seed: seed of the weights.
        box: (start, stop) for each dim of the global tensor; None for the full tensor.
        dtype: result type; values are computed in the type that the module was built with and then cast, so that runs
            in float64 and float32 start from the same numbers.

    Returns:
        A contiguous CPU tensor with the box's sizes.

    Raises:
        KeyError: for a name that the module hasn't.
    """
    shape = recipe.shape(name)
    box = tuple((0, box_size) for box_size in shape) if box is None else tuple(box)
    if name in recipe.constants:
        return view_box(recipe.constants[name], box).to(dtype=dtype, device="cpu", copy=True).contiguous()
    ref = recipe.refs[name]
    box_size = [max(0, stop - start) for start, stop in box]
    if 0 in box_size:
        return torch.empty(box_size, dtype=dtype or ref.dtype)
    # an operation mixes elements: compute the full tensor and cut it
    if not recipe.replay.by_runs(ref):
        return view_box(recipe.replay.full_tensor(ref, seed), box).to(dtype or ref.dtype).contiguous()
    return _materialise_box(recipe.replay, ref, seed, box).to(dtype or ref.dtype)


def materialise_buffers(module: nn.Module, recipe: InitRecipe, seed: int, device: torch.device | str) -> None:
    """Sets the value of every buffer, persistent or not, and of every plain tensor attribute, after ``to_empty``.

    Args:
        module: the recipe's module, or a submodule with unchanged names (FSDP2 keeps them).
        recipe: from `recipe_of`.
        seed: seed of the weights.
        device: of buffers that are still on meta.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        attribute_tensors = {key: value for key, value in vars(child).items() if isinstance(value, torch.Tensor)}
        for key, tensor in [*child._buffers.items(), *attribute_tensors.items()]:
            name = f"{path}.{key}" if path else key
            if tensor is None or (name not in recipe.refs and name not in recipe.constants):
                continue
            value = materialise_tensor(recipe, name, seed, dtype=tensor.dtype)
            # a plain attribute isn't moved by to_empty, so it is replaced
            if tensor.is_meta or key in attribute_tensors:
                value = value.to(device)
                if key in attribute_tensors:
                    setattr(child, key, value)
                else:
                    child._buffers[key] = value
            else:
                with torch.no_grad():
                    tensor.copy_(value)


def materialise(module: nn.Module, recipe: InitRecipe, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Computes all weights of a module on one device, in the module's types: one rank without sharding.

    Returns:
        The same module, ties kept.
    """
    dtypes = {name: tensor.dtype for name, tensor in module.named_parameters(remove_duplicate=False)}
    module.to_empty(device=device)
    retie(module, recipe.ties)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(materialise_tensor(recipe, name, seed, dtype=dtypes[name]))
    materialise_buffers(module, recipe, seed, device)
    return module


def retie(module: nn.Module, ties: tuple[tuple[str, ...], ...]) -> None:
    """Ties the names of each group to one parameter again; ``to_empty`` gives each name its own.

    Args:
        module: module with these names; a group with names that it lacks (another stage) is skipped.
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
        shared_parameter = owners[0][0]._parameters[owners[0][1]] if owners else None
        for owner, key in owners[1:]:
            owner._parameters[key] = shared_parameter


def _materialise_box(replay: Replay, ref: TensorRef, seed: int, box: Box) -> torch.Tensor:
    """Fills a box run by run; ``cut_dim`` is the last dim of which the box has only a range.

    Returns:
        A tensor with the box's sizes, in the recorded type.
    """
    shape = ref.shape
    partial_dims = [dim for dim, (start, stop) in enumerate(box) if (start, stop) != (0, shape[dim])]
    cut_dim = partial_dims[-1] if partial_dims else 0
    inner = math.prod(shape[cut_dim + 1 :])
    out = torch.empty([stop - start for start, stop in box], dtype=ref.dtype)
    # the box is one contiguous run
    if cut_dim == 0 or not shape:  # also of a scalar, which is a run of one element
        start_0, stop_0 = box[0] if shape else (0, 1)
        out.view(-1).copy_(replay.run(ref, seed, start_0 * inner, stop_0 * inner))
        return out
    # narrow rows are computed whole, many at a time, and cut; wide ones one by one, the box alone
    row_elements = shape[cut_dim] * inner
    (start, stop), rows_per_chunk = box[cut_dim], max(1, CHUNK // row_elements)
    row_start, row_stop = box[cut_dim - 1]
    target = out.view(-1, row_stop - row_start, stop - start, inner)
    for outer_index, index in enumerate(np.ndindex(*[stop_0 - start_0 for start_0, stop_0 in box[: cut_dim - 1]])):
        # row-major index of the box's row in the dims before cut_dim
        base_row = 0
        for dim, outer_step in enumerate(index):
            base_row = base_row * shape[dim] + box[dim][0] + outer_step
        base_row *= shape[cut_dim - 1]
        for low in range(row_start, row_stop, rows_per_chunk):
            high = min(low + rows_per_chunk, row_stop)
            if rows_per_chunk == 1:
                elements = replay.run(
                    ref,
                    seed,
                    (base_row + low) * row_elements + start * inner,
                    (base_row + low) * row_elements + stop * inner,
                )
                target[outer_index, low - row_start] = elements.view(stop - start, inner)
            else:
                elements = replay.run(ref, seed, (base_row + low) * row_elements, (base_row + high) * row_elements)
                columns = elements.view(high - low, shape[cut_dim], inner)[:, start:stop]
                target[outer_index, low - row_start : high - row_start] = columns
    return out


def check_complete(module: nn.Module, recipe: InitRecipe) -> None:
    """Refuses a module with weights that the recipe can't compute.

    Raises:
        ConfigError: naming them; they were on the meta device before the module's own construction began.
    """
    orphans = [name for name, ref in recipe.refs.items() if ref.numel and not recipe.replay.has_origin(ref)]
    if orphans:
        raise ConfigError(
            f"{len(orphans)} tensors of the model have no recorded origin ({', '.join(orphans[:3])}, ...): they were "
            "made on the meta device outside the model's function; build them inside it"
        )
