"""Guards split weights in user code: a parameter is read as the full weight there, or the reading is refused.

Under ``tp`` and ``ep`` a parameter is this rank's part of a weight. Between the calls of the runtime it is a tensor
subclass, which shares memory with the part: element-wise operations work on the part; sums, means, norms and extremes
over all of a weight are reduced over ranks; what would read the part as the full weight is refused. In the model's
forward, in backward, in an optimizer's step and in the runtime's own code it is the plain part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight, as_dtensor_like
from meshwright.strategy.weight_reductions import NORMS, OVER_ALL, WeightReductions, norm_order
from meshwright.torch_compat.tensors import (
    TorchArgs,
    TorchFunction,
    TorchKwargs,
    in_backward,
    local_tensor,
    without_tensor_subclasses,
)

_PLAIN_CALLERS = ("torch.distributed.", "torch.optim.", "torch.autograd.", "torch._dynamo.", "torch.nn.modules.module")
"""Modules of torch inside of which a part is read as one: collectives, optimizers, backward, a module's call."""
_REFUSED = (
    *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__reduce_ex__", "__iter__"),
    *("T", "mT", "H", "mH"),
)
_GRADIENTS = ("grad", "grad_fn")
"""Properties that hold another tensor than the part."""
_ELEMENTWISE = (
    *(
        "data",
        "clone",
        "detach",
        "detach_",
        "to",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "contiguous",
    ),
    *("zero_", "fill_", "zeros_like", "ones_like", "empty_like", "full_like", "copy_", "requires_grad_"),
    *("expand_as", "floor_divide", "true_divide", "clip", "masked_fill_", "share_memory_", "__deepcopy__"),
)
"""Operations without torch's tag that treat each element by itself."""
_OPERATORS = {
    **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pos": "positive", "invert": "bitwise_not"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "idiv": "div"},
}
"""Operators of Python by torch's names, where these are others."""


class SplitParameter(nn.Parameter):
    """A part of a weight that is a plain parameter."""

    guard: SplitWeightGuard
    weight: Weight

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Returns a copy of the part, (n_local, ...), as an average of weights starts from."""
        with without_tensor_subclasses():
            return memo.setdefault(id(self), self.guard.mark(self.detach().clone(), self.weight))


class SplitDTensor(DTensor):
    """A part of a weight that a data axis shards once more, or what was computed of one element by element."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return _call(func, args, kwargs or {})


class SplitTensor(torch.Tensor):
    """What was computed of a part element by element."""

    guard: SplitWeightGuard
    weight: Weight

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return _call(func, args, kwargs or {})


