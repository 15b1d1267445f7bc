"""Deferred initialisation: any box of any weight, from one seed, without the rest of the weight.

A weight's value is a function of (seed, name, number of the operation, flat element index), so it is the same for any
layout and any number of ranks. Random operations are drawn in blocks of `BLOCK` elements of the row-major flattened
weight, each from its own generator; element-wise operations are replayed on the part that is asked for. What is no
chain of element-wise operations (tables made by arange, orthogonal matrices) is replayed whole for that one tensor.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.errors import ConfigError
from meshwright.models.recorder import Op, Recording, TensorRef

BLOCK = 1 << 16
"""Elements drawn from one generator; changing it changes every initial weight."""
CHUNK = 1 << 20
"""Elements made at a time when a box takes only part of each row."""

Box = tuple[tuple[int, int], ...]
"""A hyper-rectangle of a tensor: (start, stop) for each dim."""

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_DRAWN = {"randn": "normal", "randn_like": "normal", "rand": "uniform", "rand_like": "uniform"}
_COPIES = {"clone", "_to_copy", "copy_"}
_POINTWISE = {
    *("abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "cos", "div", "erfinv", "exp", "expm1", "floor", "log"),
    *("log1p", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "rsub", "sigmoid", "sign", "sin", "softplus"),
    *("sqrt", "square", "sub", "tanh"),
}
_OVERWRITES = {"fill_", "zero_", "normal_", "uniform_", "copy_", "trunc_normal_"}


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation on a flat run of a storage: elements [start, start + count)."""

    kind: str
    """``fill``, ``normal``, ``uniform``, ``truncated``, ``apply``, ``copy`` (another storage) or ``constant``."""
    start: int
    count: int
    order: int
    dtype: torch.dtype
    values: tuple[float, ...] = ()
    op: Op | None = None
    source: TensorRef | None = None
    constant: torch.Tensor | None = None


@dataclass
class Recipe:
    """How every parameter and buffer of one module came to be."""

    recording: Recording
    """The operations of its construction."""
    refs: dict[str, TensorRef]
    """Parameters, buffers and plain tensor attributes, by dotted name; tied names share a ref."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that had real values already when the module was built."""
    labels: dict[int, str] = field(default_factory=dict)
    """Storage to the first parameter or buffer name that uses it."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter."""
    attributes: tuple[str, ...] = ()
    """Names in ``refs`` and ``constants`` that are neither parameter nor buffer."""
    _programs: dict[tuple[int, int], list[_Step] | None] = field(default_factory=dict)
    _blocks: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a recorded tensor."""
        return tuple(self.constants[name].shape) if name in self.constants else self.refs[name].shape

    def whole_names(self) -> list[str]:
        """Names that can only be made whole and are then cut: what a rank pays more memory for."""
        return sorted(name for name, ref in self.refs.items() if self.program(ref.storage, len(self.recording.ops)) is None)

    def program(self, storage: int, before: int) -> list[_Step] | None:
        """Returns the element-wise steps that fill a storage up to an operation, None when there are no such."""
        key = (storage, before)
        if key not in self._programs:
            self._programs[key] = _compile(self, storage, before)
        return self._programs[key]


def recipe_of(module: nn.Module, recording: Recording) -> Recipe:
    """Reads a module built under `record`, and moves whatever of it is real to the meta device.

    Args:
        module: the module; its parameters and buffers are on meta afterwards.
        recording: what `record` yielded.

    Returns:
        The recipe; names are those of ``named_parameters(remove_duplicate=False)`` and ``named_buffers``.
    """
    recipe = Recipe(recording, {})
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
                    recipe.labels.setdefault(ref.storage, name)
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
    recipe: Recipe, name: str, seed: int, *, box: Box | None = None, dtype: torch.dtype | None = None
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
    steps = recipe.program(ref.storage, len(recipe.recording.ops)) if ref.is_flat else None
    if steps is None:
        return _cut(_replay_whole(recipe, ref, len(recipe.recording.ops), seed), box).to(dtype or ref.dtype).contiguous()
    return _boxed(recipe, ref, steps, seed, box).to(dtype or ref.dtype)


def materialise_buffers(module: nn.Module, recipe: Recipe, seed: int, device: torch.device | str) -> None:
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


def materialise(module: nn.Module, recipe: Recipe, seed: int, device: torch.device | str = "cpu") -> nn.Module:
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
        ties: groups of names, `Recipe.ties`.
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


def _boxed(recipe: Recipe, ref: TensorRef, steps: list[_Step], seed: int, box: Box) -> torch.Tensor:
    """Fills a box run by run: ``cut`` is the last dim that the box doesn't take whole."""
    shape = ref.shape
    partial = [dim for dim, (start, stop) in enumerate(box) if (start, stop) != (0, shape[dim])]
    cut = partial[-1] if partial else 0
    inner = math.prod(shape[cut + 1 :])
    out = torch.empty([stop - start for start, stop in box], dtype=ref.dtype)
    if cut == 0 or not shape:
        first, last = box[0] if shape else (0, 1)
        out.view(-1).copy_(_flat(recipe, steps, seed, ref, first * inner, last * inner))
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
                run = _flat(recipe, steps, seed, ref, (base + low) * row + start * inner, (base + low) * row + stop * inner)
                target[outer, low - rows_first] = run.view(stop - start, inner)
            else:
                run = _flat(recipe, steps, seed, ref, (base + low) * row, (base + high) * row)
                part = run.view(high - low, shape[cut], inner)[:, start:stop]
                target[outer, low - rows_first : high - rows_first] = part
    return out


