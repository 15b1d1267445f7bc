"""What a layer receives from ranks with its experts, kept for the run of its forward that recompute adds (`ep_keep`).

The second run of a layer makes what backward needs; its graph is thrown away. So there nothing has to travel: how many
rows go where, and the rows that came, are those of the first run.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import FunctionCtx

T = TypeVar("T")
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of a layer's first run, and of its second."""


@dataclass(slots=True)
class _Call:
    """One call of a layer."""

    made: list[object] = field(default_factory=list)
    """What its first run made, in this order."""


@dataclass(slots=True)
class _LayerRun:
    """A run of a call's forward."""

    call: _Call
    is_second: bool
    taken: int = 0
    """What it has taken of the first run."""


_RUN: contextvars.ContextVar[_LayerRun | None] = contextvars.ContextVar("run", default=None)


class _RunContext(AbstractContextManager[None]):
    """Runs a call's forward for the first or the second time, and may be entered again and again."""

    def __init__(self, call: _Call, is_second: bool, inner: AbstractContextManager[Any]) -> None:
        self._call, self._is_second, self._inner = call, is_second, inner
        self._tokens: list[contextvars.Token[_LayerRun | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_RUN.set(_LayerRun(self._call, self._is_second)))
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        _RUN.reset(self._tokens.pop())
        self._inner.__exit__(*error)


def keeping_contexts(inner: Callable[[], ContextPair] | None) -> ContextPair:
    """Returns the contexts of a layer's two runs for torch's ``checkpoint``, one pair a call.

    Args:
        inner: makes contexts that hold inside of these.
    """
    call = _Call()
    first, second = inner() if inner is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    return _RunContext(call, False, first), _RunContext(call, True, second)


def is_kept() -> bool:
    """Returns whether a layer runs whose second run receives nothing."""
    return _RUN.get() is not None


def kept(make: Callable[[], T]) -> T:
    """Returns what ``make`` returns; in a layer's second run, what it did in the first."""
    run = _RUN.get()
    if run is None:
        return make()
    if run.is_second:
        run.taken += 1
        return cast("T", run.call.made[run.taken - 1])
    made = make()
    run.call.made.append(made)
    return made


def kept_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor; in a layer's second run one with the values of the first, of the same shape and graph.

    They are a copy, as models add to what experts return in its memory.
    """
    if not is_kept():
        return tensor
    values = kept(lambda: tensor.detach().clone())
    result: torch.Tensor = _WithValues.apply(tensor, values)
    return result


class _WithValues(torch.autograd.Function):
    """Puts a tensor's values in the place of another's, through which the gradient goes."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0], None
