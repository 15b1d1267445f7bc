"""float64 throughout: model code that asks for float32 "for precision" would lose it there, so it keeps float64.

Norms, softmaxes and routers of many models cast to float32 and back. Under float32 or bf16 that helps; under float64 it
rounds to 1e-7, and sums that layouts take in another order differ by as much, far more than what a proof allows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16", "to", "type_as")
"""Methods that give a tensor another type, whatever their arguments are."""


def apply(modules: Iterable[nn.Module]) -> None:
    """Makes each module's forward run inside `Float64Ops`, also when recompute calls it during backward."""
    for module in modules:
        wrap_forward(module, ForwardLayer.FLOAT64, "no operation narrows a float64 tensor", _inside)


def _inside(plain: Forward) -> Forward:
    @functools.wraps(plain)
    def forward(*args: object, **kwargs: object) -> object:
        with Float64Ops():
            return plain(*args, **kwargs)

    return forward


class Float64Ops(TorchFunctionMode):
    """Inside it, no operation turns a float64 tensor into a narrower one."""

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Widens the dtype that a call on a float64 tensor asks for; torch calls this for each function."""
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        # Most calls name no type. Each operator comes through here, and in compiled layers each is traced through it.
        if name not in _CASTS and not _names_type(args) and not (named and _names_type(named.values())):
            return func(*args, **named)
        if not any(map(_is_float64, (*args, *named.values()))):
            return func(*args, **named)
        if name in ("float", "half", "bfloat16"):
            return args[0]
        if name in ("to", "type_as"):
            # The tensor whose type is asked for, where it isn't a dtype.
            other = next((item for item in (*args[1:], *named.values()) if isinstance(item, torch.Tensor)), None)
            if other is not None:
                return args[0].to(other.device) if other.dtype in _NARROW else func(*args, **named)
        widened = {key: _widen(item) for key, item in named.items()}
        return func(*map(_widen, args), **widened)


def _names_type(items: Iterable[object]) -> bool:
    """Returns whether one of some arguments is a type of numbers."""
    for item in items:  # noqa: SIM110 - half the time of a generator, which Dynamo would trace besides
        if isinstance(item, torch.dtype):
            return True
    return False


def _is_float64(item: object) -> bool:
    """Returns whether an argument is a float64 tensor, or a list of tensors with one among them."""
    if isinstance(item, (list, tuple)):
        return any(map(_is_float64, item))
    return isinstance(item, torch.Tensor) and item.dtype == torch.float64


def _widen(item: Any) -> Any:
    """Returns float64 for a narrower dtype, other arguments unchanged."""
    return torch.float64 if isinstance(item, torch.dtype) and item in _NARROW else item


def _apply(context: TransformContext) -> None:
    for stage in context.stages:
        apply([stage.module, *stage.layers])


TRANSFORM = Transform(
    layer=ForwardLayer.FLOAT64, applies=lambda layout, _source: layout.precision == "float64", apply=_apply
)
