"""Damage on purpose to what a rank holds in memory: NaN in a gradient, a flipped bit anywhere."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from meshwright.parallel.program import Program
from meshwright.train.faults import Fault
from meshwright.train.optimizer import LocalAdamW

_AS_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -(2.0**60)
"""What an element is multiplied with where no single bit is named: large, and its square is still finite."""


class Spoiler:
    """Damages a rank's own memory.

    Args:
        program: of the rank.
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
        """Flips the bit that a fault names; returns False while there is no element that it could hit."""
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
        found = (weight.gradient for weight in self._program.weights)
        return [gradient for gradient in found if gradient is not None and gradient.numel()]

    def _flip_next_output(self, fault: Fault, draw: random.Random) -> None:
        """Flips a bit in the next output of one of the rank's layers, once."""
        layers = [layer for part in self._program.parts for layer in part.layers]

        def damage(module: nn.Module, inputs: Any, output: Any) -> None:
            handle.remove()
            first = output[0] if isinstance(output, (tuple, list)) else output
            _flip([first], fault, draw)

        handle = draw.choice(layers).register_forward_hook(damage)


def _flip(tensors: list[torch.Tensor], fault: Fault, draw: random.Random) -> None:
    """Flips a bit of one element, drawn from all elements of some tensors."""
    at = 0 if fault.seed < 0 else draw.randrange(sum(tensor.numel() for tensor in tensors))
    for tensor in tensors:
        if at < tensor.numel():
            # `.data` leaves autograd's version count alone, as a broken memory cell does.
            place = tuple(int(index) for index in torch.unravel_index(torch.tensor(at), tensor.shape))
            element = tensor.data[place].view(1)
            if fault.bit < 0:
                element.mul_(_FACTOR)
            else:
                size = element.element_size()
                integer = element.view(_AS_INTEGER[size])
                bit = max(0, fault.bit + 8 * size - 32)
                integer.bitwise_xor_(-(2**bit) if bit == 8 * size - 1 else 2**bit)
            return
        at -= tensor.numel()
