"""Hooks of single parameters, by which a backward is noticed that the model's outputs have no part in."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class BackwardPass(Protocol):
    """What the hooks report to."""

    def open_pass(self, *_: object) -> None:
        """Called within a backward, before anything else."""

    def expect_gradient(self, name: str) -> None:
        """Called when autograd computes the gradient of the weight ``name``."""

    def note_accumulated(self, name: str) -> None:
        """Called when the gradient of the weight ``name`` was accumulated."""


class ArrivalHooks:
    """Hooks of one parameter: a submodule that is called alone, or a penalty, opens a pass too.

    They are methods, since Dynamo traces no other hooks that run after accumulation, and hold nothing, as
    `parallel.weak_hook` has it: the module's own hooks hold the sync.
    """

    def __init__(self, sync: BackwardPass, name: str, mean: int) -> None:
        self._weak_sync, self._name, self._mean = weakref.ref(sync), name, mean

    @property
    def _sync(self) -> BackwardPass:
        sync = self._weak_sync()
        assert sync is not None
        return sync

    def attach(self, parameter: nn.Parameter) -> None:
        """Registers the hooks on a parameter of any shape."""
        if isinstance(parameter, DTensor):
            parameter.register_hook(self._scale_direct)
        else:
            parameter.register_hook(self._expect)
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _scale_direct(self, gradient: torch.Tensor) -> torch.Tensor:
        """Multiplies a direct gradient, a DTensor shard, by the number of readers, which the mean divides out again."""
        # Shards get the model's gradient from the reduction, a penalty's from autograd: whole already, no sum of the
        # readers', so that the mean must leave it as it is.
        self._sync.open_pass()
        return gradient * float(self._mean)

    def _expect(self, _: torch.Tensor) -> None:
        """Notes that autograd computes the parameter's gradient."""
        self._sync.expect_gradient(self._name)

    def _arrived(self, _: torch.Tensor) -> None:
        """Notes that the parameter's gradient is accumulated."""
        self._sync.note_accumulated(self._name)
