"""Sums, norms and extremes over all of a split weight, reduced over ranks, with gradients of this rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.weights import Weight, view_box
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs, local_tensor

NORMS: tuple[TorchFunction, ...] = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
"""Functions whose norm over all dims is that of the flattened tensor."""
_EXTREMES = {"max": 1, "amax": 1, "min": -1, "amin": -1}
OVER_ALL = ("sum", "mean", "count_nonzero", "any", "all", *_EXTREMES)
"""Names of other reductions that a weight answers as a whole."""


def norm_order(func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs, shape: Sequence[int]) -> float | None:
    """Returns the order of a vector norm over all dims of a tensor; None for another norm.

    Args:
        func: one of `NORMS`.
        args: of the call, the tensor first where it is among them.
        kwargs: of the call.
        shape: of the whole tensor.
    """
    options = dict(zip(("ord", "dim", "keepdim"), args[1:])) | dict(kwargs)
    for key in ("input", "x", "A", "self"):
        options.pop(key, None)
    # torch.norm calls the order p, torch.linalg.norm ord
    order = options.pop("ord", options.pop("p", None))
    if any(value is not None and value is not False for value in options.values()):  # dim=0 is neither
        return None
    if order in (None, "fro"):
        return 2.0
    # of a matrix torch.linalg.norm takes numbers for norms of the operator: 2 is its largest singular value
    is_operator_norm = func is torch.linalg.norm and len(shape) == 2
    return None if is_operator_norm or not isinstance(order, (int, float)) else float(order)


def maximum_over_ranks(values: torch.Tensor, world: AxisGroup) -> torch.Tensor:
    """Returns the maximum over ranks of each of ``values``, of any shape; NaN where it is that on one of them."""
    is_nan = values.isnan()
    # gloo's maximum may drop what is no number
    maxima = torch.stack([values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    world.all_reduce_max(maxima).wait()
    return maxima[0].masked_fill(maxima[1] > 0, math.nan)


class WeightReductions:
    """Reduces tensors that lie over ranks as their weights do; every rank calls each of these together.

    Args:
        world: of all ranks.
    """

    def __init__(self, world: AxisGroup) -> None:
        self._world = world

    def norm(self, value: torch.Tensor, weight: Weight, order: float) -> torch.Tensor:
        """Returns a norm of a full tensor, a scalar.

        Args:
            value: this rank's part, of the shape and sharding of the weight.
            weight: the weight.
            order: of the norm.
        """
        local = _local(value)
        if math.isinf(order):
            sign = 1 if order > 0 else -1
            return self._extreme(local.abs(), sign)
        if order == 0:
            return self._sum(local.ne(0).to(torch.float64), weight).to(local.dtype)
        powers = local.abs() ** order
        total = self._sum(powers.detach(), weight) ** (1.0 / order)
        # d norm / d x = |x|^(p-1) sign(x) / norm^(p-1), which is 0 at 0
        scale = total ** (1.0 - order) / order
        surrogate = (powers * torch.where(total > 0, scale, torch.zeros_like(scale)).to(powers.dtype)).sum()
        return _with_local_gradient(surrogate, total.to(local.dtype))

    def are_equal(self, compare: Callable[..., bool], value: torch.Tensor, other: torch.Tensor, **options: Any) -> bool:
        """Returns whether two full tensors are equal, by `torch.equal` or `torch.allclose`.

        Args:
            compare: that function.
            value: this rank's part.
            other: this rank's part of the other tensor, of the same shape and sharding.
            options: tolerances.
        """
        local = _local(value).detach()
        flag = torch.tensor(compare(local, _local(other).detach(), **options), device=local.device)
        return bool(self._all(flag))

    def over_all(self, name: str, value: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Returns one of `OVER_ALL` of a full tensor, a scalar.

        Args:
            name: of the function.
            value: this rank's part, of the shape and sharding of the weight.
            weight: the weight.
        """
        local = _local(value)
        if name == "any":
            return self._extreme(local.ne(0).any().to(torch.float64), 1).to(torch.bool)
        if name == "all":
            return self._all(local.ne(0).all())
        if name == "count_nonzero":
            return self._sum(local.ne(0).to(torch.float64), weight).to(torch.int64)
        if name in _EXTREMES:
            return self._extreme(local, _EXTREMES[name])
        count = math.prod(weight.shape) if name == "mean" else 1
        total = self._sum(local.detach(), weight) / count
        if not local.is_floating_point():
            return total.to(torch.int64)
        return _with_local_gradient(local.sum() / count, total.to(local.dtype))

    def _all(self, flag: torch.Tensor) -> torch.Tensor:
        """Returns whether a flag, (), is set on all ranks."""
        return self._extreme(flag.to(torch.float64), -1).to(torch.bool)

    def _extreme(self, local: torch.Tensor, sign: int) -> torch.Tensor:
        """Returns the maximum, or with a sign of -1 the minimum, of all ranks' parts (n_local, ...) of a tensor."""
        signed = sign * local.detach().to(torch.float64)
        largest = signed.amax() if signed.numel() else signed.new_tensor(-math.inf)
        result = (sign * maximum_over_ranks(largest, self._world)).to(local.dtype)
        refusal = "a maximum or minimum over a weight that ranks share has no gradient here: read it under no_grad()"
        return _with_local_gradient(local.sum(), result, refusal)

    def _sum(self, local: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Returns the sum over a full tensor, () float64, of this rank's part (n_local, ...)."""
        total = torch.zeros(1, dtype=torch.float64, device=local.device)
        for part, copies in _parts(local, weight):
            # a box that several ranks have a copy of counts once in the sum over ranks
            total += part.sum(dtype=torch.float64) / copies
        self._world.all_reduce(total).wait()
        return total[0]


def _with_local_gradient(surrogate: torch.Tensor, value: torch.Tensor, refusal: str = "") -> torch.Tensor:
    """Returns ``value``, a scalar, with the gradient of ``surrogate``, or one that is refused."""
    result: torch.Tensor = _WithLocalGradient.apply(surrogate, value, refusal)
    return result


class _WithLocalGradient(torch.autograd.Function):
    """A scalar of all ranks whose gradient is that of a scalar of this rank's part."""

    @staticmethod
    def forward(ctx: Any, surrogate: torch.Tensor, value: torch.Tensor, refusal: str) -> torch.Tensor:
        ctx.refusal = refusal
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.refusal:
            raise ConfigError(ctx.refusal)
        return gradient, None, None


def _local(value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part, (n_local, ...), as a plain tensor that autograd follows."""
    if isinstance(value, DTensor):
        return value.to_local() if value.requires_grad and torch.is_grad_enabled() else local_tensor(value)
    return value.as_subclass(torch.Tensor)


def _parts(local: torch.Tensor, weight: Weight) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields (a box of this rank's part, ranks that have it)."""
    for box in weight.boxes if local.numel() else ():
        yield view_box(local, box.local_box), box.copies
