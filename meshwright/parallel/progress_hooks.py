"""Reports the layer that runs, as its forward and as its backward begin, so that a hang is reported with its layer.

A layer's forward is wrapped: it reports first, and puts a gradient hook on its output, which reports when backward
reaches the layer. While nobody listens this costs a comparison; the wrapper lies outside of compiled and of recomputed
code, and never sees a value. Backward of two halves of a micro-batch goes to and fro between layers in their midst:
what begins a turn there reports its layer too (`layer_report`).
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward

OUTSIDE = -1
"""Reported when a rank's last layer ends; backward has no such moment but its own end (`outside`)."""


_REPORT: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("report", default=None)
"""Reports the layer whose forward runs; None outside of any, and while nobody listens."""


def layer_report() -> Callable[[], None] | None:
    """Returns what reports the layer whose forward runs now, to be called in its backward; None where none does."""
    return _REPORT.get()


class LayerProgressHooks:
    """Reports the layer that runs to its ``listener``."""

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None
        """Given the number of the layer that begins, or `OUTSIDE`; None while nobody listens."""

    def watch(self, layers: Sequence[nn.Module], first_layer: int) -> None:
        """Wraps layers so that they report.

        Args:
            layers: some that follow each other.
            first_layer: number of the first of them in the model.
        """
        last_number = first_layer + len(layers) - 1
        for number, layer in enumerate(layers, first_layer):
            reports = partial(self._reporting, number, number == last_number)
            wrap_forward(layer, ForwardLayer.PROGRESS, f"reports that layer {number} runs", reports)

    def outside(self) -> None:
        """Reports that no layer runs any more."""
        if self.listener is not None:
            self.listener(OUTSIDE)

    def _reporting(self, number: int, is_last: bool, plain: Forward) -> Forward:
        def report() -> None:
            if self.listener is not None:
                self.listener(number)

        def report_backward(_: torch.Tensor) -> None:
            report()

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            if self.listener is None:
                return plain(*args, **kwargs)
            self.listener(number)
            token = _REPORT.set(report)
            try:
                out = plain(*args, **kwargs)
            finally:
                _REPORT.reset(token)
            hidden = out if isinstance(out, torch.Tensor) else _hidden(out)
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(report_backward)
            if is_last and self.listener is not None:
                self.listener(OUTSIDE)
            return out

        return forward


def _hidden(out: object) -> torch.Tensor | None:
    """Returns the first tensor of a layer's output: the next layer's input."""
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, torch.Tensor)), None)
