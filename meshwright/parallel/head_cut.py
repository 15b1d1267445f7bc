"""Ends a model's forward in front of its head, so that the loss computes the logits itself, a chunk at a time.

While a `HeadCut` is on, the model's own forward ends at the head: its code behind it doesn't run, and what that does to
logits is read by `models.analysis.head_trial`. All hooks of the model run as behind any forward.
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


class _HeadReached(BaseException):
    """Leaves the forward at the head; no model code catches it."""


class HeadCut:
    """Stops a module's forward in front of its head while `run` calls it; at all other times nothing changes.

    Args:
        module: the model, or its last pipeline stage; its forward and the head's are wrapped.
        name: of the head, an `nn.Linear`.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._is_on = False
        self._input: HeadInput | None = None
        head = module.get_submodule(name)
        wrap_forward(head, ForwardLayer.HEAD, "the loss computes its product, where it does so in chunks", self._stop)
        wrap_forward(module, ForwardLayer.HEAD, "ends at its head, where the loss computes the logits", self._catch)
        self._head = head

    def run(self, call: Callable[[], object]) -> HeadInput:
        """Returns what the head was called with.

        Args:
            call: calls the module once. An exception by which a pipeline stage ends earlier passes through.

        Raises:
            RuntimeError: the forward didn't reach its head.
        """
        self._is_on = True
        try:
            call()
            head_input = self._input
        finally:
            self._is_on, self._input = False, None
        if head_input is None:
            raise RuntimeError("the model's forward ended without calling its head, which its trial did")
        return head_input

    def _stop(self, plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if not self._is_on:
                logits: torch.Tensor = plain(hidden)
                return logits
            # Here, inside of the call: ZeRO's gathered weight stands in the module's attribute.
            self._input = HeadInput(hidden, self._head.weight, self._head.bias)  # type: ignore[arg-type]
            raise _HeadReached

        return forward

    def _catch(self, plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            try:
                return plain(*args, **kwargs)
            except _HeadReached:
                # FSDP2 looks for tensors that gradients flow back through in what its root returns.
                assert self._input is not None
                return self._input.hidden

        return forward
