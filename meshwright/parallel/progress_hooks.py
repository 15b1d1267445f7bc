"""Tells which layer runs: as its forward begins, and as its backward does, so that a hang can be named by it.

A layer's forward is replaced by one that tells before and puts a hook on what comes out, by which autograd tells when
the gradient of that has come. While nobody listens this costs a comparison; it is outside of what is compiled or run
again for backward, and never sees a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward

OUTSIDE = -1
"""Told when the last of a rank's layers is left; of backward there is no such moment but its end (`outside`)."""


class LayerProgressHooks:
    """What passes through a rank's layers tells it."""

    def __init__(self) -> None:
        self.tell: Callable[[int], None] | None = None
        """Given the number of the layer that begins, or `OUTSIDE`; None while nobody listens."""

    def watch(self, layers: Sequence[nn.Module], first: int) -> None:
        """Makes layers tell.

        Args:
            layers: some that follow each other.
            first: number of the first of them in the model.
        """
        last_number = first + len(layers) - 1
        for number, layer in enumerate(layers, first):
            reports = partial(self._reporting, number, number == last_number)
            wrap_forward(layer, ForwardLayer.PROGRESS, f"reports that layer {number} runs", reports)

    def outside(self) -> None:
        """Tells that no layer runs any more."""
        if self.tell is not None:
            self.tell(OUTSIDE)

    def _reporting(self, number: int, is_last: bool, plain: Forward) -> Forward:
        def report_backward(_: torch.Tensor) -> None:
            if self.tell is not None:
                self.tell(number)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.tell is None:
                return plain(*args, **kwargs)
            self.tell(number)
            out = plain(*args, **kwargs)
            hidden = out if isinstance(out, torch.Tensor) else _hidden(out)
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(report_backward)
            if is_last and self.tell is not None:
                self.tell(OUTSIDE)
            return out

        return forward


def _hidden(out: Any) -> torch.Tensor | None:
    """Returns the first tensor of what a layer gives, which is what the next one takes."""
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, torch.Tensor)), None)
