"""Injected memory errors of a rank: NaN in a gradient, a flipped bit in weights, moments, gradients or activations."""

from __future__ import annotations

import random

import torch
from torch import nn

from meshwright.parallel.program import Program
from meshwright.train.faults import Fault
from meshwright.train.optimizer import LocalAdamW

_AS_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -(2.0**60)
"""Factor on an element when the fault names no bit: large, with a finite square."""


class Spoiler:
    """Injects errors into a rank's memory.

    Args:
        program: the rank's program.
        optimizer: over its weights.
    """

    def __init__(self, program: Program, optimizer: LocalAdamW) -> None:
        self._program, self._optimizer = program, optimizer

    def spoil_gradient(self) -> bool:
        """Fills the rank's first gradient with NaN; returns False while it has none."""
        gradients = self._gradients()
        if gradients:
            gradients[0].fill_(float("nan"))
        return bool(gradients)

    def flip_bit(self, fault: Fault) -> bool:
        """Flips the bit that a fault names; returns False while its target has no element on this rank."""
        draw = random.Random(fault.seed)
        if fault.of == "activations":
            self._flip_next_output(fault, draw)
            return True
        if fault.of == "gradients":
            tensors = self._gradients()
        elif fault.of == "moments":
            tensors = self._optimizer.moments()
        else:
            tensors = [weight.local for weight in self._program.weights if weight.local.numel()]
        if tensors:
            _flip(tensors, fault, draw)
        return bool(tensors)

    def _gradients(self) -> list[torch.Tensor]:
        gradients_or_none = (weight.gradient for weight in self._program.weights)
        return [gradient for gradient in gradients_or_none if gradient is not None and gradient.numel()]

    def _flip_next_output(self, fault: Fault, draw: random.Random) -> None:
        """Flips a bit in the next output of one of the rank's layers, once."""
        layers = [layer for stage in self._program.stages for layer in stage.layers]

        def damage(module: nn.Module, inputs: object, output: object) -> None:
            # Once: a flip is a transient error.
            handle.remove()
            tensor = output[0] if isinstance(output, (tuple, list)) else output
            _flip([tensor], fault, draw)

        handle = draw.choice(layers).register_forward_hook(damage)


def _flip(tensors: list[torch.Tensor], fault: Fault, draw: random.Random) -> None:
    """Flips a bit of one element, drawn from all elements of floating tensors of any shape."""
    offset = 0 if fault.seed < 0 else draw.randrange(sum(tensor.numel() for tensor in tensors))
    for tensor in tensors:
        if offset < tensor.numel():
            # `.data` leaves autograd's version count alone, as a broken memory cell does.
            index = tuple(int(index) for index in torch.unravel_index(torch.tensor(offset), tensor.shape))
            element = tensor.data[index].view(1)
            if fault.bit < 0:
                element.mul_(_FACTOR)
            else:
                size = element.element_size()
                integer = element.view(_AS_INTEGER[size])
                # The fault counts bits as in float32: aligned at the sign for other widths.
                bit = max(0, fault.bit + 8 * size - 32)
                # The sign bit's mask as a signed integer is negative.
                integer.bitwise_xor_(-(2**bit) if bit == 8 * size - 1 else 2**bit)
            return
        offset -= tensor.numel()
