"""Replays recorded initialisation on a run of elements of a tensor, or on all where it isn't element-wise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.models.random_init import BLOCK, draw, generator_at
from meshwright.models.recorder import Op, Recording, TensorRef
from meshwright.torch_compat.tensors import tree_map_only

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
"""Operators that overwrite all previous values of a tensor."""


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
    """A recording, indexed so that any run of elements of any of its tensors can be computed."""

    def __init__(self, recording: Recording) -> None:
        """Indexes the operations by the storages that they write.

        Args:
            recording: finished; nothing is added to it any more.
        """
        self.recording = recording
        self.labels: dict[int, str] = {}
        """Storage to its first name, a component of the address of its random draws."""
        self._by_storage: dict[int, list[Op]] = {}
        for op in recording.ops:
            for storage in {item.storage for item in (*op.fresh, *op.writes) if item is not None}:
                self._by_storage.setdefault(storage, []).append(op)
        self._programs: dict[tuple[int, int], list[_FlatOp] | None] = {}
        self._blocks: dict[Any, torch.Tensor] = {}
        """The last blocks that were drawn, since runs share them."""

    def has_origin(self, ref: TensorRef) -> bool:
        """Returns whether the recording contains the tensor's creation."""
        writers = self._by_storage.get(ref.storage, ())
        return any(ref.storage == item.storage for op in writers for item in op.fresh if item)

    def by_runs(self, ref: TensorRef) -> bool:
        """Returns whether any run of the tensor can be computed without its other elements."""
        return ref.is_flat and self._program_of(ref.storage, len(self.recording.ops)) is not None

    def run(self, ref: TensorRef, seed: int, low: int, high: int) -> torch.Tensor:
        """Returns elements [low, high) of a tensor for which `by_runs` is true: (high - low,), in its original type."""
        return self._replay_run(ref, len(self.recording.ops), seed, low, high)

    def full_tensor(self, ref: TensorRef, seed: int) -> torch.Tensor:
        """Replays every operation that the tensor depends on, on the CPU; returns the tensor in its recorded shape."""
        real: dict[int, torch.Tensor] = {}

        def view(item: TensorRef) -> torch.Tensor:
            if item.storage not in real:
                size, dtype = self.recording.sizes[item.storage]
                real[item.storage] = torch.zeros(size, dtype=dtype)
            base = real[item.storage]
            # a storage may be viewed as another type of the same size
            base = base if base.dtype == item.dtype else base.view(item.dtype)
            return base.as_strided(item.shape, item.stride, item.offset)

        # the caller's random state must not change
        state, threads = torch.random.get_rng_state(), torch.get_num_threads()
        # the last bits of an orthogonal matrix depend on how many compute it
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for op in self._operations_needed(ref.storage, len(self.recording.ops)):
                    self._replay(op, seed, view)
        finally:
            torch.random.set_rng_state(state)
            torch.set_num_threads(threads)
        return view(ref)

    def _storage_label(self, storage: int) -> str:
        """Returns the name under which a storage's random draws are addressed; its number where it has none yet."""
        if storage not in self.labels:
            self.recording.drawn_unnamed.add(storage)
        return f"#{storage}" if storage in self.recording.drawn_unnamed else self.labels[storage]

    def _program_of(self, storage: int, stop_order: int) -> list[_FlatOp] | None:
        """Returns the steps that fill a storage up to an operation; None when one isn't element-wise on a flat run."""
        key = (storage, stop_order)
        if key not in self._programs:
            self._programs[key] = self._compile(storage, stop_order)
        return self._programs[key]

    def _compile(self, storage: int, stop_order: int) -> list[_FlatOp] | None:
        """Builds the program of a storage from the operations that write it."""
        steps: list[_FlatOp] = []
        size, is_elementwise = self.recording.sizes[storage][0], True
        for op in self._by_storage.get(storage, ()):
            if op.order >= stop_order:
                break
            for target in (*op.fresh, *op.writes):
                if target is None or target.storage != storage:
                    continue
                op_steps = self._steps_of(op, target)
                # an operation that overwrites the whole storage makes all earlier steps irrelevant
                if op.name in _OVERWRITES and target.numel == size:
                    steps, is_elementwise = [], True
                is_elementwise = is_elementwise and op_steps is not None
                steps.extend(op_steps or ())
        return steps if is_elementwise else None

    def _steps_of(self, op: Op, target: TensorRef) -> list[_FlatOp] | None:
        """Returns the steps of one operation on its target; None when it can't be done run by run."""
        # a strided or reinterpreted target has no run of flat elements
        if not target.is_flat or target.dtype != self.recording.sizes[target.storage][1]:
            return None
        simple_step = _simple_step(op, target)
        if simple_step is not None or op.name in _EMPTY:
            return [simple_step] if simple_step is not None else []
        location = (target.offset, target.numel, op.order, target.dtype)
        in_place = bool(op.writes)
        if op.name in _COPIES:
            copy_step = self._copy_step(op.args[1] if op.name == "copy_" else op.args[0], target, op.order)
            return None if copy_step is None else [copy_step]
        # element-wise with a tensor operand would need that operand's run too: replayed whole
        if op.name.removesuffix("_") not in _POINTWISE or _has_tensor((op.args[1:], op.kwargs)):
            return None
        apply_step = _FlatOp("apply", *location, payload=op)
        if in_place:
            return [apply_step]
        copy_step = self._copy_step(op.args[0], target, op.order)
        return None if copy_step is None or op.args[0].dtype != target.dtype else [copy_step, apply_step]

    def _copy_step(self, source: Any, target: TensorRef, order: int) -> _FlatOp | None:
        """Returns the step that copies a tensor of the same sizes; None when it can't be done run by run."""
        if tuple(source.shape) != target.shape:
            return None
        kind = "constant" if isinstance(source, torch.Tensor) else "copy"
        if kind == "copy" and (not source.is_flat or self._program_of(source.storage, order) is None):
            return None
        return _FlatOp(kind, target.offset, target.numel, order, target.dtype, payload=source)

    def _replay_run(self, ref: TensorRef, stop_order: int, seed: int, low: int, high: int) -> torch.Tensor:
        """Returns elements [low, high) of a tensor as they were before operation ``stop_order``."""
        steps = self._program_of(ref.storage, stop_order)
        assert steps is not None, "asked for a run of a tensor that has none"
        return self._perform_steps(steps, ref.storage, seed, low + ref.offset, high + ref.offset, ref.dtype)

    def _perform_steps(
        self, steps: list[_FlatOp], storage: int, seed: int, low: int, high: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Performs steps on elements [low, high) of a storage; returns (high - low,)."""
        run = torch.zeros(high - low, dtype=dtype)
        for step in steps:
            # the overlap of the wanted run and the step's elements; a, b: the same in the step's own indices
            start, stop = max(low, step.start), min(high, step.start + step.count)
            if start >= stop:
                continue
            elements, a, b = run[start - low : stop - low], start - step.start, stop - step.start
            if step.kind == "fill":
                elements.fill_(step.values[0])
            elif step.kind == "constant":
                elements.copy_(step.payload.reshape(-1)[a:b])
            elif step.kind == "copy":
                elements.copy_(self._replay_run(step.payload, step.order, seed, a, b))
            elif step.kind == "apply":
                elements.copy_(step.payload.func(elements.clone(), *step.payload.args[1:], **step.payload.kwargs))
            else:
                self._fill_random(step, storage, seed, elements, a, b)
        return run

    def _fill_random(self, step: _FlatOp, storage: int, seed: int, elements: torch.Tensor, a: int, b: int) -> None:
        """Fills elements [a, b) of a random step from its blocks, of which each thread of torch draws its share.

        Args:
            step: a draw.
            storage: of the draw's target.
            seed: of the weights.
            elements: (b - a,), written.
            a: first element, from the step's start on.
            b: end of the elements.
        """
        blocks, threads = range(a // BLOCK, (b - 1) // BLOCK + 1), torch.get_num_threads()

        def fill(first: int) -> None:
            """Fills what each ``threads``-th block from the ``first`` one on has of the run."""
            for block in blocks[first::threads]:
                block_values = self._block(step, storage, seed, block)
                start, stop = max(a, block * BLOCK), min(b, block * BLOCK + len(block_values))
                elements[start - a : stop - a] = block_values[start - block * BLOCK : stop - block * BLOCK]

        if threads == 1 or len(blocks) < 2 * threads:
            threads = 1
            fill(0)
            return
        # NumPy draws without the interpreter's lock: billions of weights take seconds, in one thread minutes.
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(threads)))

    def _block(self, step: _FlatOp, storage: int, seed: int, block: int) -> torch.Tensor:
        """Returns the values of a block of a random step, (`BLOCK`,) or, of the last one, fewer."""
        # a block's numbers depend on its address alone, never on the layout or on which run needs it
        address = (seed, self._storage_label(storage), step.order, block)
        block_values = self._blocks.get(address)
        if block_values is None:
            count = min(BLOCK, step.count - block * BLOCK)
            block_values = draw(step.kind, step.values, count, step.dtype, address)
            if len(self._blocks) > 4:
                self._blocks.clear()
            self._blocks[address] = block_values
        return block_values

    def _operations_needed(self, storage: int, stop_order: int) -> list[Op]:
        """Returns, in order, the operations on which a storage's content before an operation depends."""
        needed_ops: dict[int, Op] = {}
        searched_to: dict[int, int] = {}
        pending = [(storage, stop_order)]
        while pending:
            current, order_limit = pending.pop()
            if searched_to.get(current, -1) >= order_limit:
                continue
            searched_to[current] = order_limit
            # an operation's inputs are needed as they were just before it
            for op in self._by_storage.get(current, ()):
                if op.order < order_limit and op.order not in needed_ops:
                    needed_ops[op.order] = op
                    inputs: list[TensorRef] = []
                    tree_map_only(TensorRef, inputs.append, (op.args, op.kwargs))
                    pending.extend((tensor.storage, op.order) for tensor in inputs)
        return [needed_ops[order] for order in sorted(needed_ops)]

    def _replay(self, op: Op, seed: int, view: Callable[[TensorRef], torch.Tensor]) -> None:
        """Performs one operation on real tensors; random ones draw the same numbers as run by run."""
        target = next(ref for ref in (*op.writes, *op.fresh) if ref is not None)
        simple_step = _simple_step(op, target) if target.is_flat else None
        if simple_step is not None:
            stop = target.offset + target.numel
            values = self._perform_steps([simple_step], target.storage, seed, target.offset, stop, target.dtype)
            view(target).copy_(values.view(target.shape))
            return
        address = (seed, self._storage_label(target.storage), op.order)
        # an operation without a run-by-run form (a permutation): seeded by its address too
        torch.default_generator.manual_seed(int(generator_at(address).integers(1 << 63)))
        args, kwargs = tree_map_only(TensorRef, view, (op.args, op.kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        results = op.func(*args, **kwargs)
        for ref, value in zip(op.fresh, results if isinstance(results, (tuple, list)) else [results]):
            if ref is not None:
                view(ref).copy_(value)


def _simple_step(op: Op, target: TensorRef) -> _FlatOp | None:
    """Returns the step of a fill or a draw, which reads no tensor; None for another operation."""
    location = (target.offset, target.numel, op.order, target.dtype)
    name, arguments = op.name, op.args[1:]
    if name in _FILLED or name == "zero_":
        return _FlatOp("fill", *location, (_FILLED.get(name, 0.0),))
    if name in ("full", "new_full", "full_like"):
        return _FlatOp("fill", *location, (op.args[2] if name == "new_full" else op.args[1],))
    if name == "fill_" and not isinstance(arguments[0], TensorRef):
        return _FlatOp(
            "fill", *location, (arguments[0].item() if isinstance(arguments[0], torch.Tensor) else arguments[0],)
        )
    if name in _DRAWN:
        return _FlatOp(_DRAWN[name], *location, (0.0, 1.0))
    if name in ("normal_", "uniform_") and target.dtype.is_floating_point:
        parameters = tuple(float(value) for value in arguments)
        return _FlatOp(name[:-1], *location, parameters + (0.0, 1.0)[len(parameters) :])
    if name == "trunc_normal_":
        bound = inspect.signature(op.func).bind(*op.args, **op.kwargs)
        bound.apply_defaults()
        return _FlatOp("truncated", *location, tuple(float(bound.arguments[key]) for key in ("mean", "std", "a", "b")))
    return None


def _has_tensor(values: Any) -> bool:
    """Returns whether nested values contain a tensor."""
    tensors: list[Any] = []
    tree_map_only((TensorRef, torch.Tensor), tensors.append, values)
    return bool(tensors)
