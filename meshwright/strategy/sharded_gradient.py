"""Wraps gradients of split weights for code outside meshwright: norms are those of the full weight, or an error.

Between `backward()` and the optimizer's step ``parameter.grad`` is a tensor subclass that shares memory with this
rank's shard. Element-wise operations work on the shard; a norm is that of the full weight, reduced over ranks, so that
`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` are right; an operation that would read the shard as the
full gradient is refused. Optimizers step on the plain tensors, so the subclass costs them nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.errors import ConfigError
from meshwright.parallel.weights import Weight, as_dtensor_like
from meshwright.strategy.operator_tags import is_random
from meshwright.strategy.weight_reductions import NORMS, norm_order
from meshwright.torch_compat.tensors import (
    TorchArgs,
    TorchFunction,
    TorchKwargs,
    local_tensor,
    without_tensor_subclasses,
)

_CLEARING = ("zero_", "detach", "detach_", "requires_grad_", "__get__", "__set__")
"""Operations that are allowed on gradients that aren't summed yet; with ``_foreach_`` before them too."""
_READERS = ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "equal", "allclose")
CURE = (
    "for the norm of the whole model call strategy.grad_norm() or strategy.clip_grad_norm_(max_norm), or "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
)


class GradientNorms(Protocol):
    """Computes norms of full gradients over ranks."""

    def weight_norm(self, weight: Weight, order: float) -> torch.Tensor:
        """Returns the norm of a full weight's gradient, a float64 scalar; every rank calls it together."""

    def shard_norm(self, shard: torch.Tensor, weight: Weight, order: float) -> torch.Tensor:
        """Returns the norm of a tensor of a weight's global shape, a float64 scalar; all ranks call it together.

        Args:
            shard: this rank's shard of the tensor, plain, of the shard's shape of the weight.
            weight: the weight.
            order: of the norm.
        """

    def any_rank(self, flag: torch.Tensor) -> None:
        """Replaces a float flag, () or (1,), by its maximum over all ranks, in place."""

    def note_change(self) -> None:
        """Called after a gradient was changed in place; DTensor changes local tensors without counting versions."""

    @property
    def summed(self) -> bool:
        """True when gradients are those of the global batch."""


T = TypeVar("T")


class ShardedGradient(torch.Tensor):
    """A shard of a gradient that is a plain tensor."""

    owner: GradientNorms
    weight: Weight

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return call_on_shards(func, args, kwargs or {})


class ShardedDTensorGradient(DTensor):
    """A shard of a gradient that is a DTensor of a shard that another axis cut."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Called by torch instead of each of its functions."""
        return call_on_shards(func, args, kwargs or {})


def wrap_gradient(gradient: torch.Tensor, weight: Weight, owner: GradientNorms) -> torch.Tensor:
    """Wraps a gradient, of the shard's shape, for user code; shares memory."""
    wrapped: Any
    if isinstance(gradient, DTensor):
        wrapped = plain_gradient(gradient)
        wrapped.__class__ = ShardedDTensorGradient
    else:
        wrapped = gradient.detach().as_subclass(ShardedGradient)
    wrapped.owner, wrapped.weight = owner, weight
    return wrapped  # type: ignore[no-any-return]


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the gradient in the runtime's form, of the same shape, sharing memory: a plain tensor or a DTensor."""
    with without_tensor_subclasses():
        if isinstance(gradient, DTensor):
            return as_dtensor_like(gradient, local_tensor(gradient))
        return gradient.detach().as_subclass(torch.Tensor) if isinstance(gradient, ShardedGradient) else gradient


