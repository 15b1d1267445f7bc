"""The `replicate` axis: every rank holds a copy and reads other rows; gradients are summed under backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.compression import GradientCompressor
from meshwright.parallel.gradient_reducer import GradientReducer


def wrap(
    parameters: Iterable[nn.Parameter],
    axis_group: AxisGroup,
    layers: Mapping[nn.Parameter, int] | None = None,
    compressor: GradientCompressor | None = None,
    names: Sequence[str] = (),
    waits_in_backward: bool = True,
) -> GradientReducer:
    """Makes every gradient a sum over the axis, communicated while backward still runs.

    Args:
        parameters: plain ones of any shape, in the order in which forward uses them; they get hooks.
        axis_group: collectives of the ranks that hold copies of them.
        layers: number of the layer that each belongs to, for messages.
        compressor: sums in rounded numbers; None for exact sums.
        names: of the parameters, in their order, by which a compressor rounds.
        waits_in_backward: whether compressed sums go on to their next exchange under backward.

    Returns:
        The reducer: call `begin_microbatch` before each micro-batch and `finish` after the last backward.
    """
    return GradientReducer(parameters, axis_group, layers, compressor, names, waits_in_backward)
