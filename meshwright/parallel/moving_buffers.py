"""Buffers that a model's forward changes (batch norm's statistics): changed once a step, by the training forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Values = dict[str, torch.Tensor]
"""Copies of buffers, by name."""
Forward = Callable[..., Any]


class MovingBuffers:
    """The buffers of some modules that forward changes: copied, put back, or stood in for.

    Args:
        modules: stages of this rank, or one layer.
        names: of the buffers, in the whole model.
        path: name of the modules in the whole model; "" for stages, whose names are those of the model.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Collection[str], path: str = "") -> None:
        self.names = frozenset(names)
        self._owners: list[tuple[str, nn.Module, str]] = []
        for module in modules if names else ():
            for prefix, submodule in module.named_modules(prefix=path):
                keys = ((f"{prefix}.{key}" if prefix else key, key) for key in submodule._buffers)
                self._owners += [(name, submodule, key) for name, key in keys if name in self.names]

    def __bool__(self) -> bool:
        """Returns whether the modules have such buffers."""
        return bool(self._owners)

    def copy(self) -> Values:
        """Returns copies of their values."""
        return {name: _buffer_of(owner, key).detach().clone() for name, owner, key in self._owners}

    def restore(self, values: Values) -> None:
        """Gives them other values, in their own memory."""
        with torch.no_grad():
            for name, owner, key in self._owners:
                _buffer_of(owner, key).copy_(values[name])

    def widen(self) -> None:
        """Makes floating ones float64, as what they are statistics of."""
        for _, owner, key in self._owners:
            if (buffer := _buffer_of(owner, key)).is_floating_point():
                owner._buffers[key] = buffer.double()

    @contextlib.contextmanager
    def substituted(self, values: Values) -> Iterator[None]:
        """Shows the modules copies of ``values``, which forward may change; the buffers themselves aren't touched."""
        current = [(owner, key, owner._buffers[key]) for _, owner, key in self._owners]
        for name, owner, key in self._owners:
            owner._buffers[key] = values[name].clone()
        try:
            yield
        finally:
            for owner, key, buffer in current:
                owner._buffers[key] = buffer

    def with_saved_values(self, plain: Forward) -> Forward:
        """Returns a forward for one call; when repeated, it starts from the first call's buffers and changes none."""
        first_values, is_first_call = self.copy(), True

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            nonlocal is_first_call
            if is_first_call:
                is_first_call = False
                # Selective recompute wants a repeated forward to run the operators of the first: it copies them too.
                for value in first_values.values():
                    value.clone()
                return plain(*args, **kwargs)
            with self.substituted(first_values):
                return plain(*args, **kwargs)

        return forward


def _buffer_of(owner: nn.Module, key: str) -> torch.Tensor:
    buffer = owner._buffers[key]
    assert buffer is not None
    return buffer
