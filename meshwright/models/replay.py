"""Replays recorded initialisation on a run of elements of one tensor, or, where that can't be, on the whole of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from meshwright.models.random_init import BLOCK, draw, generator_at
from meshwright.models.recorder import Op, Recording, TensorRef

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
"""Operators that leave nothing of what a tensor held before."""


@dataclass(frozen=True, slots=True)
class _FlatOp:
    """One operation on a flat run of a storage: elements [start, start + count)."""

    kind: str
    """``fill``, ``normal``, ``uniform``, ``truncated``, ``apply``, ``copy`` (of another tensor) or ``constant``."""
    start: int
    count: int
    order: int
    dtype: torch.dtype
    values: tuple[float, ...] = ()
    """Parameters of a fill or a distribution."""
    payload: Any = None
    """The `Op` to apply, the `TensorRef` to copy, or the constant."""


class Replay:
    """A recording, made ready to give any part of any tensor in it."""

    def __init__(self, recording: Recording) -> None:
        """Sorts the operations by what they write.

        Args:
            recording: finished; nothing is added to it any more.
        """
        self.recording = recording
        self.labels: dict[int, str] = {}
        """Storage to the first name that uses it: part of the address of its random draws."""
        self._by_storage: dict[int, list[Op]] = {}
        for op in recording.ops:
            for storage in {item.storage for item in (*op.fresh, *op.writes) if item is not None}:
                self._by_storage.setdefault(storage, []).append(op)
        self._programs: dict[tuple[int, int], list[_FlatOp] | None] = {}
        self._blocks: dict[Any, torch.Tensor] = {}

    def made(self, ref: TensorRef) -> bool:
        """True when the recording holds the origin of the tensor."""
        writers = self._by_storage.get(ref.storage, ())
        return any(ref.storage == item.storage for op in writers for item in op.fresh if item)

    def by_runs(self, ref: TensorRef) -> bool:
        """True when any run of the tensor can be made without the rest."""
        return ref.is_flat and self._program(ref.storage, len(self.recording.ops)) is not None

    def run(self, ref: TensorRef, seed: int, low: int, high: int) -> torch.Tensor:
        """Returns elements [low, high) of a tensor for which `by_runs` holds, flat, in the type it was made in."""
        return self._flat(ref, len(self.recording.ops), seed, low, high)

    def whole(self, ref: TensorRef, seed: int) -> torch.Tensor:
        """Replays every operation that the tensor depends on, on real CPU tensors, and returns the tensor."""
        real: dict[int, torch.Tensor] = {}

        def view(item: TensorRef) -> torch.Tensor:
            if item.storage not in real:
                size, dtype = self.recording.sizes[item.storage]
                real[item.storage] = torch.zeros(size, dtype=dtype)
            base = real[item.storage]
            base = base if base.dtype == item.dtype else base.view(item.dtype)
            return base.as_strided(item.shape, item.stride, item.offset)

        state, threads = torch.random.get_rng_state(), torch.get_num_threads()
        torch.set_num_threads(1)  # the last bits of an orthogonal matrix depend on how many compute it
        try:
            with torch.no_grad():
                for op in self._needed(ref.storage, len(self.recording.ops)):
                    self._replay(op, seed, view)
        finally:
            torch.random.set_rng_state(state)
            torch.set_num_threads(threads)
        return view(ref)

    def _label(self, storage: int) -> str:
        return self.labels.get(storage, f"#{storage}")

    def _program(self, storage: int, before: int) -> list[_FlatOp] | None:
        """Steps that fill a storage up to an operation; None when one isn't element-wise on a flat run."""
        key = (storage, before)
        if key not in self._programs:
            self._programs[key] = self._compile(storage, before)
        return self._programs[key]

    def _compile(self, storage: int, before: int) -> list[_FlatOp] | None:
        steps: list[_FlatOp] = []
        size, possible = self.recording.sizes[storage][0], True
        for op in self._by_storage.get(storage, ()):
            if op.order >= before:
                break
            for target in (*op.fresh, *op.writes):
                if target is None or target.storage != storage:
                    continue
                made = self._steps(op, target)
                if op.name in _OVERWRITES and target.numel == size:
                    steps, possible = [], True
                possible = possible and made is not None
                steps.extend(made or ())
        return steps if possible else None

    def _steps(self, op: Op, target: TensorRef) -> list[_FlatOp] | None:
        """Steps of one operation on its target; None when it can't be done run by run."""
        if not target.is_flat or target.dtype != self.recording.sizes[target.storage][1]:
            return None
        simple = _simple_step(op, target)
        if simple is not None or op.name in _EMPTY:
            return [simple] if simple is not None else []
        where = (target.offset, target.numel, op.order, target.dtype)
        in_place = bool(op.writes)
        if op.name in _COPIES:
            copied = self._source(op.args[1] if in_place else op.args[0], target, op.order)
            return None if copied is None else [copied]
        if op.name.removesuffix("_") not in _POINTWISE or _holds_tensor((op.args[1:], op.kwargs)):
            return None
        apply = _FlatOp("apply", *where, payload=op)
        if in_place:
            return [apply]
        copied = self._source(op.args[0], target, op.order)
        return None if copied is None or op.args[0].dtype != target.dtype else [copied, apply]

    def _source(self, source: Any, target: TensorRef, order: int) -> _FlatOp | None:
        """The step that copies a tensor of the same sizes, recorded or real."""
        if tuple(source.shape) != target.shape:
            return None
        kind = "constant" if isinstance(source, torch.Tensor) else "copy"
        if kind == "copy" and (not source.is_flat or self._program(source.storage, order) is None):
            return None
        return _FlatOp(kind, target.offset, target.numel, order, target.dtype, payload=source)

    def _flat(self, ref: TensorRef, before: int, seed: int, low: int, high: int) -> torch.Tensor:
        steps = self._program(ref.storage, before)
        assert steps is not None, "asked for a run of a tensor that has none"
        return self._perform(steps, ref.storage, seed, low + ref.offset, high + ref.offset, ref.dtype)

    def _perform(
        self, steps: list[_FlatOp], storage: int, seed: int, low: int, high: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Performs steps on elements [low, high) of a storage."""
        out = torch.zeros(high - low, dtype=dtype)
        for step in steps:
            first, last = max(low, step.start), min(high, step.start + step.count)
            if first >= last:
                continue
            part, a, b = out[first - low : last - low], first - step.start, last - step.start
            if step.kind == "fill":
                part.fill_(step.values[0])
            elif step.kind == "constant":
                part.copy_(step.payload.reshape(-1)[a:b])
            elif step.kind == "copy":
                part.copy_(self._flat(step.payload, step.order, seed, a, b))
            elif step.kind == "apply":
                part.copy_(step.payload.func(part.clone(), *step.payload.args[1:], **step.payload.kwargs))
            else:
                self._fill_random(step, storage, seed, part, a, b)
        return out

    def _fill_random(self, step: _FlatOp, storage: int, seed: int, part: torch.Tensor, a: int, b: int) -> None:
        """Fills elements [a, b) of a random step from its blocks; the last blocks are kept, since runs share them."""
        for block in range(a // BLOCK, (b - 1) // BLOCK + 1):
            address = (seed, self._label(storage), step.order, block)
            drawn = self._blocks.get(address)
            if drawn is None:
                if len(self._blocks) > 4:
                    self._blocks.clear()
                count = min(BLOCK, step.count - block * BLOCK)
                drawn = self._blocks[address] = draw(step.kind, step.values, count, step.dtype, address)
            begin, end = max(a, block * BLOCK), min(b, block * BLOCK + len(drawn))
            part[begin - a : end - a] = drawn[begin - block * BLOCK : end - block * BLOCK]

    def _needed(self, storage: int, before: int) -> list[Op]:
        """Operations, in order, that a storage's content before an operation depends on."""
        wanted: dict[int, Op] = {}
        reached: dict[int, int] = {}
        todo = [(storage, before)]
        while todo:
            current, limit = todo.pop()
            if reached.get(current, -1) >= limit:
                continue
            reached[current] = limit
            for op in self._by_storage.get(current, ()):
                if op.order < limit and op.order not in wanted:
                    wanted[op.order] = op
                    inputs: list[TensorRef] = []
                    tree_map_only(TensorRef, inputs.append, (op.args, op.kwargs))
                    todo.extend((item.storage, op.order) for item in inputs)
        return [wanted[order] for order in sorted(wanted)]

    def _replay(self, op: Op, seed: int, view: Callable[[TensorRef], torch.Tensor]) -> None:
        """Performs one operation on real tensors; random ones draw what they draw run by run."""
        target = next(item for item in (*op.writes, *op.fresh) if item is not None)
        simple = _simple_step(op, target) if target.is_flat else None
        if simple is not None:
            end = target.offset + target.numel
            values = self._perform([simple], target.storage, seed, target.offset, end, target.dtype)
            view(target).copy_(values.view(target.shape))
            return
        address = (seed, self._label(target.storage), op.order)
        torch.default_generator.manual_seed(int(generator_at(address).integers(1 << 63)))
        args, kwargs = tree_map_only(TensorRef, view, (op.args, op.kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        out = op.func(*args, **kwargs)
        for item, value in zip(op.fresh, out if isinstance(out, (tuple, list)) else [out]):
            if item is not None:
                view(item).copy_(value)


def _simple_step(op: Op, target: TensorRef) -> _FlatOp | None:
    """The step of a fill or a draw, which read no tensor; None for another operation."""
    where = (target.offset, target.numel, op.order, target.dtype)
    name, others = op.name, op.args[1:]
    if name in _FILLED or name == "zero_":
        return _FlatOp("fill", *where, (_FILLED.get(name, 0.0),))
    if name in ("full", "new_full", "full_like"):
        return _FlatOp("fill", *where, (op.args[2] if name == "new_full" else op.args[1],))
    if name == "fill_" and not isinstance(others[0], TensorRef):
        return _FlatOp("fill", *where, (others[0].item() if isinstance(others[0], torch.Tensor) else others[0],))
    if name in _DRAWN:
        return _FlatOp(_DRAWN[name], *where, (0.0, 1.0))
    if name in ("normal_", "uniform_") and target.dtype.is_floating_point:
        values = tuple(float(value) for value in others)
        return _FlatOp(name[:-1], *where, values + (0.0, 1.0)[len(values) :])
    if name == "trunc_normal_":
        bound = inspect.signature(op.func).bind(*op.args, **op.kwargs)
        bound.apply_defaults()
        return _FlatOp("truncated", *where, tuple(float(bound.arguments[key]) for key in ("mean", "std", "a", "b")))
    return None


def _holds_tensor(values: Any) -> bool:
    found: list[Any] = []
    tree_map_only((TensorRef, torch.Tensor), found.append, values)
    return bool(found)
