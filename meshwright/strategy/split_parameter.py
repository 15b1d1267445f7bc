"""Guards split weights in user code: a parameter is read as the full weight there, or the reading is refused.

Under ``tp`` and ``ep`` a parameter may be this rank's part of a weight. Between the calls of the runtime it is a tensor
subclass, which shares memory with the part: element-wise operations work on the part; sums, means, norms and extremes
over all of a weight are reduced over ranks; what would read the part as the full weight is refused. In the model's
forward, in backward, in an optimizer's step and in the runtime's own code it is the plain part.

Of other parameters, and of some rows of these, ranks of ``tp`` add up their gradients after backward. What user code
computes from such a parameter, as a penalty, is the same on each of them, so its gradient is divided by their number.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.errors import ConfigError
from meshwright.parallel.partial_grads import PartialGradReducer, partial_grad_views
from meshwright.parallel.program import Program
from meshwright.parallel.tensor import PartialGrad
from meshwright.parallel.weights import Weight
from meshwright.strategy.operator_tags import has_tag, is_random
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
_OF_SHAPE = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "storage"),
    *("__len__", "__hash__", "data_ptr", "untyped_storage", "get_device", "share_memory_"),
)
"""Methods that read no value; like properties, they are of the part."""
_TRANSPOSES = ("T", "mT", "H", "mH")
_OF_LEAVES = (
    *("grad", "grad_fn", "is_leaf", "requires_grad", "requires_grad_", "retain_grad", "retains_grad", "backward"),
    *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
"""Names of what is asked of a leaf of autograd, and holds for the part."""
_ELEMENTWISE = (
    *("data", "clone", "detach", "detach_", "to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"),
    *("contiguous", "zero_", "fill_", "zeros_like", "ones_like", "empty_like", "full_like", "copy_", "expand_as"),
    *("floor_divide", "true_divide", "clip", "masked_fill_"),
)
"""Operations without torch's tag that treat each element by itself."""


