"""Lets the loss be read inside of a model's forward, before the hooks of the data axes see what it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward

ReadLoss = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""What a module's forward returned to the loss, (), and its sums, (3,) float64."""


class InnerLoss:
    """Has what a module's forward returns read inside of it while `run` calls it; at all other times nothing changes.

    A gradient of the loss by the logits, taken outside, would start the backward of FSDP2, which waits for one at each
    tensor that its module returns.

    Args:
        module: the model, or its last pipeline stage; its forward is wrapped.
    """

    OF_FORWARD = ("_read", "_result")
    """What belongs to a forward that runs."""

    def __init__(self, module: nn.Module) -> None:
        self._read: ReadLoss | None = None
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        wrap_forward(module, ForwardLayer.HEAD, "its own loss, whose targets are counted", self._wrap)

    def run(self, call: Callable[[], object], read: ReadLoss) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``read`` makes of what the module returns: the loss, (), and its sums, (3,) float64.

        Args:
            call: calls the module once. An exception by which a pipeline stage ends earlier passes through.
            read: called with gradients enabled, in an evaluation too.

        Raises:
            RuntimeError: ``call`` didn't call the module.
        """
        self._read = read
        try:
            call()
            result = self._result
        finally:
            self._read = self._result = None
        if result is None:
            raise RuntimeError("the loss was to be read inside of a forward that nobody called")
        return result

    def _wrap(self, plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            if self._read is None:
                return plain(*args, **kwargs)
            with torch.enable_grad():
                self._result = self._read(plain(*args, **kwargs))
            return self._result[0]

        return forward