def _flat(recipe: Recipe, steps: list[_Step], seed: int, ref: TensorRef, low: int, high: int) -> torch.Tensor:
    """Returns elements [low, high) of a flat ref."""
    return _run(recipe, steps, seed, ref.storage, low + ref.offset, high + ref.offset, ref.dtype)


def _run(
    recipe: Recipe, steps: list[_Step], seed: int, storage: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    """Replays the steps of a storage on its elements [low, high)."""
    out = torch.zeros(high - low, dtype=dtype)
    label = recipe.labels.get(storage, f"#{storage}")
    for step in steps:
        first, last = max(low, step.start), min(high, step.start + step.count)
        if first >= last:
            continue
        part, a, b = out[first - low : last - low], first - step.start, last - step.start
        if step.kind == "fill":
            part.fill_(step.values[0])
        elif step.kind == "constant":
            assert step.constant is not None
            part.copy_(step.constant.reshape(-1)[a:b])
        elif step.kind == "copy":
            assert step.source is not None
            source = recipe.program(step.source.storage, step.order)
            assert source is not None
            part.copy_(_flat(recipe, source, seed, step.source, a, b))
        elif step.kind == "apply":
            assert step.op is not None
            part.copy_(step.op.func(part.clone(), *step.op.args[1:], **step.op.kwargs))
        else:
            for block in range(a // BLOCK, (b - 1) // BLOCK + 1):
                drawn = _draw(recipe, step, (seed, label, step.order, block))
                begin, end = max(a, block * BLOCK), min(b, block * BLOCK + len(drawn))
                part[begin - a : end - a] = drawn[begin - block * BLOCK : end - block * BLOCK]
    return out


def _generator(key: tuple[Any, ...]) -> np.random.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def _draw(recipe: Recipe, step: _Step, key: tuple[Any, ...]) -> torch.Tensor:
    """Draws one block; the last block of each operation is kept, since neighbouring runs share it.

    NumPy draws rather than torch: torch's CPU generator takes 32 bits of a seed and its vectorised normal differs
    between instruction sets, while ranks on unlike machines must get the same bits.
    """
    kept = recipe._blocks.get(key)
    if kept is not None:
        return kept
    count = min(BLOCK, step.count - key[3] * BLOCK)
    kind = np.float64 if step.dtype == torch.float64 else np.float32
    generator = _generator(key)
    if step.kind == "normal":
        values = generator.standard_normal(count, dtype=kind) * kind(step.values[1]) + kind(step.values[0])
    elif step.kind == "uniform":
        low, high = step.values
        values = generator.random(count, dtype=kind) * kind(high - low) + kind(low)
    else:
        values = _truncated(generator, count, *step.values).astype(kind)
    if len(recipe._blocks) > 8:
        recipe._blocks.clear()
    recipe._blocks[key] = torch.from_numpy(np.ascontiguousarray(values, dtype=kind))
    return recipe._blocks[key]


def _truncated(generator: np.random.Generator, count: int, mean: float, std: float, a: float, b: float) -> np.ndarray:
    """Normal values kept to [a, b], by the inverse of the distribution function in float64.

    Source: torch.nn.init.trunc_normal_ up to torch 2.11 (after R. Burkardt, "The Truncated Normal Distribution").
    """
    low, high = ((1.0 + math.erf((edge - mean) / (std * math.sqrt(2.0)))) / 2.0 for edge in (a, b))
    uniform = generator.random(count) * (high - low) + low
    values = torch.special.ndtri(torch.from_numpy(uniform)).numpy() * std + mean
    return np.clip(values, a, b)


def _compile(recipe: Recipe, storage: int, before: int) -> list[_Step] | None:
    """Turns a storage's operations into steps; None when one of them isn't element-wise on a flat run."""
    steps: list[_Step] = []
    size = recipe.recording.sizes[storage][0]
    for op in recipe.recording.ops[:before]:
        for target in (*op.fresh, *op.writes):
            if target is None or target.storage != storage:
                continue
            made = _steps_of(recipe, op, target)
            if made is None:
                if op.name not in _OVERWRITES or target.numel != size:
                    steps.append(_Step("whole", 0, size, op.order, target.dtype))
                    continue
                return None
            if op.name in _OVERWRITES and target.numel == size:
                steps.clear()
            steps.extend(made)
    return None if any(step.kind == "whole" for step in steps) else steps


def _steps_of(recipe: Recipe, op: Op, target: TensorRef) -> list[_Step] | None:
    """Returns the steps of one operation on its target, None when it can't be done run by run."""
    if not target.is_flat or target.dtype != recipe.recording.sizes[target.storage][1]:
        return None
    where = (target.offset, target.numel, op.order, target.dtype)
    name, others = op.name, op.args[1:]
    if name in _EMPTY:
        return []
    if name in _FILLED or name == "zero_":
        return [_Step("fill", *where, (_FILLED.get(name, 0.0),))]
    if name in ("full", "new_full", "full_like"):
        value = op.args[1] if name != "new_full" else op.args[2]
        return [_Step("fill", *where, (value,))]
    if name == "fill_" and not isinstance(others[0], TensorRef):
        return [_Step("fill", *where, (others[0].item() if isinstance(others[0], torch.Tensor) else others[0],))]
    if name in _DRAWN:
        return [_Step(_DRAWN[name], *where, (0.0, 1.0))]
    if name in ("normal_", "uniform_"):
        values = tuple(float(value) for value in others) + (0.0, 1.0)[len(others) :]
        return [_Step(name[:-1], *where, values)] if not op.kwargs.get("generator") else None
    if name == "trunc_normal_":
        bound = inspect.signature(op.func).bind(*op.args, **op.kwargs)
        bound.apply_defaults()
        return [_Step("truncated", *where, tuple(float(bound.arguments[key]) for key in ("mean", "std", "a", "b")))]
    return _pointwise_steps(recipe, op, target, where)


def _pointwise_steps(recipe: Recipe, op: Op, target: TensorRef, where: Any) -> list[_Step] | None:
    """Copies of, and element-wise functions of, one tensor of the same sizes and numbers."""
    name = op.name
    in_place = bool(op.writes)
    if name in _COPIES:
        source = op.args[1] if in_place else op.args[0]
        copied = _source_step(recipe, source, target, where)
        return None if copied is None else [copied]
    if name.removesuffix("_") not in _POINTWISE or _holds_tensor((op.args[1:], op.kwargs)):
        return None
    if in_place:
        return [_Step("apply", *where, op=op)]
    copied = _source_step(recipe, op.args[0], target, where)
    return None if copied is None or op.args[0].dtype != target.dtype else [copied, _Step("apply", *where, op=op)]


def _source_step(recipe: Recipe, source: Any, target: TensorRef, where: Any) -> _Step | None:
    if isinstance(source, torch.Tensor):
        same = tuple(source.shape) == target.shape
        return _Step("constant", *where, constant=source) if same else None
    if source.shape != target.shape or not source.is_flat or recipe.program(source.storage, where[2]) is None:
        return None
    return _Step("copy", *where, source=source)


def _holds_tensor(values: Any) -> bool:
    found: list[Any] = []
    tree_map_only((TensorRef, torch.Tensor), found.append, values)
    return bool(found)


def _replay_whole(recipe: Recipe, ref: TensorRef, before: int, seed: int) -> torch.Tensor:
    """Replays every operation that the tensor depends on, on real CPU tensors, and returns the tensor."""
    wanted = _slice_ops(recipe, ref.storage, before)
    real: dict[int, torch.Tensor] = {}

    def view(item: TensorRef) -> torch.Tensor:
        if item.storage not in real:
            size, dtype = recipe.recording.sizes[item.storage]
            real[item.storage] = torch.zeros(size, dtype=dtype)
        base = real[item.storage]
        base = base if base.dtype == item.dtype else base.view(item.dtype)
        return base.as_strided(item.shape, item.stride, item.offset)

    state = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            for op in wanted:
                _replay_op(recipe, op, seed, view)
    finally:
        torch.random.set_rng_state(state)
    return view(ref)


def _replay_op(recipe: Recipe, op: Op, seed: int, view: Any) -> None:
    targets = [item for item in (*op.writes, *op.fresh) if item is not None]
    steps = _steps_of(recipe, op, targets[0]) if op.name in (*_DRAWN, "normal_", "uniform_", "trunc_normal_") else None
    if steps:  # the same draws as in the run-by-run way
        target = targets[0]
        values = _run(recipe, steps, seed, target.storage, target.offset, target.offset + target.numel, target.dtype)
        view(target).copy_(values.view(target.shape))
        return
    label = recipe.labels.get(targets[0].storage, f"#{targets[0].storage}")
    torch.default_generator.manual_seed(int(_generator((seed, label, op.order)).integers(1 << 63)))
    args, kwargs = tree_map_only(TensorRef, view, (op.args, op.kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = op.func(*args, **kwargs)
    outputs = out if isinstance(out, (tuple, list)) else [out]
    for item, value in zip(op.fresh, outputs):
        if item is not None:
            view(item).copy_(value)


def _slice_ops(recipe: Recipe, storage: int, before: int) -> list[Op]:
    """Returns, in order, the operations that a storage's content before an operation depends on."""
    by_storage: dict[int, list[Op]] = {}
    for op in recipe.recording.ops:
        for item in (*op.fresh, *op.writes):
            if item is not None:
                by_storage.setdefault(item.storage, []).append(op)
    wanted: dict[int, Op] = {}
    todo, reached = [(storage, before)], {}
    while todo:
        current, limit = todo.pop()
        if reached.get(current, -1) >= limit:
            continue
        reached[current] = limit
        for op in by_storage.get(current, []):
            if op.order < limit and op.order not in wanted:
                wanted[op.order] = op
                inputs: list[TensorRef] = []
                tree_map_only(TensorRef, inputs.append, (op.args, op.kwargs))
                todo.extend((item.storage, op.order) for item in inputs)
    return [wanted[order] for order in sorted(wanted)]


def check_complete(module: nn.Module, recipe: Recipe) -> None:
    """Refuses a module with weights that the recipe can't make.

    Raises:
        ConfigError: naming them; they were on the meta device before the module's own construction began.
    """
    made: set[int] = {item.storage for op in recipe.recording.ops for item in op.fresh if item is not None}
    lost = [name for name, ref in recipe.refs.items() if ref.storage not in made and ref.numel]
    if lost:
        raise ConfigError(
            f"{len(lost)} tensors of the model have no recorded origin ({', '.join(lost[:3])}, ...): they were made on "
            "the meta device outside the model's function; build them inside it"
        )


def summary(recipe: Recipe) -> Mapping[str, int]:
    """Returns the recipe's sizes: tensors, recorded operations, tensors that are made whole."""
    return {
        "tensors": len(recipe.refs) + len(recipe.constants),
        "operations": len(recipe.recording.ops),
        "whole": len(recipe.whole_names()),
    }