class _Guarded:
    """Asks the guard before each torch function that gets such a tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return _call(func, args, kwargs or {})


class SplitParameter(_Guarded, nn.Parameter):
    """A part of a weight that is a plain parameter."""

    guard: SplitWeightGuard
    weight: Weight

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Returns a copy of the part, (n_local, ...), as an average of weights starts from."""
        # nn.Parameter's own would make a parameter of this class that knows no guard
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns the pickle of a parameter that is whole here; refuses that of a part, which wouldn't say so."""
        if not self.weight.shard.is_unsharded:
            self.guard.refuse("a pickle", self.weight)
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class SplitDTensor(_Guarded, DTensor):
    """A part of a weight that a data axis shards once more, or what was computed of one element by element."""

    __slots__ = ()

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Returns the full weight of any shape, where data axes alone shard it."""
        weight: Weight = self.weight  # type: ignore[attr-defined]
        if not weight.shard.is_unsharded:
            self.guard.refuse("full_tensor", weight)  # type: ignore[attr-defined]
        with without_tensor_subclasses():
            return DTensor.full_tensor(_with_own_gradients(self), **options)


class SplitTensor(_Guarded, torch.Tensor):
    """What was computed of a part element by element."""

    guard: SplitWeightGuard
    weight: Weight


class SplitWeightGuard:
    """Shows split weights to user code as tensors of the subclasses above, and the runtime plain ones.

    Args:
        program: built.
    """

    def __init__(self, program: Program) -> None:
        assert program.mesh is not None
        self.summed: dict[torch.Tensor, list[tuple[PartialGrad, int]]] = {}
        """Parameters whose gradients ranks add up: these, and the number of ranks."""
        for reducer in (sync for stage in program.stages for sync in stage.gradient_syncs):
            if isinstance(reducer, PartialGradReducer):
                self.summed |= reducer.summed_parts()
        self._guarded = [
            item
            for item in (*program.weights, *program.frozen)
            if not item.shard.is_unsharded or item.parameter in self.summed
        ]
        self._runtime_calls: set[str] = set()
        self.reductions = WeightReductions(program.mesh.world)
        self.layout = program.mesh.layout
        self._plain_classes: list[type] = [type(weight.parameter) for weight in self._guarded]
        for weight in self._guarded:
            parameter: Any = weight.parameter
            parameter.guard, parameter.weight = self, weight
        self._show()

    def begin(self, call: str) -> None:
        """Shows plain parts from the beginning of a call of the runtime: forward, backward or step."""
        if not self._runtime_calls:
            for weight, plain_class in zip(self._guarded, self._plain_classes):
                weight.parameter.__class__ = plain_class  # type: ignore[assignment]
        self._runtime_calls.add(call)

    def end(self, call: str) -> None:
        """Ends a call of the runtime, which may not have begun."""
        self._runtime_calls.discard(call)
        if not self._runtime_calls:
            self._show()

    def _show(self) -> None:
        """Shows the weights as user code sees them."""
        for weight in self._guarded:
            is_sharded = isinstance(weight.parameter, DTensor)
            weight.parameter.__class__ = SplitDTensor if is_sharded else SplitParameter  # type: ignore[assignment]

    def refuse(self, name: str, weight: Weight) -> NoReturn:
        """Refuses an operation that would take this rank's part for the full weight."""
        axes = ", ".join(f"{axis}={self.layout.degree(axis)}" for axis in weight.shard.axes)
        raise ConfigError(
            f"{name} of {weight.name}, of which this rank has a part under {axes}, would take it for the whole; what "
            "works is what treats each element by itself, and a sum, mean, norm or extreme over all of a weight; do "
            f"anything else before shard(), or use shard={self.layout.world} in place of {axes}"
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
    name = _name_of(func)
    with without_tensor_subclasses():
        # in this order: what optimizers and clipping ask for each step costs no walk over frames
        is_of_leaf = name in _OF_LEAVES or name.startswith(("__set__", "__delete__"))
        if is_of_leaf or in_backward() or torch.compiler.is_compiling() or _is_runtime(inspect.currentframe()):
            return func(*args, **kwargs)
        return _call_of_user(func, name, args, kwargs)


def _is_runtime(frame: FrameType | None) -> bool:
    """Returns whether the innermost code outside of torch is ours, or torch itself reads parts as such.

    Args:
        frame: of this module, called by torch.
    """
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
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


def _call_of_user(func: TorchFunction, name: str, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs a torch function of user code, by its `_name_of`; subclasses of tensors are disabled."""
    part = next(item for item in _flatten((*args, *kwargs.values())) if is_split(item))
    guard: SplitWeightGuard = part.guard
    if str(getattr(func, "__module__", "")).startswith("torch.autograd"):
        return func(*args, **kwargs)
    if name == "__deepcopy__":
        return guard.mark(part.detach().clone(), part.weight)
    if name == "__reduce_ex__" and part.weight.shard.is_unsharded:
        return part.detach().__reduce_ex__(*args[1:])  # a pickle needs no guard
    args, kwargs = _with_own_gradients(args), {key: _with_own_gradients(item) for key, item in kwargs.items()}
    parts = [item for item in _flatten((*args, *kwargs.values())) if is_split(item)]
    if all(item.weight.shard.is_unsharded for item in parts):
        return func(*args, **kwargs)
    part = next(item for item in parts if not item.weight.shard.is_unsharded)
    weight: Weight = part.weight
    if any(item.weight.boxes != weight.boxes for item in parts if item.shape == part.shape):
        guard.refuse(f"{name} with another weight, split otherwise,", weight)
    if name in ("__repr__", "__format__", "__str__"):
        return f"this rank's part of {weight.name}: {local_tensor(part)!r}"
    if name == "__setitem__" and is_split(args[0]):
        if any(is_split(item) for item in _flatten(args[1:])):
            guard.refuse("writing from a part", weight)
        weight.write_values(local_tensor(part.detach()), *args[1:])
        return None
    if name in ("equal", "allclose"):
        return guard.reductions.are_equal(func, *args, **kwargs)
    if name in OVER_ALL or func in NORMS or name == "_foreach_norm":
        return _reduce(func, name, args, kwargs)
    if name.startswith("_foreach_"):
        return _call_on_lists(func, args, kwargs)
    is_of_shape = name in _OF_SHAPE or name.startswith(("new_", "is_"))
    is_of_shape |= getattr(func, "__name__", "") == "__get__" and name not in (*_ELEMENTWISE, *_TRANSPOSES)
    if is_of_shape:
        return func(*args, **kwargs)
    is_elementwise = name in _ELEMENTWISE or has_tag(name, torch.Tag.pointwise)
    if not is_elementwise or is_random(name, func):
        guard.refuse(name, weight)
    result = func(*(_cut_operand(item, part) for item in args), **kwargs)
    if result is part or not isinstance(result, torch.Tensor):
        return result
    if result.shape != part.shape:
        guard.refuse(name, weight)
    return guard.mark(result, weight)


def _with_own_gradients(value: Any) -> Any:
    """Returns a value with parameters whose gradients ranks add up replaced by ones that give each rank its part."""
    if isinstance(value, (list, tuple)):
        return type(value)(_with_own_gradients(item) for item in value)
    if not is_split(value) or not torch.is_grad_enabled() or not value.requires_grad or not value.is_leaf:
        return value
    parts = value.guard.summed.get(value)
    return value.guard.mark(_DividedGradient.apply(value, parts), value.weight) if parts else value


class _DividedGradient(torch.autograd.Function):
    """A parameter whose gradient is divided by the number of ranks that will add it up."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, parts: list[tuple[PartialGrad, int]]) -> torch.Tensor:
        ctx.parameter, ctx.parts = parameter, parts
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parameter = ctx.parameter
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = gradient.clone()
        for partial, ranks in ctx.parts:
            for view in partial_grad_views(parameter, local_tensor(gradient), partial):
                view.div_(ranks)
        return gradient, None


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
        if order_of_all is None:
            return guard.refuse(f"{name} over some dims", weight)
        return _norm(part, order_of_all)
    if any(value is not None and value is not False for value in (*args, *kwargs.values()) if value is not part):
        guard.refuse(f"{name} over some dims", weight)
    return _like(part, guard.reductions.over_all(name, part, weight))


def _norm(value: Any, order: float) -> torch.Tensor:
    """Returns the vector norm, a scalar, of the full weight for a part, else of the tensor itself."""
    if is_split(value):
        return _like(value, value.guard.reductions.norm(value, value.weight, order))
    return torch.linalg.vector_norm(value, order)


def _like(part: Any, result: torch.Tensor) -> torch.Tensor:
    """Returns a scalar of all ranks as a DTensor where the part is one, which adds up with those of others."""
    if not isinstance(part, DTensor):
        return result
    placements = [Replicate()] * part.device_mesh.ndim
    return DTensor.from_local(result, part.device_mesh, placements, run_check=False)


def _cut_operand(value: object, part: Any) -> object:
    """Returns this rank's part of a plain operand of the whole weight's shape; others unchanged."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not is_split(value)
    return part.weight.cut_operand(value, part) if is_plain else value


def _name_of(func: TorchFunction) -> str:
    """Returns a function's name; of a property's getter and setter that of the property."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{'' if name == '__get__' else name}{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return name


def _flatten(values: Sequence[object]) -> Iterator[Any]:
    """Yields the items of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value