class SplitWeightGuard:
    """Shows split weights to user code as tensors of the subclasses above, and the runtime plain ones.

    Args:
        program: built.
    """

    def __init__(self, program: Program) -> None:
        assert program.mesh is not None
        self._split = [item for item in (*program.weights, *program.frozen) if not item.shard.is_unsharded]
        self._runtime_calls: set[str] = set()
        self.reductions = WeightReductions(program.mesh.world)
        self.layout = program.mesh.layout
        self._plain_classes: list[type] = [type(weight.parameter) for weight in self._split]
        for weight in self._split:
            parameter: Any = weight.parameter
            parameter.guard, parameter.weight = self, weight
        self._show()

    def begin(self, call: str) -> None:
        """Shows plain parts from the beginning of a call of the runtime: forward, backward or step."""
        if not self._runtime_calls:
            for weight, plain_class in zip(self._split, self._plain_classes):
                weight.parameter.__class__ = plain_class  # type: ignore[assignment]
        self._runtime_calls.add(call)

    def end(self, call: str) -> None:
        """Ends a call of the runtime, which may not have begun."""
        self._runtime_calls.discard(call)
        if not self._runtime_calls:
            self._show()

    def _show(self) -> None:
        """Shows the weights as user code sees them."""
        for weight in self._split:
            is_sharded = isinstance(weight.parameter, DTensor)
            weight.parameter.__class__ = SplitDTensor if is_sharded else SplitParameter  # type: ignore[assignment]

    def refuse(self, name: str, weight: Weight, instead: str = "") -> NoReturn:
        """Refuses an operation that would take this rank's part for the full weight."""
        axes = ", ".join(f"{axis}={self.layout.degree(axis)}" for axis in weight.shard.axes)
        raise ConfigError(
            f"{name} of {weight.name}, of which this rank has a part under {axes}, would take the part for the whole: "
            + (
                instead
                or "what works here is element by element, or a sum, mean, norm or extreme over all of a weight; "
            )
            + "for anything else do it before shard(), or use shard=N in place of that axis"
        )

    def mark(self, result: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Marks a tensor of the shape of this rank's part as one of a weight; its memory and its graph stay."""
        marked: Any = result.detach() if isinstance(result, nn.Parameter) else result
        if isinstance(marked, DTensor):
            marked.__class__ = SplitDTensor
        else:
            marked = marked.as_subclass(SplitTensor)
        marked.guard, marked.weight = self, weight
        return marked  # type: ignore[no-any-return]


def is_split(value: object) -> bool:
    """Returns whether a value is a part of a weight as user code sees it."""
    return isinstance(value, (SplitParameter, SplitDTensor, SplitTensor))


def _call(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs one torch function that has parts of weights among its arguments."""
    with without_tensor_subclasses():
        if in_backward() or torch.compiler.is_compiling() or _is_runtime(sys._getframe(2)):
            return func(*args, **kwargs)
        return _call_of_user(func, args, kwargs)


def _is_runtime(frame: FrameType | None) -> bool:
    """Returns whether the innermost code outside of torch is ours, or torch itself reads parts as such.

    Args:
        frame: of the caller of a torch function.
    """
    is_innermost = True
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl":
            return True
        if is_innermost and module != "torch" and not module.startswith("torch."):
            if module.startswith("meshwright."):
                return True
            is_innermost = False
        elif is_innermost and module.startswith(_PLAIN_CALLERS):
            return True
        frame = frame.f_back
    return False


def _call_of_user(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs a torch function of user code; subclasses of tensors are disabled."""
    name = _name_of(func)
    part = next(item for item in _flatten((*args, *kwargs.values())) if is_split(item))
    guard: SplitWeightGuard = part.guard
    weight: Weight = part.weight
    if name in ("__repr__", "__format__", "__str__"):
        return f"this rank's part of {weight.name}: {local_tensor(part)!r}"
    if name == "__setitem__" and is_split(args[0]):
        if any(is_split(item) for item in _flatten(args[1:])):
            guard.refuse("writing from a part", weight)
        weight.write_values(local_tensor(part.detach()), *args[1:])
        return None
    if name in OVER_ALL or func in NORMS or name == "_foreach_norm":
        return _reduce(func, name, args, kwargs)
    if name.startswith("_foreach_"):
        return _call_on_lists(func, args, kwargs)
    is_of_autograd = str(getattr(func, "__module__", "")).startswith("torch.autograd")
    if is_of_autograd or name in _GRADIENTS or name.startswith(("__set__", "__delete__")):
        return func(*args, **kwargs)
    if name in _REFUSED or _is_random(name, func):
        guard.refuse(name, weight)
    is_elementwise = name in _ELEMENTWISE or _has_tag(name, torch.Tag.pointwise)
    if is_elementwise:
        args = tuple(_cut_operand(item, part) for item in args)
    elif name.endswith("_") and not name.endswith("__"):
        guard.refuse(name, weight)
    result = func(*args, **kwargs)
    return _marked(result, name, is_elementwise, part)


def _marked(result: object, name: str, is_elementwise: bool, part: Any) -> object:
    """Returns a result for user code: that of each element marked as a part, no other tensor of a part's values."""
    if isinstance(result, (list, tuple)):
        if any(isinstance(item, torch.Tensor) for item in _flatten(result)):
            part.guard.refuse(name, part.weight)
        return result
    if not isinstance(result, torch.Tensor) or result is part:
        return result
    if not is_elementwise or result.shape != part.shape:
        part.guard.refuse(name, part.weight)
    return part.guard.mark(as_dtensor_like(part, result), part.weight)


def _call_on_lists(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs an element-wise operation on lists of tensors."""
    results = func(*args, **kwargs)
    if not isinstance(results, (list, tuple)):
        return results
    return type(results)(
        original.guard.mark(result, original.weight) if is_split(original) and result is not original else result
        for original, result in zip(args[0], results)
    )


def _reduce(func: TorchFunction, name: str, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Returns a norm or another reduction over all of a weight; refuses one over some dims."""
    if name == "_foreach_norm":
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
        return tuple(_norm(item, order) for item in args[0])
    part = next(item for item in (*args, *kwargs.values()) if is_split(item))
    guard, weight = part.guard, part.weight
    if func in NORMS:
        order_of_all = norm_order(func, args, kwargs, weight.shape)
        return guard.refuse(f"{name} over some dims", weight) if order_of_all is None else _norm(part, order_of_all)
    others = [item for item in args if item is not part]
    if name in ("equal", "allclose"):
        options = {key: value for key, value in kwargs.items() if key not in ("input", "other")}
        others += [kwargs[key] for key in ("input", "other") if key in kwargs and kwargs[key] is not part]
        return guard.reductions.over_all(name, part, weight, others, options)
    if any(value not in (None, False) for value in (*others, *(v for k, v in kwargs.items() if k != "input"))):
        guard.refuse(f"{name} over some dims", weight)
    return guard.reductions.over_all(name, part, weight, (), {})


def _norm(value: Any, order: float) -> torch.Tensor:
    """Returns the vector norm, a scalar, of the full weight for a part, else of the tensor itself."""
    if is_split(value):
        return value.guard.reductions.norm(value, value.weight, order)  # type: ignore[no-any-return]
    return torch.linalg.vector_norm(value, order)


def _cut_operand(value: object, part: Any) -> object:
    """Returns this rank's part of a plain operand of the whole weight's shape; others unchanged."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not is_split(value)
    return part.weight.cut_operand(value, part) if is_plain else value


def _name_of(func: TorchFunction) -> str:
    """Returns a function's name; of a property's getter and setter that of the property."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{'' if name == '__get__' else name}{getattr(func.__self__, '__name__', name)}"
    return name


@functools.cache
def _has_tag(name: str, tag: torch.Tag) -> bool:
    """Returns whether torch's operator behind a function's name, as ``__radd__`` or ``mul_``, has a tag."""
    base = name.strip("_").removeprefix("foreach_")
    if name.startswith("__"):
        base = _OPERATORS.get(base, base)
        if not hasattr(torch.ops.aten, base):
            base = _OPERATORS.get(base[1:], base[1:])  # reflected or in place
    packet = getattr(torch.ops.aten, base, None) or getattr(torch.ops.aten, f"{base}_", None)
    return packet is not None and any(tag in getattr(packet, item).tags for item in packet.overloads())


def _is_random(name: str, func: TorchFunction) -> bool:
    """Returns whether a function draws random numbers, which a part would draw alone."""
    return getattr(func, "__module__", "") == "torch.nn.init" or _has_tag(name, torch.Tag.nondeterministic_seeded)


def _flatten(values: Sequence[object]) -> Iterator[Any]:
    """Yields the items of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value
