"""Ends a model's forward at its head, so that the loss computes the logits itself, a chunk at a time.

While a `HeadCut` is on, the head computes the loss in place of its product, and the model's own forward ends there: its
code behind the head doesn't run, and what that does to logits is read by `models.analysis.head_trial`. All hooks of the
head and of the model run as behind any forward, with the loss for its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward


@dataclass(frozen=True, slots=True)
class HeadInput:
    """What a model's logits are computed from: logits = hidden weight' + bias."""

    hidden: torch.Tensor
    """(..., D): the head's input, after its hooks."""
    weight: torch.Tensor
    """(V, D), or this rank's rows of it: gathered, where it rests as shards."""
    bias: torch.Tensor | None
    """(V,), or this rank's part of it."""

    def cast(self, dtype: torch.dtype) -> HeadInput:
        """Returns the operands in ``dtype``, as ``torch.autocast`` takes them: float64 stays as it is."""
        # Source: torch's autocast_mode.h, ``is_eligible``.
        if self.hidden.dtype == torch.float64:
            return self
        bias = None if self.bias is None else self.bias.to(dtype)
        return HeadInput(self.hidden.to(dtype), self.weight.to(dtype), bias)


HeadLoss = Callable[[HeadInput], tuple[torch.Tensor, torch.Tensor]]
"""The head's input to (what the forward returns, what comes beside it)."""


class _HeadReached(BaseException):
    """Leaves the forward at the head; no model code catches it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__("left at the head")
        self.output = output


class HeadCut:
    """Computes the loss in a module's head while `run` calls it; at all other times nothing changes.

    Args:
        module: the model, or its last pipeline stage; its forward and the head's are wrapped.
        name: of the head, an `nn.Linear`.
    """

    OF_FORWARD = ("_loss", "_result")
    """What belongs to a forward that runs."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._loss: HeadLoss | None = None
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._head = module.get_submodule(name)
        wrap_forward(self._head, ForwardLayer.HEAD, "the loss, where that computes the logits in chunks", self._stop)
        wrap_forward(module, ForwardLayer.HEAD, "ends at its head, where that computes the loss", _catch)

    def run(self, call: Callable[[], object], loss: HeadLoss) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``loss`` makes of the head's input: the loss, (), and its sums, (3,) float64.

        Args:
            call: calls the module once. An exception by which a pipeline stage ends earlier passes through.
            loss: called inside of the head, where ZeRO's gathered weights are its attributes.

        Raises:
            RuntimeError: the forward didn't reach its head.
        """
        self._loss = loss
        # The last of the head's hooks: FSDP2's run before it.
        leaving = self._head.register_forward_hook(_leave)
        try:
            call()
            result = self._result
        finally:
            leaving.remove()
            self._loss = self._result = None
        if result is None:
            raise RuntimeError("the model's forward ended without calling its head, which its trial did")
        return result

    def _stop(self, plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self._loss is None:
                logits: torch.Tensor = plain(hidden)
                return logits
            head = self._head
            operands = HeadInput(hidden, head.weight, head.bias)  # type: ignore[arg-type]
            device = hidden.device.type
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                # A model's own autocast is for its product alone.
                with torch.autocast(device, enabled=False):
                    self._result = self._loss(operands.cast(torch.get_autocast_dtype(device)))
            else:
                self._result = self._loss(operands)
            return self._result[0]

        return forward


def _leave(_head: nn.Module, _args: object, output: torch.Tensor) -> None:
    """Leaves the model's forward with the loss, which the head returned in place of its product."""
    raise _HeadReached(output)


def _catch(plain: Forward) -> Forward:
    """Ends the exception inside of the module's forward, so that hooks which follow a forward run."""

    @functools.wraps(plain)
    def forward(*args: object, **kwargs: object) -> object:
        try:
            return plain(*args, **kwargs)
        except _HeadReached as reached:
            # FSDP2 begins its backward where a gradient reaches this.
            return reached.output

    return forward