def call_on_shards(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs one torch function that has shards of gradients among its arguments."""
    name = getattr(func, "__name__", str(func))
    if name == "_foreach_norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return tuple(_norm(item, order) for item in args[0])
    if func in NORMS:
        return _vector_norm(func, args, kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        _call_on_lists(func, args, kwargs)
        # Ranks with finite shards must skip the step together with the one whose shard isn't.
        owner = next(item for item in args[0] if is_sharded_gradient(item)).owner
        owner.any_rank(args[1])
        return None
    if name.startswith(("_foreach_", "_fused_")):
        return _call_on_lists(func, args, kwargs)
    return _call_on_one(func, name, args, kwargs)


def is_sharded_gradient(value: object) -> bool:
    """Returns whether a value is a shard of a gradient of a sharded model."""
    return isinstance(value, (ShardedGradient, ShardedDTensorGradient))


def _norm(gradient: torch.Tensor, order: float | str) -> torch.Tensor:
    """Returns the norm, a scalar, of the full gradient for a shard, else of the tensor itself."""
    if is_sharded_gradient(gradient):
        owner, weight = gradient.owner, gradient.weight
        # The weight's own gradient: all norms are reduced at once and cached. What was computed from it has its own.
        if weight.parameter.grad is gradient:
            norm = owner.weight_norm(weight, float(order))
        else:
            norm = owner.shard_norm(_local(gradient), weight, float(order))
        return norm.to(_local(gradient).dtype)
    return torch.linalg.vector_norm(gradient, float(order))


def _vector_norm(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    """Returns the norm over all dims, a scalar; refuses one over some dims of a shard."""
    gradient = next(item for item in (*args, *kwargs.values()) if is_sharded_gradient(item))
    order = norm_order(func, args, kwargs, gradient.weight.shape)
    if order is None:
        raise ConfigError(f"{func.__name__} over some dims of a gradient whose weight is split over ranks: {CURE}")
    return _norm(gradient, order)


def _local(value: T) -> T | torch.Tensor:
    """Returns this rank's shard as a plain tensor; lists by item, other values unchanged."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    if isinstance(value, ShardedGradient):
        return plain_gradient(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_local(item) for item in value)
    return value


def _call_on_lists(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs an operation on lists of tensors over their shards, which may be of several meshes."""
    _check_summed(func.__name__.removeprefix("_foreach_"), [item for item in args[0] if is_sharded_gradient(item)])
    with without_tensor_subclasses():
        results = func(*_local(tuple(args)), **{key: _local(value) for key, value in kwargs.items()})
    for item in (item for item in args[0] if is_sharded_gradient(item)):
        # in-place changes of local tensors don't count versions of the wrapper
        item.owner.note_change()
    if not isinstance(results, (list, tuple)):
        return results
    if func.__name__.endswith("_"):
        return type(results)(as_dtensor_like(original, result) for original, result in zip(args[0], results))
    return type(results)(_wrap_like(original, result) for original, result in zip(args[0], results))


def _wrap_like(original: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Returns an element-wise result, of the shape of ``original``, as a shard where that is one."""
    result = as_dtensor_like(original, result)
    if not is_sharded_gradient(original):
        return result
    return wrap_gradient(result, original.weight, original.owner)


def _unwrap(value: object) -> object:
    """Returns a value without the wrapper; lists by item."""
    if is_sharded_gradient(value):
        return plain_gradient(value)
    if isinstance(value, (list, tuple)) and any(is_sharded_gradient(item) for item in value):
        return type(value)(_unwrap(item) for item in value)
    return value


def _call_on_one(func: TorchFunction, name: str, args: TorchArgs, kwargs: TorchKwargs) -> object:
    """Runs an operation on one gradient; its result must be another shard, unless this rank has the full weight."""
    sharded = [item for item in _flatten((*args, *kwargs.values())) if is_sharded_gradient(item)]
    if name in ("__repr__", "__format__", "__str__"):
        return f"this rank's shard of the gradient of {sharded[0].weight.name}: {_local(sharded[0])!r}"
    _check_summed(name, sharded)
    if name == "__setitem__" and is_sharded_gradient(args[0]):
        _set_item(*args)
        return None
    if name == "__getitem__":
        raise ConfigError(
            f"an index of the gradient of {sharded[0].weight.name}, of which this rank has a part, would be one of the "
            "part: write grad[index] = value, or grad.mul_(mask) with a mask of the whole weight's shape"
        )
    is_part = any(item.weight.data_shards > 1 or not item.weight.shard.is_unsharded for item in sharded)
    if is_part and is_random(name, func):
        raise ConfigError(
            f"{name} of the gradient of {sharded[0].weight.name}, of which this rank has a part, would draw the part's "
            f"numbers alone: draw those of the whole weight, torch.randn{tuple(sharded[0].weight.shape)}, of which "
            "adding and multiplying take this rank's part"
        )
    args = tuple(_cut_like(item, sharded[0]) for item in args)
    with without_tensor_subclasses():
        result = func(*(_unwrap(item) for item in args), **{key: _unwrap(value) for key, value in kwargs.items()})
    target: Any = args[0] if args else None
    # an in-place operation: user code keeps the wrapper that it has
    if name.endswith("_") and not name.endswith("__") and is_sharded_gradient(target):
        if name not in ("detach_", "requires_grad_"):
            target.owner.note_change()
        return target
    if all(gradient.weight.shard.is_unsharded for gradient in sharded):
        # a plain tensor is whole here; a DTensor of shards knows how to sum, but its norm as a number is this rank's
        if not isinstance(result, DTensor) or result is target:
            return result
        if result.shape == sharded[0].shape:
            return wrap_gradient(result, sharded[0].weight, sharded[0].owner)
        # a number made of a partial sum would be this rank's
        return _sum_partial(result)
    if name in _READERS:
        raise ConfigError(
            f"{name}() of the gradient of {sharded[0].weight.name}, of which this rank has a part: {CURE}"
        )
    # In place on a plain tensor: user code keeps that.
    if isinstance(result, torch.Tensor) and result is not target:
        # a reduction over a shard would pass for one over the full gradient
        if result.shape != sharded[0].shape:
            raise ConfigError(
                f"{name} of the gradient of {sharded[0].weight.name} would read this rank's part as the whole: {CURE}"
            )
        return wrap_gradient(result, sharded[0].weight, sharded[0].owner)
    return result


def _sum_partial(value: DTensor) -> DTensor:
    """Sums the partial values of a DTensor of any shape, of which `float` would read this rank's; all ranks call it."""
    placements = [Replicate() if isinstance(item, Partial) else item for item in value.placements]
    return value if placements == list(value.placements) else value.redistribute(placements=placements)


def _set_item(gradient: Any, index: Any, value: Any) -> None:
    """Writes into a gradient what ``gradient[index] = value`` writes into that of the whole weight.

    Args:
        gradient: this rank's shard.
        index: of the whole weight: integers, slices, masks.
        value: a number or a plain tensor, as the index takes it.
    """
    weight = gradient.weight
    if any(is_sharded_gradient(item) for item in _flatten((index, value))):
        raise ConfigError(
            f"a part of the gradient of {weight.name}, of which this rank has a shard, was written from a gradient: "
            "write numbers or a tensor of the whole weight's values"
        )
    weight.write_values(_local(gradient), index, value)
    gradient.owner.note_change()


def _cut_like(value: object, gradient: Any) -> object:
    """Returns this rank's part of a plain tensor that broadcasts to the whole weight's shape, as a mask of it does.

    Other values are unchanged: numbers, tensors of the part's shape, and those that are the same along what is split.
    """
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, (ShardedGradient, DTensor))
    if not is_plain:
        return value
    assert isinstance(value, torch.Tensor)
    return gradient.weight.cut_operand(value, gradient)


def _check_summed(name: str, shards: Sequence[ShardedGradient | ShardedDTensorGradient]) -> None:
    """Refuses to read gradients between micro-batches."""
    if shards and name not in _CLEARING and not shards[0].owner.summed:
        raise ConfigError(
            f"the gradient of {shards[0].weight.name} is this rank's alone inside strategy.accumulate(): read, clip "
            "and step after the last backward, which stands outside of it and sums"
        )


def _flatten(values: Iterable[object]) -> list[Any]:
    """Returns nested lists and tuples as one list."""
    items: list[object] = []
    for value in values:
        items += _flatten(value) if isinstance(value, (list, tuple)) else [value]
    return items
