"""Gives a wrapped meta module its memory: each parameter becomes this rank's part alone, filled from where it comes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshwright.runtime.weights import Box, Weight, owners, placed_like

Fill = Callable[[str, Box], torch.Tensor]
"""Returns the values of one part of a weight: (name, box) to a CPU tensor of the box's shape."""


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype, fill: Fill) -> None:
    """Replaces every meta parameter by this rank's part of it, with values from ``fill``; ties stay ties.

    Args:
        module: wrapped by the axes, parameters on the meta device (plain or DTensor).
        device: where the parts go.
        dtype: of the master weights (floating-point ones; others keep theirs).
        fill: values by name and box.
    """
    with torch.no_grad():
        for name, parameter, places in list(owners(module)):
            made = _made(Weight(name, parameter), device, dtype, fill)
            for part, attribute in places:
                part._parameters[attribute] = made


def _made(weight: Weight, device: torch.device, dtype: torch.dtype, fill: Fill) -> nn.Parameter:
    parameter = weight.parameter
    kind = dtype if parameter.is_floating_point() else parameter.dtype
    box = weight.box
    local = torch.empty([stop - start for start, stop in box], dtype=kind, device=device)
    if local.numel():
        local.copy_(fill(weight.name, box))
    made = nn.Parameter(placed_like(parameter, local), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
