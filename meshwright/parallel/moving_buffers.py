"""Buffers that a model's forward changes: they move once a step, by the forward that trains, and by nothing else."""

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
        self._places: list[tuple[str, nn.Module, str]] = []
        for module in modules if names else ():
            for prefix, part in module.named_modules(prefix=path):
                keys = ((f"{prefix}.{key}" if prefix else key, key) for key in part._buffers)
                self._places += [(name, part, key) for name, key in keys if name in self.names]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._places)

    def copy(self) -> Values:
        """Returns copies of their values."""
        return {name: _value(part, key).detach().clone() for name, part, key in self._places}

    def put(self, values: Values) -> None:
        """Gives them other values, in their own memory."""
        with torch.no_grad():
            for name, part, key in self._places:
                _value(part, key).copy_(values[name])

    def widen(self) -> None:
        """Makes floating ones float64, as what they are statistics of."""
        for _, part, key in self._places:
            if (item := _value(part, key)).is_floating_point():
                part._buffers[key] = item.double()

    @contextlib.contextmanager
    def standing_in(self, values: Values) -> Iterator[None]:
        """Shows the modules copies of ``values``, which forward may change; the buffers themselves aren't touched."""
        now = [(part, key, part._buffers[key]) for _, part, key in self._places]
        for name, part, key in self._places:
            part._buffers[key] = values[name].clone()
        try:
            yield
        finally:
            for part, key, item in now:
                part._buffers[key] = item

    def again(self, plain: Forward) -> Forward:
        """Returns a forward for one call that, repeated, starts from the buffers of the first time and moves none."""
        then, fresh = self.copy(), True

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal fresh
            if fresh:
                fresh = False
                # Selective recompute wants a repeated forward to run the operators of the first: it copies them too.
                for item in then.values():
                    item.clone()
                return plain(*args, **kwargs)
            with self.standing_in(then):
                return plain(*args, **kwargs)

        return forward


def _value(part: nn.Module, key: str) -> torch.Tensor:
    item = part._buffers[key]
    assert item is not None
    return item
