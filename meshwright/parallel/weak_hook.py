"""Hooks of tensors that hold nothing: no collection of garbage sees what a tensor's hooks hold.

A hook that is bound to what holds the tensor would keep both in memory for as long as the process lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class WeakHook:
    """A method as a hook of a tensor, without holding what the method is bound to.

    Args:
        method: takes the tensor; what it is bound to lives as long as the hook may run.
    """

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Calls the method."""
        method = self._method()
        assert method is not None
        method(tensor)
