"""Gradients of split weights as code outside meshwright sees them: norms are those of the whole weight, or an error.

Between `backward()` and the optimizer's step ``parameter.grad`` is a tensor subclass that shares memory with this
rank's part. Element-wise operations work on the part; a norm is that of the whole weight, summed over ranks, so that
`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` are right; what would read the part as the whole is refused.
Optimizers step on the plain tensors, so the subclass costs them nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.parallel.weights import Weight, placed_like

_VECTOR_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
_CLEARING = ("zero_", "detach", "detach_", "requires_grad_", "__get__", "__set__")
"""Operations that are allowed on gradients that aren't summed yet; with ``_foreach_`` before them too."""
_READERS = ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__")
CURE = (
    "for the norm of the whole model call strategy.grad_norm() or strategy.clip_grad_norm_(most), or "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), most)"
)


class GradientNorms(Protocol):
    """Who knows the norms of whole gradients."""

    def weight_norm(self, weight: Weight, order: float) -> torch.Tensor:
        """Returns the norm of a whole weight's gradient, a scalar; every rank asks for it together."""

    def any_rank(self, flag: torch.Tensor) -> None:
        """Makes a float flag the maximum over all ranks, in place."""

    def note_change(self) -> None:
        """Called after a gradient was changed in place; DTensor changes local tensors without counting versions."""

    @property
    def summed(self) -> bool:
        """Whether gradients are those of the whole batch."""


class ShardedGradient(torch.Tensor):
    """A part of a gradient that is a plain tensor."""

    owner: GradientNorms
    weight: Weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch instead of each of its functions."""
        return call_on_parts(func, args, kwargs or {})


class ShardedDTensorGradient(DTensor):
    """A part of a gradient that is a DTensor of a part that another axis cut."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch instead of each of its functions."""
        return call_on_parts(func, args, kwargs or {})


def watched(gradient: torch.Tensor, weight: Weight, owner: GradientNorms) -> torch.Tensor:
    """Returns the gradient as user code may see it, sharing memory."""
    made: Any
    if isinstance(gradient, DTensor):
        made = plain_gradient(gradient)
        made.__class__ = ShardedDTensorGradient
    else:
        made = gradient.detach().as_subclass(ShardedGradient)
    made.owner, made.weight = owner, weight
    return made  # type: ignore[no-any-return]


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the gradient as the runtime has it, sharing memory: a plain tensor or a DTensor."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(gradient, DTensor):
            return placed_like(gradient, gradient._local_tensor)
        return gradient.detach().as_subclass(torch.Tensor) if isinstance(gradient, ShardedGradient) else gradient


def call_on_parts(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Answers one torch function whose arguments have parts of gradients among them."""
    name = getattr(func, "__name__", str(func))
    if name == "_foreach_norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return tuple(_norm(item, order) for item in args[0])
    if func in _VECTOR_NORMS:
        return _vector_norm(name, args, kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        _on_locals(func, args, kwargs)
        # Ranks that hold finite parts must skip the step together with the one that doesn't.
        owner = next(item for item in args[0] if is_watched(item)).owner
        owner.any_rank(args[1])
        return None
    if name.startswith(("_foreach_", "_fused_")):
        return _on_locals(func, args, kwargs)
    return _one_by_one(func, name, args, kwargs)


def is_watched(value: Any) -> bool:
    """Whether a value is a part of a gradient of a sharded model."""
    return isinstance(value, (ShardedGradient, ShardedDTensorGradient))


def _norm(gradient: Any, order: Any) -> torch.Tensor:
    if is_watched(gradient):
        norm = gradient.owner.weight_norm(gradient.weight, float(order))
        return norm.to(_local(gradient).dtype)
    return torch.linalg.vector_norm(gradient, float(order))


def _vector_norm(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    gradient = args[0]
    given = dict(zip(("ord", "dim", "keepdim"), args[1:])) | kwargs
    order = given.pop("ord", given.pop("p", 2))
    if not is_watched(gradient) or any(value not in (None, False) for value in given.values()):
        raise ConfigError(f"{name} over some dims of a gradient whose weight is split over ranks: {CURE}")
    if order in (None, "fro"):
        order = 2
    return _norm(gradient, order)


def _local(value: Any) -> Any:
    """This rank's part as a plain tensor; lists by item, other values as they are."""
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, ShardedGradient):
        return plain_gradient(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_local(item) for item in value)
    return value


def _on_locals(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on lists of tensors over parts, which may be of several meshes."""
    _check_summed(func.__name__.removeprefix("_foreach_"), [item for item in args[0] if is_watched(item)])
    with torch._C.DisableTorchFunctionSubclass():
        results = func(*_local(tuple(args)), **{key: _local(value) for key, value in kwargs.items()})
    for item in (item for item in args[0] if is_watched(item)):
        item.owner.note_change()
    if not isinstance(results, (list, tuple)):
        return results
    return type(results)(placed_like(like, result) for like, result in zip(args[0], results))


def _plain(value: Any) -> Any:
    if is_watched(value):
        return plain_gradient(value)
    if isinstance(value, (list, tuple)) and any(is_watched(item) for item in value):
        return type(value)(_plain(item) for item in value)
    return value


def _one_by_one(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on one gradient; its result must be another part, unless this rank has the whole weight."""
    parts = [item for item in _flat((*args, *kwargs.values())) if is_watched(item)]
    if name in ("__repr__", "__format__", "__str__"):
        return f"{name} of this rank's part of {parts[0].weight.name}: {_local(parts[0]).tolist()}"
    _check_summed(name, parts)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*(_plain(item) for item in args), **{key: _plain(value) for key, value in kwargs.items()})
    first: Any = args[0] if args else None
    if name.endswith("_") and not name.endswith("__") and is_watched(first):
        if name not in ("detach_", "requires_grad_"):
            first.owner.note_change()
        return first
    if all(part.weight.place.is_whole for part in parts):
        # a plain tensor is whole here, and a DTensor knows how to sum over its shards
        return result
    if name in _READERS:
        raise ConfigError(f"{name}() of the gradient of {parts[0].weight.name}, of which this rank has a part: {CURE}")
    if isinstance(result, torch.Tensor) and is_watched(first):
        if result.shape != first.shape:
            raise ConfigError(
                f"{name} of the gradient of {first.weight.name} would read this rank's part as the whole: {CURE}"
            )
        return watched(result, first.weight, first.owner)
    return result


def _check_summed(name: str, parts: Sequence[Any]) -> None:
    """Refuses to read gradients between micro-batches."""
    if parts and name not in _CLEARING and not parts[0].owner.summed:
        raise ConfigError(
            f"the gradient of {parts[0].weight.name} is this rank's alone inside strategy.accumulate(): read, clip and "
            "step after the last backward, which stands outside of it and sums"
        )


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
